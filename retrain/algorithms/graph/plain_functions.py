"""Calls of undecorated plug-ins, once per group with plain lists; every result is checked."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite
from textwrap import dedent
from typing import TYPE_CHECKING, Any

from retrain.registry import Component
from retrain.registry.call import Call
from retrain.types import Metrics

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class TransformContext:
    """Argument of a context-style plug-in `fn(ctx)`: one group, as plain lists.

    `AlgorithmContext` is the same class.

    Attributes:
        episode_advantages: one number per completion (for `algorithm_mode`: the rewards).
        logprobs_G: log-probs of the sampled tokens, one list per completion.
        planning_masks_G: 1 on planning tokens, with the same shape as logprobs_G.
        sepa_lambda: SEPA's pooling weight at this step, in [0, 1].
        params: the `*_params` table of the component.
        step: training step, from 0.
        gtpo_beta, hicra_alpha: from `[gtpo]` and `[hicra]`.
        rewards, lengths, correct: one per completion; `rewards_G` is `rewards`.
        token_ids_G: ids of the tokens, with the same shape as logprobs_G.
        pieces: returns the text of each token of a completion; None if no model is loaded. A token's text is then
            its id.
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
    token_ids_G: list[list[int]] = field(default_factory=list[list[int]])
    pieces: Callable[[Sequence[int]], list[str]] | None = None

    @property
    def rewards_G(self) -> list[float]:  # noqa: N802 - named like the other lists of a group
        return self.rewards

    @property
    def token_texts(self) -> list[list[str]]:
        """Text of each token, special tokens included; a character split over several tokens belongs to the last."""
        return [self.pieces(ids) if self.pieces else [*map(str, ids)] for ids in self.token_ids_G]


@dataclass
class TransformOutput:
    """Result of a context-style plug-in, which may also return plain `token_advs`.

    `AlgorithmOutput` is the same class.

    Attributes:
        token_advs: advantages per token, with the same shape as `logprobs_G`.
        extra_metrics: numbers for metrics.jsonl; averaged over the groups of a step that report it.
        has_stats, stats: accepted and ignored, because every run measures the entropies of planning and
            execution tokens itself.
    """

    token_advs: list[list[float]]
    extra_metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    has_stats: bool = field(default=False, kw_only=True)
    stats: Any = field(default=None, kw_only=True)


AlgorithmContext = TransformContext
AlgorithmOutput = TransformOutput


def missing_fields(function: Callable[..., Any]) -> list[str]:
    """Return the fields of the context that a context-style plug-in reads, but that do not exist.

    Only the plug-in's own source is searched. Names that are read inside `try`, `with` (which may suppress the error)
    or an inner function, or that occur as a string (as in `hasattr`), are not reported, because the function may serve
    other trainers, too. Nothing is reported if the name of the context gets another value.
    """
    try:
        [definition] = ast.parse(dedent(inspect.getsource(function))).body
    except (OSError, TypeError, ValueError, SyntaxError):  # no source, or a lambda in the middle of a statement
        return []
    if not isinstance(definition, ast.FunctionDef):
        return []
    context = next(iter(inspect.signature(function).parameters))
    nodes = [*ast.walk(definition)]
    if any(isinstance(node, ast.Name) and node.id == context and isinstance(node.ctx, ast.Store) for node in nodes):
        return []
    # Nodes have no equality of their own, so they are compared by identity.
    unsure = (ast.Try, ast.With, ast.Lambda, ast.FunctionDef)
    attempted = {id(inner) for node in nodes[1:] if isinstance(node, unsure) for inner in ast.walk(node)}
    names = {*dir(TransformContext), *(attribute.name for attribute in fields(TransformContext))}
    # A name as text, as in hasattr(ctx, "name"), shows that the function can do without it.
    names |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    read = list[str]()
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == context:
            # A function may read a field that it has set.
            if isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif id(node) not in attempted:
                read.append(node.attr)
    return [name for name in dict.fromkeys(read) if name not in names]


