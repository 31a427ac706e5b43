"""`[campaign]`: what is swept, over which seeds, and how the runs are executed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from retrain.config.schema import Array, Count, Natural, Params, Positive, Section, Seed


class ConditionEntry(BaseModel):
    """One `[[campaign.conditions]]` entry: a label, and keys of the run that it sets.

    A key of `[algorithm]` may stand alone (`advantage_mode`); any other is written with its table
    (`"gtpo.beta" = 0.2`). Those keys are validated as part of the run.
    """

    model_config = ConfigDict(
        strict=True, extra="allow", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    label: Annotated[str, Field(min_length=1, max_length=100, pattern=r"[A-Za-z0-9]")] | None = None
    """Name in tables, figures and paths. Unset: made from the keys."""
    against: Annotated[str, Field(min_length=1)] | None = None
    """Label of the condition that this one adds to. Unset: of those before it, the one that differs least."""

    @field_validator("label")
    @classmethod
    def _printable(cls, label: str | None) -> str | None:
        if label is not None and not label.isprintable():
            raise ValueError("it has a line break or another character that cannot be printed")
        return label


class Campaign(Section):
    """`[campaign]`: conditions x seeds."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")] | None = None
    """Name of the campaign's directory. Unset: the name of the TOML file."""
    base: Annotated[str, Field(min_length=1)] | None = None
    """The TOML file of a run that this file extends, relative to this file. Unset: this file alone."""
    seeds: (
        Annotated[Count, Field(le=1000)] | Annotated[tuple[Seed, ...], Array, Field(min_length=1, max_length=1000)]
    ) = 8
    """How many seeds, counted from 0, or a list of them."""
    tasks: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Array] = ()
    """Tasks, by registered name or dotted path: every condition is run on each of them. Unset: on that of the base."""
    max_steps: Natural | None = None
    """Steps of every run. Unset: `[training] max_steps`."""
    conditions: Annotated[tuple[ConditionEntry, ...], Array] = ()
    """What is compared. Without any: GRPO, MaxRL, and MaxRL with GTPO, GTPO + HICRA and GTPO + SEPA."""
    grid: Params = Field(default_factory=dict[str, Any])
    """Further axes, such as `"optimizer.lr" = [1e-4, 2e-4]`: every condition is run with every combination."""
    baseline: str | None = None
    """Label of the condition that the others are compared with. Unset: the first."""
    primary: str | None = None
    """Label of the condition whose comparison with the baseline is the question: it is tested alone, uncorrected."""
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    """Accuracy whose first reaching is reported in steps."""
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Significance level, after correction for the number of comparisons."""
    executor: Annotated[str, Field(min_length=1)] = "local"
    """A registered executor or the dotted path of one."""
    slots: Count | Literal["auto"] = "auto"
    """Runs at a time on one machine; "auto": one per `ranks` GPUs, or as many cores where there is no GPU."""
    ranks: Count = 1
    """Processes that train one run together, each with a GPU."""
    retries: Natural = 2
    """Restarts of a run that crashed, each from its newest checkpoint."""
    lease_s: Positive = 60.0
    """Seconds without a sign of life after which another worker takes a run over."""

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: int | tuple[int, ...]) -> int | tuple[int, ...]:
        if isinstance(seeds, tuple) and len(set(seeds)) < len(seeds):
            raise ValueError("a seed is listed twice")
        return seeds

    @field_validator("tasks")
    @classmethod
    def _each_once(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(tasks)) < len(tasks):
            raise ValueError("a task is listed twice")
        return tasks

    @property
    def seed_list(self) -> list[int]:
        """The seeds themselves."""
        return list(range(self.seeds)) if isinstance(self.seeds, int) else list(self.seeds)


def add_to(schema: dict[str, Any]) -> dict[str, Any]:
    """The JSON Schema of a configuration file, with `[campaign]` in it."""
    own = Campaign.model_json_schema(ref_template="#/$defs/Campaign{model}")
    definitions = {f"Campaign{name}": model for name, model in own.pop("$defs", {}).items()}
    return schema | {"$defs": schema["$defs"] | definitions, "properties": schema["properties"] | {"campaign": own}}
