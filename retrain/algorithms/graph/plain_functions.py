"""Undecorated plug-ins: called once per group with plain lists, and every result checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any

from retrain.errors import UserCodeError
from retrain.registry import Bound
from retrain.types import Metrics

if TYPE_CHECKING:
    from torch import Tensor

LISTS_READS = ("rewards", "group_ids")
CONTEXT_READS = (
    "rewards",
    "lengths",
    "correct",
    "group_ids",
    "response_mask",
    "sampler_logprobs",
    "planning_mask",
    "sepa_lambda",
    "step",
)


@dataclass
class TransformContext:
    """What a context-style plug-in `fn(ctx)` receives: one group, as plain lists. `AlgorithmContext` is the same class.

    Attributes:
        episode_advantages: one number per completion (for `algorithm_mode`: the rewards).
        logprobs_G: sampled tokens' log-probs, one list per completion.
        planning_masks_G: 1 on planning tokens, same shape as logprobs_G.
        sepa_lambda: SEPA's pooling weight at this step, in [0, 1].
        params: the `*_params` table of the slot.
        step: training step, from 0.
        gtpo_beta, hicra_alpha: from `[gtpo]` and `[hicra]`.
        rewards, lengths, correct: one per completion; `rewards_G` is `rewards`.
    """

    episode_advantages: list[float]
    logprobs_G: list[list[float]]
    planning_masks_G: list[list[int]]
    sepa_lambda: float = 0.0
    params: dict[str, Any] = field(default_factory=dict[str, Any])
    step: int = 0
    gtpo_beta: float = 0.1
    hicra_alpha: float = 0.2
    rewards: list[float] = field(default_factory=list[float])
    lengths: list[int] = field(default_factory=list[int])
    correct: list[bool] = field(default_factory=list[bool])

    @property
    def rewards_G(self) -> list[float]:  # noqa: N802 - named like the other lists of a group
        return self.rewards


@dataclass
class TransformOutput:
    """What a context-style plug-in returns; a plain `token_advs` will do as well. `AlgorithmOutput` is the same class.

    Attributes:
        token_advs: advantages per token, same shape as `logprobs_G`.
        extra_metrics: numbers for metrics.jsonl; averaged over the groups of a step.
        has_stats, stats: part of the contract and not read, since every run measures the entropies of planning and
            execution tokens itself.
    """

    token_advs: list[list[float]]
    extra_metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    has_stats: bool = field(default=False, kw_only=True)
    stats: Any = field(default=None, kw_only=True)


AlgorithmContext = TransformContext
AlgorithmOutput = TransformOutput


@dataclass(frozen=True)
class Hyper:
    """What a TransformContext shows of other components' tables."""

    gtpo_beta: float = 0.1
    hicra_alpha: float = 0.2


def call_lists(bound: Bound, columns: Mapping[str, Any]) -> Tensor:
    """`fn(rewards)` or `fn(rewards, params)` for each group -> [N]."""
    rewards: Tensor = columns["rewards"]
    result = rewards.clone()
    for group, rows in _groups(columns["group_ids"]):
        place = _Place(bound, group)
        values = place.call(rewards[rows].tolist(), *_params(bound))
        result[rows] = rewards.new_tensor(place.numbers(values, len(rows), "advantages"))
    return result


def call_context(bound: Bound, columns: Mapping[str, Any], episode: Tensor, hyper: Hyper) -> tuple[Tensor, Metrics]:
    """`fn(ctx)` for each group -> [N, T]; its extra metrics are averaged over groups.

    Args:
        columns: everything in CONTEXT_READS.
        episode: [N] advantages (rewards, where the function is the whole algorithm).
    """
    mask: Tensor = columns["response_mask"]
    result = episode.new_zeros(mask.shape)
    reported: dict[str, list[float]] = {}
    for group, rows in _groups(columns["group_ids"]):
        place = _Place(bound, group)
        context = _context(columns, episode, rows, hyper, bound.params)
        output = place.call(context)
        for row, values in zip(rows, place.token_lists(output, context.logprobs_G), strict=True):
            result[row, mask[row]] = episode.new_tensor(values)
        for name, value in place.metrics(output).items():
            reported.setdefault(name, []).append(value)
    return result, {name: sum(values) / len(values) for name, values in reported.items()}


