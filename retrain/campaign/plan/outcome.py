"""Outcomes of a campaign: a metric of each run, its direction, and the difference that matters."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Goal = Literal["max", "min"]
Summary = Literal["last", "mean"]
Margin = Annotated[float, Field(gt=0)]

_OPEN = re.compile(
    r"(?:^|[^a-z])(?:loss(?:es)?|perplexity|ppl|kl|errors?|r?mse|mae|[cw]er|costs?|regret|distance|latency"
    r"|tokens?|lengths?|len|entropy|(?:run)?times?)(?:[^a-z]|$)",
    re.IGNORECASE,
)
"""Words in the name of a metric that is usually, but not always, better when smaller."""


class Outcome(BaseModel):
    """A result of every run: a metric, summarized over its evaluations or steps.

    Raises:
        ValueError: the name of the metric leaves its direction open, and `goal` is not set.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    metric: Annotated[str, Field(min_length=1)] = "accuracy"
    """A number of the held-out evaluations (`accuracy`, `tokens` for their mean length, `pass@4`), or any metric of
    metrics.jsonl by its name, such as `policy/entropy`."""
    goal: Goal | None = None
    """"max" if greater is better, or "min". Unset: "max"; a name such as `eval_loss` or `tokens` needs it."""
    margin: Margin | None = None
    """Largest difference that does not matter. With it, equality within the margin is tested."""
    summary: Summary = "last"
    """Summary over the evaluations or steps of a run: the last value, or their mean."""

    @model_validator(mode="after")
    def _directed(self) -> Outcome:
        if self.goal is None and _OPEN.search(re.sub("(?<=[a-z])(?=[A-Z])", "_", self.metric)):
            raise ValueError(f'set goal = "min" if a smaller {self.metric} is better, or goal = "max"')
        return self

    @property
    def sign(self) -> int:
        """1 if greater is better, -1 if smaller is."""
        return -1 if self.goal == "min" else 1

    @property
    def key(self) -> str:
        """Name in eval.jsonl or metrics.jsonl: `avg_tokens` for `tokens`."""
        return "avg_tokens" if self.metric == "tokens" else self.metric

    @property
    def column(self) -> str:
        """Name of the column of results.csv, whose `tokens` are the cost of the run: `avg_tokens`, `mean accuracy`."""
        return f"mean {self.key}" if self.summary == "mean" else self.key

    @property
    def label(self) -> str:
        """Name of the result of a run, such as `held-out accuracy`."""
        name = "held-out accuracy" if self.metric == "accuracy" else self.metric
        return f"{self.summary} {name}" if self.summary == "mean" else name

    @property
    def direction(self) -> str:
        """Words about the direction, for a metric whose smaller values are better; otherwise ""."""
        return "smaller is better" if self.sign < 0 else ""