def call_lists(bound: Component, columns: Mapping[str, Any]) -> Tensor:
    """Call `fn(rewards)` or `fn(rewards, params)` for each group; return advantages [N].

    Args:
        bound: the plug-in.
        columns: `rewards` [N] and `group_ids` [N].
    Raises:
        UserCodeError: the plug-in raised, or its result is invalid.
    """
    rewards: Tensor = columns["rewards"]
    advantages = rewards.clone()
    for group, rows in _groups(columns["group_ids"]):
        call = Call(bound.kind, bound.name, f", group {group}")
        values = _called(bound, call, rewards[rows].tolist(), *_params(bound))
        advantages[rows] = rewards.new_tensor(call.numbers(values, len(rows), "advantages"))
    return advantages


def call_context(
    bound: Component, columns: Mapping[str, Any], episode: Tensor, hyper: Mapping[str, Any]
) -> tuple[Tensor, Metrics]:
    """Call `fn(ctx)` for each group; return advantages [N, T], and the extra metrics averaged over groups.

    Args:
        bound: the plug-in.
        columns: all columns of `PLAIN_READS["context"]`.
        episode: [N], episode advantages; for an algorithm, the rewards.
        hyper: parameters of other components, by field of TransformContext.
    Raises:
        UserCodeError: the plug-in raised, or its result is invalid.
    """
    mask: Tensor = columns["response_mask"]
    advantages = episode.new_zeros(mask.shape)
    reported: dict[str, list[float]] = {}
    for group, rows in _groups(columns["group_ids"]):
        call = Call(bound.kind, bound.name, f", group {group}")
        context = _context(columns, episode, rows, hyper, bound.params)
        sizes = [len(logprobs) for logprobs in context.logprobs_G]
        output = _called(bound, call, context)
        # Reading an attribute of the plug-in's own class may raise, too.
        with call():
            token_advs = _token_lists(call, output, sizes)
            extra = getattr(output, "extra_metrics", None)
        for row, values in zip(rows, token_advs, strict=True):
            advantages[row, mask[row]] = episode.new_tensor(values)
        for name, value in call.metrics(extra).items():
            if not isfinite(value):
                raise call.fail(f"extra_metrics[{name!r}] is {value}, not a finite number")
            reported.setdefault(name, []).append(value)
    return advantages, {name: sum(values) / len(values) for name, values in reported.items()}


def _groups(group_ids: Tensor) -> list[tuple[int, list[int]]]:
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids.tolist()):
        rows.setdefault(group, []).append(row)
    # By number, so that the calls do not depend on the order of rows.
    return sorted(rows.items())


def _params(bound: Component) -> tuple[dict[str, Any], ...]:
    """Return the second argument of an advantage, in a tuple; () if it takes one argument."""
    takes = [p for p in inspect.signature(bound.target).parameters.values() if p.kind <= p.VAR_POSITIONAL]
    wants = len(takes) > 1 or any(p.kind is p.VAR_POSITIONAL for p in takes)
    return (dict(bound.params),) if wants else ()


def _context(
    columns: Mapping[str, Any], episode: Tensor, rows: list[int], hyper: Mapping[str, Any], params: Mapping[str, Any]
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
        **hyper,
        rewards=columns["rewards"][rows].tolist(),
        lengths=columns["lengths"][rows].tolist(),
        correct=columns["correct"][rows].tolist(),
        token_ids_G=tokens("input_ids"),
    )


def _called(bound: Component, call: Call, *arguments: Any) -> Any:
    function: Callable[..., Any] = bound.target
    with call():
        return function(*arguments, **{name: bound.params[name] for name in bound.schema.model_fields})


def _token_lists(call: Call, output: Any, sizes: list[int]) -> list[list[float]]:
    rows = output if isinstance(output, Sequence) else getattr(output, "token_advs", None)
    if rows is None:
        kind = type(output).__name__
        raise call.fail(f"returned a {kind} instead of a TransformOutput(token_advs=...) or a list of lists")
    if not isinstance(rows, Sequence) or len(rows) != len(sizes):
        raise call.fail(f"token_advs must be a list of {len(sizes)} lists, one per completion")
    return [call.numbers(row, sizes[i], f"token_advs[{i}]") for i, row in enumerate(rows)]
