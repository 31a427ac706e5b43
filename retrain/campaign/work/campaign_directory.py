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
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli

from retrain.campaign.plan.conditions import Condition, leaves
from retrain.campaign.plan.load_campaign import LoadedCampaign, tracker_tables
from retrain.config.document import show
from retrain.errors import ConfigError, ConfigProblem, StorageError
from retrain.storage.run_directory import read_json, write_text

PLAN = "plan.json"
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


class CampaignDirectory:
    """A campaign on disk.

    Attributes:
        path: runs/NAME.
        plan: what plan.json holds.
        jobs: every run, all conditions of the first seed before those of the second.

    Raises:
        ConfigError: there is no campaign at this path.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.plan = path, read_json(path / PLAN)
        if "cells" not in self.plan:
            problem = ConfigProblem(str(path), 0, 0, "campaign", "holds no plan.json", "give runs/NAME of a campaign")
            raise ConfigError([problem])
        self.jobs = [Job(**cell) for cell in self.plan["cells"]]

    def run(self, job: Job) -> Path:
        """The run directory of a job."""
        return self.path / job.path

    def outcome(self, job: Job) -> dict[str, Any]:
        """How the job ended; empty while it has not."""
        return read_json(self.run(job) / "outcome.json")

    def pending(self) -> list[Job]:
        """Jobs without an outcome."""
        return [job for job in self.jobs if not (self.run(job) / "outcome.json").exists()]

    def finish(self, job: Job, outcome: Mapping[str, Any]) -> bool:
        """Write how the job ended; False, and nothing is written, if that has been told already."""
        path = self.run(job) / "outcome.json"
        stage = path.with_name(f"outcome.{uuid.uuid4().hex}.tmp")
        with stage.open("w") as file:
            file.write(json.dumps(outcome) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(stage, path)  # unlike a rename, this never replaces what is there
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links: the lease alone keeps others from writing
            if path.exists():
                return False
            stage.rename(path)
        finally:
            stage.unlink(missing_ok=True)
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
    if path.exists() and not (path / PLAN).exists() and any(path.iterdir()):
        raise _refusal(path, "exists and is not a campaign", "choose another [campaign] name")
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
    try:
        for condition, job in jobs:
            (path / job.path).mkdir(parents=True, exist_ok=True)
            if not (path / job.path / "config.resolved.json").exists():
                write_text(path / job.path / "config.toml", loaded.cell_toml(condition, job.seed))
        write_text(path / "campaign.toml", loaded.text)
        write_text(path / PLAN, json.dumps(_plan(loaded, [job for _, job in jobs]), indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}; check its permissions") from error
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
        for data in (tomli.loads((run / "config.toml").read_text()), config)
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
