"""plan.json in a campaign's directory: what was asked for, and the runs that this means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, model_validator
from typing_extensions import TypedDict

from retrain.campaign.plan.campaign_schema import Campaign
from retrain.campaign.plan.load_campaign import LoadedCampaign
from retrain.config.schema import Array, Seed
from retrain.errors import ConfigError, ConfigProblem
from retrain.system.records import read_object

_Path = Annotated[str, Field(pattern=r"^[^/\x00][^\x00]*$")]

PLAN = "plan.json"


@dataclass(frozen=True)
class Job:
    """The run of one condition with one seed.

    Attributes:
        id: CONDITION/sSEED.
        condition, seed: label of the condition, and the seed.
        max_steps: steps of the run.
        path: run directory within the campaign's.
        task: of the campaign's tasks, the one that it is run on.
    """

    __pydantic_config__: ClassVar = ConfigDict(strict=False)  # a strict one takes instances alone
    id: _Path
    condition: str
    seed: Seed
    max_steps: Seed
    path: _Path
    task: str = ""

    @property
    def method(self) -> str:
        """The condition without its task."""
        return self.condition.removeprefix(f"{self.task}: ")


class Premise(TypedDict):
    """What a task says of itself.

    Attributes:
        about: the first sentence of its docstring.
        bounds: least and greatest value that figures of an evaluation have before training.
    """

    about: str
    bounds: dict[str, Annotated[tuple[float, float], Array]]


class Plan(Campaign):
    """What plan.json holds: the settings of `[campaign]`, and what they came to.

    Attributes:
        file, folder, overrides: the campaign's file, where it was started from, and what `--set` changed of it.
        ladder: pairs (condition, against) in which the first adds something to the second.
        premises: what the tasks say of themselves, by their names.
        cells: the runs.
    """

    model_config = ConfigDict(extra="ignore")

    file: str = ""
    folder: str = ""
    overrides: Annotated[tuple[str, ...], Array] = ()
    ladder: Annotated[tuple[Annotated[tuple[str, str], Array], ...], Array] = ()
    premises: dict[str, Premise] = Field(default_factory=dict[str, Any])
    cells: Annotated[tuple[Job, ...], Array, Field(min_length=1)]

    @model_validator(mode="after")
    def _known(self) -> Plan:
        labels = {cell.method for cell in self.cells}
        named = {label for step in self.ladder for label in step} | {
            label for label in (self.baseline, self.primary) if label
        }
        if unknown := named - labels:
            raise ValueError(f"no cell is of condition {min(unknown)!r}")
        return self


class _Outcome(TypedDict):
    status: Literal["done", "failed"]
    exit_code: NotRequired[int | None]
    attempts: NotRequired[Seed | None]
    seconds: NotRequired[float | None]
    reason: NotRequired[str | None]
    host: NotRequired[str | None]


_PLAN, _OUTCOME = TypeAdapter(Plan), TypeAdapter(_Outcome)


def read_outcome(run: Path) -> Mapping[str, Any]:
    """What outcome.json of a run says; empty if there is none, StorageError if it cannot be read."""
    file = run / "outcome.json"
    return read_object(file, _OUTCOME) if file.exists() else {}


def read_plan(directory: Path) -> Plan:
    """The plan of a campaign.

    Raises:
        ConfigError: there is no campaign in this directory. StorageError: its plan cannot be read.
    """
    if not (directory / PLAN).exists():
        raise ConfigError([ConfigProblem(str(directory), 0, 0, "campaign", "holds no plan.json", "give runs/NAME")])
    return read_object(directory / PLAN, _PLAN)


def jobs(loaded: LoadedCampaign) -> list[Job]:
    """Every run; all conditions of the first seed come before those of the second."""
    return [
        Job(
            f"{one.folder}/s{seed}",
            one.label,
            seed,
            config.config.training.max_steps,
            f"cells/{one.folder}/s{seed}",
            one.task,
        )
        for seed in loaded.settings.seed_list
        for one, config in zip(loaded.conditions, loaded.configs, strict=True)
    ]


def plan_of(loaded: LoadedCampaign) -> dict[str, Any]:
    """The content of plan.json."""
    return {
        "file": loaded.file,
        "folder": str(Path.cwd()),
        "overrides": loaded.overrides,
        "baseline": loaded.baseline,
        "ladder": loaded.ladder,
        "premises": _premises(loaded),
        **loaded.settings.model_dump(
            include={"tasks", "primary", "threshold", "alpha", "executor", "slots", "ranks", "retries", "lease_s"}
        ),
        "cells": [asdict(job) for job in jobs(loaded)],
    }


def _premises(loaded: LoadedCampaign) -> dict[str, Premise]:
    tasks = {
        one.task: config.components.one("task") for one, config in zip(loaded.conditions, loaded.configs, strict=True)
    }
    return {
        name: Premise(
            about=" ".join((bound.component.target.__doc__ or "").partition("\n\n")[0].split()),
            bounds=dict(bound.component.traits.get("premise", {})),
        )
        for name, bound in tasks.items()
        if name
    }
