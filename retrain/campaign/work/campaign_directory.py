"""The directory of a campaign: its plan and the outcome of every run. All state is files.

runs/NAME/
    campaign.toml  plan.json                 what was asked for, and the runs that it means
    cells/CONDITION/sSEED/                   an ordinary run directory, and with it
        config.toml                          everything about the run: `retrain train` repeats it alone
        log.txt  outcome.json                what it printed, and how it ended
    leases/CONDITION/sSEED/N.json            who works or worked on it: see retrain.campaign.work.lease
    report.html  results.csv                 see retrain.campaign.verdict.campaign_page
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli

from retrain.campaign.plan.load_campaign import LoadedCampaign, tracker_tables
from retrain.campaign.plan.plan_file import PLAN, Job, jobs, plan_of, read_outcome, read_plan
from retrain.config.document import show
from retrain.config.presets import leaves
from retrain.errors import ConfigError, ConfigProblem, StorageError
from retrain.storage.run_files import understood
from retrain.system.files import remove, write_text, writing
from retrain.system.lock import exclusive

_LOCK = "lock"
_FREE = ("logging", "checkpoint")


class CampaignDirectory:
    """A campaign on disk.

    Attributes:
        path: runs/NAME.
        plan: what plan.json holds.
        jobs: every run, all conditions of the first seed before those of the second.

    Raises:
        ConfigError: there is no campaign at this path. StorageError: its plan cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan = read_plan(path)
        self.jobs = self.plan.cells

    def run(self, job: Job) -> Path:
        """The run directory of a job."""
        return self.path / job.path

    def outcome(self, job: Job) -> Mapping[str, Any]:
        """How the job ended; empty if it has not, or if the file cannot be read, and then the job is run again."""
        with suppress(StorageError):
            return read_outcome(self.run(job))
        return {}

    def pending(self) -> list[Job]:
        """Jobs without an outcome."""
        return [job for job in self.jobs if not self.outcome(job)]

    def finish(self, job: Job, outcome: Mapping[str, Any]) -> bool:
        """Write how the job ended. If it has an outcome already, return False and write nothing."""
        with exclusive(self.run(job) / "outcome.lock", waiting=lambda: None):
            if self.outcome(job):
                return False
            write_text(self.run(job) / "outcome.json", json.dumps(outcome) + "\n")
        return True

    def forget_failures(self) -> None:
        """Delete the outcomes of failed jobs, so that these are run again, from their checkpoints."""
        for job in self.jobs:
            if self.outcome(job).get("status") == "failed":
                (self.run(job) / "outcome.json").unlink()


def create(loaded: LoadedCampaign, fresh: bool = False) -> CampaignDirectory:
    """Write a campaign's plan and the configuration of every run that has not started.

    Args:
        fresh: delete an earlier campaign of that name first.
    Raises:
        ConfigError: the directory holds something else, or runs with another configuration.
        StorageError: it cannot be written.
    """
    path = loaded.directory
    if path.exists() and not path.is_dir():
        raise StorageError(f"{path} is not a directory; move it away, or choose another [campaign] name")
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        with exclusive(path / _LOCK, waiting=lambda: None):  # another driver may be writing the plan
            if not (path / PLAN).exists() and any(entry.name != _LOCK for entry in path.iterdir()):
                problem, fix = "exists and is not a campaign: it holds no plan.json", "choose another [campaign] name"
                raise ConfigError([ConfigProblem(str(path), 0, 0, "campaign directory", problem, fix)])
            if fresh:
                for part in ("cells", "leases", PLAN):  # the plan last: until then this is a campaign
                    remove(path / part)
            _write(path, loaded)
    return CampaignDirectory(path)


def _write(path: Path, loaded: LoadedCampaign) -> None:
    by_label = {condition.label: condition for condition in loaded.conditions}
    runs = [(path / job.path, by_label[job.condition], job.seed) for job in jobs(loaded)]
    changes = [_changes(run, loaded.cell_config(condition, seed)) for run, condition, seed in runs]
    if problems := [problem for found in changes for problem in found]:
        raise ConfigError(problems[:10])
    for run, condition, seed in runs:
        run.mkdir(parents=True, exist_ok=True)
        if not (run / "config.resolved.json").exists():
            write_text(run / "config.toml", loaded.cell_toml(condition, seed))
    write_text(path / "campaign.toml", loaded.text)
    write_text(path / PLAN, json.dumps(plan_of(loaded), indent=2) + "\n")


def _changes(run: Path, config: Mapping[str, Any]) -> list[ConfigProblem]:
    """What differs from the configuration that a run was started with; nothing if it was not started."""
    if not (run / "config.resolved.json").exists():
        return []
    with understood(run / "config.toml"):
        old, new = (
            {path: value for path, value in leaves(data) if path[0] not in (*_FREE, *tracker_tables())}
            for data in (tomli.loads((run / "config.toml").read_text(encoding="utf-8")), config)
        )
    fix = "change it back, choose another [campaign] name, or start again with --fresh, which deletes all runs"
    return [
        ConfigProblem(str(run), 0, 0, show(path), f"{old.get(path)} -> {new.get(path)} since the run was started", fix)
        for path in dict.fromkeys((*old, *new))
        if old.get(path) != new.get(path)
    ]
