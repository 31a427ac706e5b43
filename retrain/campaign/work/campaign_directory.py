"""The directory of a campaign: its plan and the outcome of every run. All state is in files.

runs/NAME/
    campaign.toml  plan.json                 a copy of the campaign's file, and the list of its runs
    campaign-before-N.toml                   files of declarations that changed after a run had started
    cells/CONDITION/sSEED/                   an ordinary run directory, and in addition
        config.toml                          complete configuration: `retrain train` on it repeats the run
        log.txt  outcome.json                output and outcome of the run
    leases/CONDITION/sSEED/N.json            workers of the run: see retrain.campaign.work.lease
    report.html  results.csv                 see retrain.campaign.verdict.verdict_page
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli

from retrain.campaign.plan.declaration import history
from retrain.campaign.plan.load_campaign import LoadedCampaign, free_tables
from retrain.campaign.plan.plan_file import FILE, PLAN, REPORT, Job, jobs, plan_of, read_outcome, read_plan
from retrain.config.document import show
from retrain.config.positions import leaves
from retrain.errors import ConfigError, ConfigProblem, StorageError
from retrain.storage.run_files import understood
from retrain.system.files import remove, write_text, writing
from retrain.system.lock import Lock, exclusive

_LOCK = "lock"
_DELETED: Mapping[str, Sequence[str]] = {
    "all": (),
    "model": ("checkpoints",),
    "metrics": ("checkpoints", "best", "model"),
}
"""Subdirectories of a run that are deleted when it is done, by value of `[campaign] keep`."""


class CampaignDirectory:
    """A campaign on disk.

    Attributes:
        path: runs/NAME.
        plan: content of plan.json.
        jobs: all runs; all conditions of the first seed come before those of the second.

    Raises:
        ConfigError: the path is not a campaign.
        StorageError: its plan cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan = read_plan(path)
        self.jobs = self.plan.cells

    def run(self, job: Job) -> Path:
        """Return the run directory of a job."""
        return self.path / job.path

    def outcome(self, job: Job) -> Mapping[str, Any]:
        """Return the outcome of a job; empty if it does not exist.

        An unreadable outcome.json counts as none, so the job is run again.
        """
        with suppress(StorageError):
            return read_outcome(self.run(job))
        return {}

    def finish(self, job: Job, outcome: Mapping[str, Any]) -> bool:
        """Write the outcome of a job. If it already has one, write nothing and return False.

        Raises:
            StorageError: the run's directory cannot be written.
        """
        with writing(self.run(job)), exclusive(self.run(job) / "outcome.lock", waiting=lambda: None):
            if self.outcome(job):
                return False
            write_text(self.run(job) / "outcome.json", json.dumps(outcome) + "\n")
        return True

    def trim(self, job: Job) -> None:
        """Delete the files of a finished job that `[campaign] keep` does not keep.

        If a worker dies while it deletes files, a later call deletes the rest. Files of a run that another process has
        locked are not deleted.
        """
        run = self.run(job)
        deleted = [run / name for name in _DELETED[self.plan.keep] if (run / name).exists()]
        if not deleted or self.outcome(job).get("status") != "done":
            return
        lock = Lock(run / "lock")
        with suppress(ConfigError, OSError):
            lock.acquire()
            for folder in deleted:
                remove(folder)
            lock.release()

    def forget_failures(self) -> None:
        """Delete the outcomes of failed jobs, so that they are resumed from their checkpoints."""
        for job in self.jobs:
            if self.outcome(job).get("status") == "failed":
                with writing(self.run(job)):
                    (self.run(job) / "outcome.json").unlink()


def create(loaded: LoadedCampaign, fresh: bool = False) -> CampaignDirectory:
    """Write the plan of a campaign, and the configuration of every run that has not started.

    Args:
        loaded: the campaign.
        fresh: delete an earlier campaign of the same name first.
    Raises:
        ConfigError: the directory is not a campaign, or its runs were started with another configuration.
        StorageError: the directory cannot be written.
    """
    path = loaded.directory
    if path.exists() and not path.is_dir():
        raise StorageError(f"{path} is not a directory; move that file, or choose another [campaign] name")
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        with exclusive(path / _LOCK, waiting=lambda: None):  # another `retrain campaign` may be writing the plan
            if not (path / PLAN).exists() and any(entry.name != _LOCK for entry in path.iterdir()):
                problem = "exists and is not a campaign: it has no plan.json"
                raise ConfigError.at(path, "campaign directory", problem, "choose another [campaign] name")
            if fresh:
                # The plan last: if interrupted, this is still a campaign.
                for part in ("cells", "leases", REPORT, PLAN):
                    remove(path / part)
            _write(path, loaded)
    return CampaignDirectory(path)


def _write(path: Path, loaded: LoadedCampaign) -> None:
    by_label = {condition.label: condition for condition in loaded.conditions}
    runs = [(path / job.path, by_label[job.condition], job.seed) for job in jobs(loaded)]
    changes = [_changes(run, loaded.cell_config(condition, seed)) for run, condition, seed in runs]
    if problems := [problem for changes_of_run in changes for problem in changes_of_run]:
        raise ConfigError(problems[:10])
    for run, condition, seed in runs:
        run.mkdir(parents=True, exist_ok=True)
        if not (run / "config.resolved.json").exists():
            write_text(run / "config.toml", loaded.cell_toml(condition, seed))
    # Before the campaign's file is replaced, of which a changed declaration keeps a copy.
    plan = plan_of(loaded, **history(path, loaded))
    write_text(path / FILE, loaded.text)
    write_text(path / PLAN, json.dumps(plan, indent=2) + "\n")


def _changes(run: Path, config: Mapping[str, Any]) -> list[ConfigProblem]:
    """Return the differences from the configuration that a run was started with; empty if it was not started."""
    if not (run / "config.resolved.json").exists():
        return []
    with understood(run / "config.toml"):
        old, new = (
            {path: value for path, value in leaves(data) if path[0] not in free_tables()}
            for data in (tomli.loads((run / "config.toml").read_text(encoding="utf-8")), config)
        )
    fix = "change it back, choose another [campaign] name, or start over with --fresh, which deletes all runs"
    return [
        ConfigProblem(str(run), 0, 0, show(path), f"{old.get(path)} -> {new.get(path)} since the run was started", fix)
        for path in dict.fromkeys((*old, *new))
        if old.get(path) != new.get(path)
    ]
