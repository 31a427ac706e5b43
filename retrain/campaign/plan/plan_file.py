"""plan.json in a campaign's directory: what was asked for, and the runs that this means."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from retrain.campaign.plan.load_campaign import LoadedCampaign
from retrain.errors import ConfigError, ConfigProblem
from retrain.storage.run_files import understood
from retrain.system.records import damaged, read_json

PLAN = "plan.json"


@dataclass(frozen=True)
class Job:
    """The run of one condition with one seed.

    Attributes:
        id: CONDITION/sSEED.
        condition, seed: label of the condition, and the seed.
        max_steps: steps of the run.
        path: run directory within the campaign's.
    """

    id: str
    condition: str
    seed: int
    max_steps: int
    path: str


_JOBS = TypeAdapter(Annotated[list[Job], Field(min_length=1)])


def read_outcome(run: Path) -> dict[str, Any]:
    """What outcome.json of a run says; empty if there is none, StorageError if it cannot be read."""
    found = read_json(run / "outcome.json")
    if found and found.get("status") not in ("done", "failed"):
        raise damaged(f"{run / 'outcome.json'}:1", ValueError('"status" is neither "done" nor "failed"'))
    return found


def read_plan(directory: Path) -> tuple[dict[str, Any], list[Job]]:
    """The plan of a campaign, and its jobs.

    Raises:
        ConfigError: there is no campaign in this directory. StorageError: its plan cannot be read.
    """
    if not (directory / PLAN).exists():
        raise ConfigError([ConfigProblem(str(directory), 0, 0, "campaign", "holds no plan.json", "give runs/NAME")])
    plan = read_json(directory / PLAN)
    with understood(directory / PLAN):
        return plan, _JOBS.validate_python(plan["cells"])


def jobs(loaded: LoadedCampaign) -> list[Job]:
    """Every run; all conditions of the first seed come before those of the second."""
    return [
        Job(f"{one.folder}/s{seed}", one.label, seed, config.config.training.max_steps, f"cells/{one.folder}/s{seed}")
        for seed in loaded.settings.seed_list
        for one, config in zip(loaded.conditions, loaded.configs, strict=True)
    ]


def plan_of(loaded: LoadedCampaign) -> dict[str, Any]:
    """The content of plan.json."""
    return {
        "file": loaded.file,
        "folder": str(Path.cwd()),
        "baseline": loaded.baseline,
        "ladder": loaded.ladder,
        **loaded.settings.model_dump(include={"threshold", "alpha", "executor", "slots", "retries", "lease_s"}),
        "cells": [asdict(job) for job in jobs(loaded)],
    }
