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
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli
from pydantic import TypeAdapter

from retrain.campaign.plan.conditions import Condition, leaves
from retrain.campaign.plan.load_campaign import LoadedCampaign, tracker_tables
from retrain.config.document import show
from retrain.errors import ConfigError, ConfigProblem, StorageError
from retrain.storage.run_files import understood
from retrain.system.files import write_text, writing
from retrain.system.lock import exclusive
from retrain.system.records import read_json

PLAN = "plan.json"
_LOCK = "lock"
_FREE = ("logging", "checkpoint")


@dataclass(frozen=True)
class Job:
    """The run of one cell.

    Attributes:
        id: CONDITION/sSEED.
        condition, seed: label of the condition, and the seed.
        overrides: dotted key -> value, what the condition changes of the base run.
        max_steps: steps of the run.
        path: run directory within the campaign's.
    """

    id: str
    condition: str
    seed: int
    overrides: Mapping[str, Any]
    max_steps: int
    path: str


_JOB = TypeAdapter(Job)


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
        self.path, self.plan = path, read_json(path / PLAN)
        if not self.plan:
            problem = ConfigProblem(str(path), 0, 0, "campaign", "holds no plan.json", "give runs/NAME of a campaign")
            raise ConfigError([problem])
        with understood(path / PLAN):
            self.jobs = [_JOB.validate_python(cell) for cell in self.plan["cells"]]

    def run(self, job: Job) -> Path:
        """The run directory of a job."""
        return self.path / job.path

    def outcome(self, job: Job) -> dict[str, Any]:
        """How the job ended; empty while it has not, or if that cannot be read: then it is taken up again."""
        with suppress(StorageError):
            return read_json(self.run(job) / "outcome.json")
        return {}

    def pending(self) -> list[Job]:
        """Jobs without an outcome."""
        return [job for job in self.jobs if not self.outcome(job)]

    def finish(self, job: Job, outcome: Mapping[str, Any]) -> bool:
        """Write how the job ended; False, and nothing is written, if that has been told already."""
        with exclusive(self.run(job) / "outcome.lock", waiting=lambda: None):
            if self.outcome(job):
                return False
            write_text(self.run(job) / "outcome.json", json.dumps(outcome) + "\n")
        return True

    def forget_failures(self) -> None:
        """Failed jobs count as not run: they are taken up again from their checkpoints."""
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
            return _create(path, loaded, fresh)


def _create(path: Path, loaded: LoadedCampaign, fresh: bool) -> CampaignDirectory:
    if not (path / PLAN).exists() and any(entry.name != _LOCK for entry in path.iterdir()):
        raise _refusal(path, "exists and is not a campaign: it holds no plan.json", "choose another [campaign] name")
    if fresh:
        _delete(path)
    jobs = [
        (condition, _job(condition, seed, config.config.training.max_steps))
        for seed in loaded.settings.seed_list
        for condition, config in zip(loaded.conditions, loaded.configs, strict=True)
    ]
    problems = [
        problem
        for condition, job in jobs
        for problem in _changes(path / job.path, loaded.cell_config(condition, job.seed))
    ]
    if problems:
        raise ConfigError(problems[:10])
    for condition, job in jobs:
        (path / job.path).mkdir(parents=True, exist_ok=True)
        if not (path / job.path / "config.resolved.json").exists():
            write_text(path / job.path / "config.toml", loaded.cell_toml(condition, job.seed))
    write_text(path / "campaign.toml", loaded.text)
    write_text(path / PLAN, json.dumps(_plan(loaded, [job for _, job in jobs]), indent=2) + "\n")
    return CampaignDirectory(path)


def _job(condition: Condition, seed: int, max_steps: int) -> Job:
    name = f"{condition.folder}/s{seed}"
    return Job(name, condition.label, seed, condition.overrides, max_steps, f"cells/{name}")


def _plan(loaded: LoadedCampaign, jobs: list[Job]) -> dict[str, Any]:
    settings = loaded.settings
    return {
        "name": loaded.name,
        "file": loaded.file,
        "folder": str(Path.cwd()),
        "baseline": loaded.baseline,
        "ladder": loaded.ladder,
        "seeds": settings.seed_list,
        "threshold": settings.threshold,
        "alpha": settings.alpha,
        "executor": loaded.executor.name,
        "slots": settings.slots,
        "retries": settings.retries,
        "lease_s": settings.lease_s,
        "cells": [asdict(job) for job in jobs],
    }


def _changes(run: Path, config: Mapping[str, Any]) -> list[ConfigProblem]:
    """What differs from the configuration that a run was started with."""
    if not (run / "config.resolved.json").exists():
        return []
    old, new = (
        {path: value for path, value in leaves((), data) if path[0] not in (*_FREE, *tracker_tables())}
        for data in (tomli.loads((run / "config.toml").read_text(encoding="utf-8")), config)
    )
    fix = "change it back, choose another [campaign] name, or start again with --fresh, which deletes all runs"
    return [
        ConfigProblem(str(run), 0, 0, show(path), f"{old.get(path)} -> {new.get(path)} since the run was started", fix)
        for path in dict.fromkeys((*old, *new))
        if old.get(path) != new.get(path)
    ]


def _delete(path: Path) -> None:
    for name in ("cells", "leases"):
        shutil.rmtree(path / name, ignore_errors=True)
    (path / PLAN).unlink(missing_ok=True)


def _refusal(path: Path, problem: str, fix: str) -> ConfigError:
    return ConfigError([ConfigProblem(str(path), 0, 0, "campaign directory", problem, fix)])
