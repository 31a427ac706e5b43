"""Progress of a campaign, read only from its files, and cheap enough to be computed twice a second."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Collection
from pathlib import Path
from statistics import fmean
from typing import Any

from retrain.campaign.plan.plan_file import Job, read_outcome
from retrain.campaign.work.campaign_directory import CampaignDirectory
from retrain.campaign.work.lease import held
from retrain.errors import StorageError
from retrain.storage.run_files import parse_row, understood
from retrain.system.files import open_plain
from retrain.system.records import damaged, read_json

_RECENT = 20
_ENDED = ("done", "failed", "not needed")


class Progress:
    """Reads the progress of a campaign; each call reads only the rows that were appended since the previous one.

    Args:
        path: directory of the campaign.
    """

    def __init__(self, path: Path) -> None:
        self._campaign = CampaignDirectory(path)
        self._tails: dict[Path, _Tail] = {}

    def facts(self, unneeded: Collection[str] = ()) -> dict[str, Any]:
        """Return `path`, `runs` (one row per job), and `total`, `done`, `failed`, `running`, `unreadable`, `left_s`.

        The counts and the seconds left (`left_s`) are over all needed runs. A row has id, condition, seed, state
        ("waiting", "running", "stopped", "done", "failed", "unreadable", "not needed"), steps, max_steps, accuracy of
        the last evaluation, left_s of a running job, and host, attempts, reason and seconds of one that has ended.
        Unknown values are None.

        Args:
            unneeded: ids of the jobs whose condition has stopped at a look.
        """
        rows = [self._row(job) for job in self._campaign.jobs]
        for row in rows:
            if row["id"] in unneeded:
                row["state"] = "not needed"
        states = Counter(row["state"] for row in rows)
        count = {state: states[state] for state in ("done", "failed", "running", "unreadable")}
        total = len(rows) - states["not needed"]
        return {"path": str(self._campaign.path), "total": total, **count, "left_s": _left(rows), "runs": rows}

    def _row(self, job: Job) -> dict[str, Any]:
        identity = {"id": job.id, "condition": job.condition, "seed": job.seed, "max_steps": job.max_steps}
        run = self._campaign.run(job)
        try:
            with understood(run):
                return identity | self._read(job, run)
        except StorageError as error:
            nothing = dict.fromkeys(("accuracy", "step_s", "left_s", "host", "attempts", "seconds"))
            return identity | nothing | {"state": "unreadable", "steps": 0, "reason": str(error)}

    def _read(self, job: Job, run: Path) -> dict[str, Any]:
        outcome = read_outcome(run)
        metrics = self._tail(run / "metrics.jsonl")
        evals = self._tail(run / "eval.jsonl")
        working = held(self._campaign.path / "leases", job.id)
        state = str(outcome.get("status") or {None: "waiting", True: "running", False: "stopped"}[working])
        # Without an outcome.json the run's own status.json counts, as in the report.
        if not outcome and not working and read_json(run / "status.json").get("outcome") == "finished":
            state = "done"
        times = [float(row["time/step_s"]) for row in metrics.rows if row.get("time/step_s") is not None]
        step_s = sum(times) / len(times) if times else None
        return {
            "state": state,
            "steps": metrics.count,
            "accuracy": evals.rows[-1].get("accuracy") if evals.rows else None,
            "step_s": step_s,
            "left_s": (job.max_steps - metrics.count) * step_s if state == "running" and step_s else None,
            **{name: outcome.get(name) for name in ("host", "attempts", "reason", "seconds")},
        }

    def _tail(self, file: Path) -> _Tail:
        return self._tails.setdefault(file, _Tail(file)).read()


class _Tail:
    """The last rows of a growing JSONL file, and the number of all its rows."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._at = 0
        self.count = 0
        self.rows: deque[dict[str, Any]] = deque(maxlen=_RECENT)

    def read(self) -> _Tail:
        """Read the rows that were appended since the last call, and return self."""
        data = b""
        size = 0
        try:
            with open_plain(self._file) as file:
                size = os.fstat(file.fileno()).st_size
                if size > self._at:
                    file.seek(self._at)
                    data = file.read()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise damaged(str(self._file), error) from error
        if size < self._at:  # a resumed run removed rows after its checkpoint
            self._at = self.count = 0
            self.rows.clear()
            return self.read() if size else self
        for line in data.split(b"\n")[:-1]:
            row = parse_row(line, self._file, self.count + 1)
            self._at += len(line) + 1
            self.count += 1
            self.rows.append(row)
        return self


def _left(rows: list[dict[str, Any]]) -> float | None:
    """Return the seconds until all jobs are done, with as many at a time as now; None if that is unknown.

    A step costs what it cost the jobs that are done, with their start, evaluations and saving; before one is done, the
    mean of the running jobs' own steps.
    """
    running = [row["step_s"] for row in rows if row["state"] == "running"]
    done = [row["seconds"] / row["steps"] for row in rows if row["state"] == "done" and row["seconds"] and row["steps"]]
    costs = done or [step_s for step_s in running if step_s]
    steps = sum(row["max_steps"] - row["steps"] for row in rows if row["state"] not in _ENDED)
    return steps * fmean(costs) / len(running) if running and costs else None
