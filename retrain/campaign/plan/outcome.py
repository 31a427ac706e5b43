"""Outcomes of a campaign: a metric of each run, its direction, and the difference that matters."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Goal = Literal["max", "min"]
Summary = Literal["last", "mean"]
Margin = Annotated[float, Field(gt=0)]

_SHARE = re.compile(r"accuracy|acc|(?:pass|avg)@\d+|f1|match|success|win")
"""Last word of the name of a share, which is better when larger."""
_GAIN = re.compile(r"rewards?|scores?|returns?|mean@\d+")
"""Last word of the name of another metric that is better when larger."""
_QUALIFIERS = frozenset(
    (
        *("eval", "evaluation", "val", "valid", "validation", "test", "train", "training", "heldout", "held", "out"),
        *("mean", "avg", "average", "final", "last", "best", "overall", "all", "total", "exact", "rate", "core"),
        *("greedy", "episode", "cumulative", "discounted"),
    )
)
"""Words that do not change the direction: `mean_reward`, `eval/accuracy`, `win_rate`."""
_TURNING = frozenset(["to", "per", "of", "in", "non", "no", "not", "false", "lost", "error", "invalid", "wrong"])
"""Words that may turn the direction: `steps_to_success`, `loss_of_accuracy`, `error_accuracy`."""
_CAMEL = re.compile("(?<=[a-z])(?=[A-Z])")


def gain_word(metric: str) -> str:
    """Return the word in the name of a metric by which more is better, such as `accuracy`; "" without one.

    Earlier parts of the name only say where: `val-core/gsm8k/acc/mean@4` is an `acc`, and `reward/failed` is nothing
    that is known. A modifier may turn a reward or a score around, as in `brier_score`, but not an accuracy.
    """
    parts = [re.findall(r"[a-z0-9@]+", _CAMEL.sub("_", part).lower()) for part in metric.split("/")]
    while len(parts) > 1 and all(word in _QUALIFIERS or word.startswith("mean@") for word in parts[-1]):
        parts.pop()  # `reward/mean`, `acc/mean@4`
    words = parts[-1]
    while len(words) > 1 and words[-1] in _QUALIFIERS:
        words.pop()  # `win_rate`
    *modifiers, last = words or [""]
    share = bool(_SHARE.fullmatch(last)) and (last != "match" or "exact" in modifiers)
    is_known = all(word in _QUALIFIERS or _SHARE.fullmatch(word) or _GAIN.fullmatch(word) for word in modifiers)
    if share and last not in ("success", "win"):
        is_known = not _TURNING.intersection(modifiers)
    return last if is_known and (share or _GAIN.fullmatch(last)) else ""


class Outcome(BaseModel):
    """A result of every run: a metric, summarized over its evaluations or steps.

    Raises:
        ValueError: the direction of the metric is not known, and `goal` is not set.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    metric: Annotated[str, Field(min_length=1)] = "accuracy"
    """A number of the held-out evaluations (`accuracy`, `tokens` for their mean length, `pass@4`), or any metric of
    metrics.jsonl by its name, such as `policy/entropy`."""
    goal: Goal | None = None
    """"max" if more is better, or "min". Unset: "max" for an accuracy, reward, score, return, success, win rate,
    pass@k, avg@k, mean@k, f1 or exact match; every other metric needs it."""
    margin: Margin | None = None
    """Largest difference that does not matter. With it, equality within the margin is tested."""
    summary: Summary = "last"
    """Summary over the evaluations or steps of a run: the last value, or their mean."""

    @model_validator(mode="after")
    def _directed(self) -> Outcome:
        if self.goal is None and not gain_word(self.metric):
            raise ValueError(f'set goal = "min" if less {self.metric} is better, or goal = "max"')
        return self

    @property
    def share(self) -> bool:
        """True if the name is that of a share, whose values lie within [0, 1] (or are percent)."""
        return bool(_SHARE.fullmatch(gain_word(self.metric)))

    @property
    def sign(self) -> int:
        """1 if more is better, -1 if less is."""
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
        """The direction in words."""
        return "less is better" if self.sign < 0 else "more is better"
