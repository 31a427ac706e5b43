"""plan.json in a campaign's directory: what was asked for, and the runs that this means."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

from retrain.campaign.plan.load_campaign import LoadedCampaign
from retrain.errors import ConfigError, ConfigProblem
from retrain.storage.run_files import understood
from retrain.system.records import read_object

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


class Outcome(TypedDict):
    """How a job ended."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # pyright: ignore[reportGeneralTypeIssues]
    status: Literal["done", "failed"]
    exit_code: NotRequired[int]
    attempts: NotRequired[int]
    reason: NotRequired[str]
    host: NotRequired[str]


class Plan(TypedDict):
    """What every reader of a plan relies on."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # pyright: ignore[reportGeneralTypeIssues]
    cells: Annotated[list[dict[str, Any]], Field(min_length=1)]
    baseline: NotRequired[str | None]
    threshold: NotRequired[float | None]
    alpha: NotRequired[Annotated[float, Field(gt=0, lt=1)]]


_JOBS, _OUTCOME, _PLAN = TypeAdapter(list[Job]), TypeAdapter(Outcome), TypeAdapter(Plan)


def read_outcome(run: Path) -> dict[str, Any]:
    """What outcome.json of a run says; empty if there is none, StorageError if it cannot be read."""
    file = run / "outcome.json"
    return dict(read_object(file, _OUTCOME)) if file.exists() else {}


def read_plan(directory: Path) -> tuple[dict[str, Any], list[Job]]:
    """The plan of a campaign, and its jobs.

    Raises:
        ConfigError: there is no campaign in this directory. StorageError: its plan cannot be read.
    """
    if not (directory / PLAN).exists():
        problem = ConfigProblem(str(directory), 0, 0, "campaign", "holds no plan.json", "give runs/NAME of a campaign")
        raise ConfigError([problem])
    plan = dict(read_object(directory / PLAN, _PLAN))
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
