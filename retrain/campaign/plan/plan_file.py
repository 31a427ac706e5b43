"""plan.json in a campaign's directory: the settings of the campaign and the list of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, model_validator
from typing_extensions import TypedDict

from retrain.campaign.plan.campaign_schema import Campaign
from retrain.campaign.plan.load_campaign import LoadedCampaign
from retrain.config.schema import Array, Seed
from retrain.errors import ConfigError
from retrain.system.records import read_object


def _inside(path: str) -> str:
    """Refuse a path that leads out of the campaign's directory, since somebody else may have written the plan."""
    if ".." in Path(path).parts:
        raise ValueError(f"leads out of the campaign: {path!r}")
    return path


_Path = Annotated[str, Field(pattern=r"^[^/\x00][^\x00]*$"), AfterValidator(_inside)]

PLAN = "plan.json"
FILE = "campaign.toml"
REPORT = "report.html"
_NOT_COPIED = {"name", "base", "conditions", "grid", "seeds", "max_steps", "baseline", "looks"}
"""Settings that a plan has in another form, or only through its runs."""


@dataclass(frozen=True)
class Job:
    """The run of one condition with one seed.

    Attributes:
        id: CONDITION/sSEED.
        condition: label of the condition.
        seed: seed of the campaign; the run's own seed adds the condition's `seed_offset`.
        max_steps: steps of the run.
        path: run directory, relative to the campaign's directory.
        task: task of the run, in a campaign with tasks.
    """

    # In strict mode pydantic would accept only instances of Job, not the objects of a JSON file.
    __pydantic_config__: ClassVar = ConfigDict(strict=False)
    id: _Path
    condition: str
    seed: Seed
    max_steps: Seed
    path: _Path
    task: str = ""

    @property
    def method(self) -> str:
        """Label of the condition without its task."""
        return self.condition.removeprefix(f"{self.task}: ")


class LooksDeclared(TypedDict):
    """The declaration of a campaign's looks.

    Attributes:
        at: time at which the looks, or the number of seeds, were last set or changed, ISO 8601 in UTC.
        after: number of runs that had started by then. If it is not 0, the declaration is late.
        runs: number of runs that were planned at that time, including those of an earlier plan.
    """

    at: str
    after: Seed
    runs: Seed


class Declared(LooksDeclared):
    """The declaration of a campaign's primary comparison; `at` is the time at which its plan was written.

    Attributes:
        sha256: hash of the campaign's file.
        terms: settings that decide what the declared comparison tests, by key.
        earlier: names of the kept files of the campaign as declared earlier, if runs had started by then.
    """

    sha256: str
    terms: dict[str, Any]
    earlier: NotRequired[list[str]]


class Plan(Campaign):
    """Content of plan.json: the settings of `[campaign]`, and the values derived from them.

    Attributes:
        file: path of the campaign's file.
        folder: current directory in which the campaign was started.
        overrides: changes by `--set`, as `key=value`.
        declared: declaration of `primary` and `claim`; None if neither is set now or was when the first run started.
        looks_declared: declaration of the looks; None if there are none now and were none when the first run started.
        seeds_reported: number of seeds in a report that was written before seeds were added without looks; None if
            that did not happen.
        removed: labels of conditions that were taken out of the file after runs of theirs had started.
        ladder: pairs (condition, against) in which the first extends the second.
        control_of: control -> the condition that it is compared with, if that is not the baseline.
        cells: all runs.

    Raises:
        ValueError: baseline, primary, controls, control_of or ladder name a condition without runs.
    """

    model_config = ConfigDict(extra="allow")  # facts of `extensions`, by their names

    file: str = ""
    folder: str = ""
    overrides: Annotated[tuple[str, ...], Array] = ()
    declared: Declared | None = None
    looks_declared: LooksDeclared | None = None
    seeds_reported: Seed | None = None
    removed: Annotated[tuple[str, ...], Array] = ()
    ladder: Annotated[tuple[Annotated[tuple[str, str], Array], ...], Array] = ()
    control_of: dict[str, str] = Field(default_factory=dict[str, str])
    cells: Annotated[tuple[Job, ...], Array, Field(min_length=1)]

    @property
    def seed_list(self) -> list[int]:
        """Seeds of the runs, in their order."""
        return list(dict.fromkeys(cell.seed for cell in self.cells))

    @model_validator(mode="after")
    def _known(self) -> Plan:
        named = [self.baseline, self.primary, *chain(*self.ladder), *self.controls, *self.control_of.values()]
        if unknown := {label for label in named if label} - {cell.method for cell in self.cells}:
            raise ValueError(f"condition {min(unknown)!r} has no cells")
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
    """Read the outcome.json of a run; empty if the file does not exist.

    Raises:
        StorageError: the file cannot be read or is invalid.
    """
    file = run / "outcome.json"
    return read_object(file, _OUTCOME) if file.exists() else {}


def read_plan(directory: Path) -> Plan:
    """Read the plan of a campaign.

    Raises:
        ConfigError: the directory is not a campaign.
        StorageError: the plan cannot be read or is invalid.
    """
    if not (directory / PLAN).exists():
        raise ConfigError.at(directory, "campaign", "has no plan.json", "give runs/NAME")
    return read_object(directory / PLAN, _PLAN)


def jobs(loaded: LoadedCampaign) -> list[Job]:
    """Return all runs; all conditions of the first seed come before those of the second."""
    return [
        Job(
            f"{condition.folder}/s{seed}",
            condition.label,
            seed,
            config.config.training.max_steps,
            f"cells/{condition.folder}/s{seed}",
            condition.task,
        )
        for seed in loaded.settings.seed_list
        for condition, config in zip(loaded.conditions, loaded.configs, strict=True)
    ]


def extensions() -> dict[str, Any]:
    """Return {name: module} of the entry points in the group `retrain.campaign`, which add facts to plans and reports.

    Each module has two functions: `planned(campaign)` returns JSON data for plan.json, and `reported(data, tables)`
    returns the fields of `AddedFacts`.
    """
    return {point.name: point.load() for point in entry_points(group="retrain.campaign")}


def plan_of(loaded: LoadedCampaign, **history: Any) -> dict[str, Any]:
    """Return the content of plan.json.

    Args:
        loaded: the campaign.
        history: values that depend on the earlier plan.json; see `retrain.campaign.plan.declaration.history`.
    """
    return {
        **history,
        "file": loaded.file,
        "folder": str(Path.cwd()),
        "overrides": loaded.overrides,
        "baseline": loaded.baseline,
        "ladder": loaded.ladder,
        "control_of": loaded.control_of,
        "looks": loaded.settings.look_sizes[:-1],
        # Seeds, conditions and steps are those of the cells; the others are above.
        **loaded.settings.model_dump(exclude=_NOT_COPIED),
        "cells": [asdict(job) for job in jobs(loaded)],
        **{name: module.planned(loaded) for name, module in extensions().items()},
    }