def _groups(group_ids: Tensor) -> list[tuple[int, list[int]]]:
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids.tolist()):
        rows.setdefault(group, []).append(row)
    return sorted(rows.items())


def _params(bound: Bound) -> tuple[dict[str, Any], ...]:
    """The second argument of an advantage, if it takes one."""
    takes = [p for p in inspect.signature(bound.component.target).parameters.values() if p.kind <= p.VAR_POSITIONAL]
    wants = len(takes) > 1 or any(p.kind is p.VAR_POSITIONAL for p in takes)
    return (dict(bound.params),) if wants else ()


def _context(
    columns: Mapping[str, Any], episode: Tensor, rows: list[int], hyper: Hyper, params: Mapping[str, Any]
) -> TransformContext:
    mask: Tensor = columns["response_mask"]

    def tokens(name: str) -> list[list[Any]]:
        return [columns[name][row][mask[row]].tolist() for row in rows]

    return TransformContext(
        episode_advantages=episode[rows].tolist(),
        logprobs_G=tokens("sampler_logprobs"),
        planning_masks_G=[[int(flag) for flag in flags] for flags in tokens("planning_mask")],
        sepa_lambda=float(columns["sepa_lambda"]),
        params=dict(params),
        step=columns["step"],
        gtpo_beta=hyper.gtpo_beta,
        hicra_alpha=hyper.hicra_alpha,
        rewards=columns["rewards"][rows].tolist(),
        lengths=columns["lengths"][rows].tolist(),
        correct=columns["correct"][rows].tolist(),
    )


@dataclass(frozen=True)
class _Place:
    """One call of a plug-in; names it in every complaint."""

    bound: Bound
    group: int

    def fail(self, problem: str) -> UserCodeError:
        return UserCodeError(f'{self.bound.component.kind} "{self.bound.name}", group {self.group}: {problem}')

    def call(self, *arguments: Any) -> Any:
        function: Callable[..., Any] = self.bound.component.target
        keywords = {name: self.bound.params[name] for name in self.bound.component.schema.model_fields}
        try:
            return function(*arguments, **keywords)
        except Exception as error:
            raise self.fail(f"raised {type(error).__name__}: {error}") from error

    def numbers(self, values: Any, expected: int, what: str) -> list[float]:
        if hasattr(values, "tolist"):
            values = values.tolist()
        if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
            raise self.fail(f"{what} are a {type(values).__name__}, not a list of {expected} numbers")
        if len(values) != expected:
            raise self.fail(f"{len(values)} {what} for {expected}; return one for each")
        for position, value in enumerate(values):
            if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
                raise self.fail(f"{what}[{position}] is {value!r}, not a number")
            if not isfinite(value):
                raise self.fail(f"{what}[{position}] is {value}, not a finite number")
        return [float(value) for value in values]

    def token_lists(self, output: Any, logprobs: list[list[float]]) -> list[list[float]]:
        rows = output if isinstance(output, Sequence) else getattr(output, "token_advs", None)
        if rows is None:
            found = type(output).__name__
            raise self.fail(f"returned a {found}, neither a TransformOutput(token_advs=...) nor a list of lists")
        if not isinstance(rows, Sequence) or len(rows) != len(logprobs):
            raise self.fail(f"token_advs must be a list of {len(logprobs)} lists, one per completion")
        return [self.numbers(row, len(logprobs[i]), f"token_advs[{i}]") for i, row in enumerate(rows)]

    def metrics(self, output: Any) -> Metrics:
        extra = getattr(output, "extra_metrics", None) or {}
        if not isinstance(extra, Mapping):
            raise self.fail(f"extra_metrics is a {type(extra).__name__}, not a dict of numbers")
        return dict(zip(extra, self.numbers(list(extra.values()), len(extra), "extra_metrics"), strict=True))
