"""Schema of `[campaign]`: conditions, seeds, and execution of the runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from retrain.campaign.plan.outcome import Goal, Margin, Outcome
from retrain.config.schema import Array, Count, Natural, Params, Section, Seed


class ConditionEntry(BaseModel):
    """One `[[campaign.conditions]]` entry: a label, and the keys of the run that it sets.

    A key of `[algorithm]` is written without its table (`advantage_mode`), any other key with it
    (`"gtpo.beta" = 0.2`). These keys are validated as part of the run.
    """

    model_config = ConfigDict(
        strict=True, extra="allow", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    label: Annotated[str, Field(min_length=1, max_length=100, pattern=r"[A-Za-z0-9]")] | None = None
    """Name in tables, figures and paths. Unset: derived from the keys."""
    against: Annotated[str, Field(min_length=1)] | None = None
    """Label of the condition that this one extends. Unset: the earlier condition that differs least."""
    seed_offset: Natural = 0
    """Added to the seeds of this condition's runs, to compare a condition with itself under other seeds."""


class Campaign(Section):
    """`[campaign]`: conditions x seeds."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")] | None = None
    """Name of the campaign's directory. Unset: the name of the TOML file."""
    base: Annotated[str, Field(min_length=1)] | None = None
    """TOML file of a run that this file extends; the path is relative to this file. Unset: only this file."""
    seeds: (
        Annotated[Count, Field(le=1000)] | Annotated[tuple[Seed, ...], Array, Field(min_length=1, max_length=1000)]
    ) = 8
    """Number of seeds, counted from 0, or a list of seeds."""
    looks: Annotated[tuple[Count, ...], Array] | Literal["auto"] = ()
    """Numbers of seeds after which conditions are tested, and stop when their verdict is known. "auto": every fourth
    from 8. Unset: all seeds run before the test."""
    warm_starts: Count = 1
    """Number of warm starts. Runs of the i-th seed begin from warm start i modulo this number. With more than one,
    tests and intervals include the variation between warm starts."""
    tasks: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Array] = ()
    """Tasks, by registered name or dotted path; every condition is run on each. Unset: the task of the base run."""
    max_steps: Natural | None = None
    """Steps of every run. Unset: `[training] max_steps`."""
    conditions: Annotated[tuple[ConditionEntry, ...], Array] = ()
    """Conditions to compare. Unset: GRPO, MaxRL, and MaxRL with GTPO, GTPO + HICRA and GTPO + SEPA."""
    grid: Params = Field(default_factory=dict[str, Any])
    """Axes of a grid, such as `"optimizer.lr" = [1e-4, 2e-4]`; every condition is run with every combination."""
    baseline: str | None = None
    """Label of the condition that the others are compared with. Unset: the first."""
    primary: str | None = None
    """Label of the condition whose comparison with the baseline is the primary one: it is tested without correction
    for other comparisons."""
    claim: str | None = None
    """Task on which `primary` is claimed to differ from the baseline; only that comparison is tested uncorrected."""
    controls: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Array] = ()
    """Labels of conditions with a known result. In a campaign with tasks they are tested as families of their own, and
    take no power from the others."""
    metric: Annotated[str, Field(min_length=1)] = "accuracy"
    """Result of a run: a number of its evaluations, or any metric of its steps. Several: `[[campaign.outcomes]]`."""
    goal: Goal | None = None
    """Direction of `metric`: "max" if more is better, or "min". Unset: "max" for an accuracy, reward, score and the
    like; every other metric needs it."""
    margin: Margin | None = None
    """Largest difference in `metric` that does not matter. With it, equality within the margin is tested."""
    outcomes: Annotated[tuple[Outcome, ...], Array] = ()
    """Several results of a run, each with its goal and margin. Unset: one, `metric`."""
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Significance level after correction for multiple comparisons."""
    executor: Annotated[str, Field(min_length=1)] = "local"
    """Registered name or dotted path of the executor."""
    slots: Count | Literal["auto"] = "auto"
    """Runs at a time on one machine. "auto": one per `ranks` GPUs, or one per `ranks` cores if there is no GPU."""
    ranks: Count = 1
    """Processes that train one run together, each with a GPU."""
    retries: Natural = 2
    """Restarts of a run that crashed, each from its newest checkpoint."""
    keep: Literal["metrics", "model", "all"] = "model"
    """Files of a finished run that are kept. "metrics": metrics, evaluations and rollouts; "model": also the final
    model; "all": also the checkpoints. A stopped or failed run keeps its checkpoints."""

    @field_validator("seeds", "tasks")
    @classmethod
    def _distinct(cls, values: Any, field: ValidationInfo) -> Any:
        if isinstance(values, tuple) and len({*values}) < len(cast("tuple[Any, ...]", values)):
            raise ValueError(f"a {str(field.field_name).removesuffix('s')} is listed twice")
        return cast("Any", values)

    @model_validator(mode="after")
    def _measurable(self) -> Campaign:
        if self.outcomes and (self.metric, self.goal, self.margin) != ("accuracy", None, None):
            raise ValueError("`outcomes` replaces metric, goal and margin: set them in [[campaign.outcomes]]")
        if len({outcome.metric for outcome in self.outcomes}) < len(self.outcomes):
            raise ValueError("an outcome is listed twice")
        for outcome in self.all_outcomes:  # also validates metric, goal and margin together
            if outcome.share and (outcome.margin or 0) >= 1:
                raise ValueError(f"a margin of {outcome.margin:g} is beyond the range of {outcome.metric}, 0 to 1")
        return self

    @property
    def all_outcomes(self) -> tuple[Outcome, ...]:
        """All outcomes; the first is the one of learning curves."""
        return self.outcomes or (Outcome(metric=self.metric, goal=self.goal, margin=self.margin),)

    def start(self, seed: int) -> int:
        """Return the index of the warm start of the runs with this seed, counted from 0."""
        return self.seed_list.index(seed) % self.warm_starts

    @property
    def look_sizes(self) -> tuple[int, ...]:
        """Number of seeds at each look; the last look is at all seeds. Empty in a campaign without looks."""
        count = len(self.seed_list)
        # Fewer than 8 seeds can hardly reach the share of alpha that is spent at a first look.
        looks = tuple(range(8, count, 4)) if self.looks == "auto" else self.looks
        return (*looks, count) if looks else ()

    @property
    def seed_list(self) -> list[int]:
        """List of the seeds."""
        return list(range(self.seeds)) if isinstance(self.seeds, int) else list(self.seeds)


def add_to(schema: dict[str, Any]) -> dict[str, Any]:
    """Add `[campaign]` to the JSON Schema of a configuration file, and return the result."""
    section = Campaign.model_json_schema(ref_template="#/$defs/Campaign{model}")
    definitions = {f"Campaign{name}": model for name, model in section.pop("$defs", {}).items()}
    return schema | {"$defs": schema["$defs"] | definitions, "properties": schema["properties"] | {"campaign": section}}
