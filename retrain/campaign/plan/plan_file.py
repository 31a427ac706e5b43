"""plan.json in a campaign's directory: what was asked for, and the runs that this means."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from retrain.campaign.plan.load_campaign import LoadedCampaign
from retrain.errors import ConfigError, ConfigProblem
from retrain.storage.run_files import understood
from retrain.system.records import read_json

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


_JOBS = TypeAdapter(list[Job])


def read_plan(directory: Path) -> tuple[dict[str, Any], list[Job]]:
    """The plan of a campaign, and its jobs.

    Raises:
        ConfigError: there is no campaign in this directory. StorageError: its plan cannot be read.
    """
    plan = read_json(directory / PLAN)
    if not plan:
        problem = ConfigProblem(str(directory), 0, 0, "campaign", "holds no plan.json", "give runs/NAME of a campaign")
        raise ConfigError([problem])
    with understood(directory / PLAN):
        return plan, _JOBS.validate_python(plan["cells"])


def jobs(loaded: LoadedCampaign) -> list[Job]:
    """Every run; all conditions of the first seed come before those of the second."""
    found: list[Job] = []
    for seed in loaded.settings.seed_list:
        for condition, config in zip(loaded.conditions, loaded.configs, strict=True):
            cell, steps = f"{condition.folder}/s{seed}", config.config.training.max_steps
            found.append(Job(cell, condition.label, seed, steps, f"cells/{cell}"))
    return found


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
