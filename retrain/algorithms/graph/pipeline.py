"""From rewards to one advantage per token: components resolved into a graph of columns, then run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from retrain import functional as F
from retrain.algorithms.graph.column_graph import Stage, plan
from retrain.algorithms.graph.plain_functions import Hyper, call_context, call_lists
from retrain.errors import UserCodeError
from retrain.protocols import Part
from retrain.registry import Bound
from retrain.types import BASE_COLUMNS, POLICY_COLUMNS, Batch, Metrics

if TYPE_CHECKING:
    from torch import Tensor

Signals = Callable[[str], Bound | None]


@dataclass(frozen=True)
class Stages:
    """The components of credit assignment, bound to their parameters.

    Attributes:
        advantage, transforms: episode advantages, then the chain over tokens.
        algorithm: instead of both.
        uncertainty: what the column `uncertainty` means.
        filter: which groups train.
        observed: columns computed and logged in every condition, so that conditions compare; add the columns
            that only a loss term reads (`Objective.signals`).
        hyper: what context-style plug-ins see of [gtpo] and [hicra].
    """

    advantage: Bound | None
    transforms: tuple[Bound, ...]
    algorithm: Bound | None
    uncertainty: Bound
    filter: Bound
    observed: tuple[str, ...] = ("uncertainty", "planning_mask", "sepa_lambda")
    hyper: Hyper = field(default_factory=Hyper)


class Pipeline:
    """Runs the stages in order on a batch; signals are computed on first need, once.

    Attributes:
        graph: the stages in order, for `explain`.
        policy_columns: what `policy.logprobs` must add to the batch before `credit`.
        stateful: the parts with a state to save, by name.
    """

    def __init__(self, graph: list[Stage], policy_columns: frozenset[str], hyper: Hyper) -> None:
        self.graph, self.policy_columns, self._hyper = graph, policy_columns, hyper
        self.stateful: dict[str, Part] = {}
        self._built: dict[tuple[str, str], Part] = {}

    @classmethod
    def resolve(cls, stages: Stages, signal: Signals, given: frozenset[str] = frozenset()) -> Pipeline:
        """Plan the graph.

        Args:
            signal: the bound signal of a name, or None.
            given: columns that batches already carry besides the base columns.
        Raises:
            ComponentError: a column that nothing provides, a cycle, or a chain that loses work.
        """
        sources: list[Bound] = [stages.algorithm] if stages.algorithm else []
        if not stages.algorithm:
            sources = [*([stages.advantage] if stages.advantage else []), *stages.transforms]
        graph = plan([*sources, *stages.observed, stages.filter], stages.uncertainty, signal, BASE_COLUMNS | given)
        policy = frozenset(name for stage in graph for name in stage.reads) | frozenset(stages.observed)
        return cls(graph, (policy & POLICY_COLUMNS) - given, stages.hyper)

    def build(self, resources: Mapping[str, Any]) -> None:
        """Build class components from the run's parts; ComponentError if one is missing."""
        for stage in self.graph:
            if stage.bound.component.stateful:
                part: Part = stage.bound.build(resources)
                self._built[stage.kind, stage.name] = part
                if part.stateful:
                    self.stateful[stage.name] = part

    def before(self, batch: Batch) -> Metrics:
        """Every part's `before`: it sees the step's rollouts, never expert rows; skipped if there are no rollouts."""
        return self._reports(batch, lambda part, rollouts: part.before(rollouts))

    def after(self, batch: Batch) -> Metrics:
        """Every part's `after`; `batch` is what `credit` returned."""
        return self._reports(batch, lambda part, rollouts: part.after(rollouts))

    def _reports(self, batch: Batch, ask: Callable[[Part, Batch], Metrics]) -> Metrics:
        _, rollouts = _rollouts(batch)
        parts = self._built.values() if len(rollouts.rewards) else ()
        return {name: value for part in parts for name, value in ask(part, rollouts).items()}

    def credit(self, batch: Batch) -> tuple[Batch, Metrics]:
        """The batch with advantages and the signals' columns, and the metrics of every stage; changes no state.

        Expert rows take no part: their advantages are 0 and no statistic sees them.
        """
        rows, part = _rollouts(batch)
        columns, metrics = self._run(part) if len(rows) else self._without_rollouts(batch)
        if part is not batch:
            columns = {name: _spread(value, rows, batch) for name, value in columns.items()}
        return batch.replace(**columns), metrics

    def _without_rollouts(self, batch: Batch) -> tuple[dict[str, Any], Metrics]:
        """Signals that are the same for every row, such as schedules; what depends on rollouts is 0."""
        columns: dict[str, Any] = {"step": batch.step, "max_tokens": batch.max_tokens}
        produced: dict[str, Any] = {}
        metrics: Metrics = {}
        for stage in self.graph:
            if stage.kind not in ("signal", "uncertainty"):
                continue
            produced[stage.writes] = batch.advantages
            if set(stage.reads) <= columns.keys() and not stage.bound.component.stateful:
                columns[stage.writes], reported = _split(self._callable(stage)(*(columns[n] for n in stage.reads)))
                produced[stage.writes] = columns[stage.writes]
                metrics |= reported
        return produced, metrics

    @property
    def judges_rollouts(self) -> bool:
        """The filter reads nothing that credit computes: it can drop rollouts before any of it."""
        return not set(self.graph[-1].reads) - (BASE_COLUMNS - {"advantages"})

    def informative(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """[N] bool from the filter, with its metrics; on a batch with advantages unless it `judges_rollouts`.

        Expert rows always count, and the filter does not see them.
        """
        stage, (rows, part) = self.graph[-1], _rollouts(batch)
        if not len(rows):
            return batch.is_expert, {}
        keep, metrics = _split(self._callable(stage)(*(part.column(name) for name in stage.reads)))
        every = batch.is_expert.clone()
        every[rows] = keep
        return every, metrics

    def _run(self, batch: Batch) -> tuple[dict[str, Any], Metrics]:
        columns: dict[str, Any] = {name: getattr(batch, name) for name in BASE_COLUMNS} | dict(batch.extra)
        metrics: Metrics = {"hicra/amplified_token_ratio": 0.0, "hicra/advantage_shift": 0.0}
        produced: dict[str, Any] = {}
        columns["episode"] = batch.rewards
        for stage in self.graph:
            value, reported = self._stage(stage, columns)
            metrics.update(reported)
            columns[stage.writes] = value
            if stage.kind in ("signal", "uncertainty"):
                produced[stage.writes] = value
            elif stage.kind == "advantage":
                columns["advantages"] = F.masked.expand(value.to(batch.rewards.dtype), batch.response_mask)
        produced["advantages"] = F.masked.keep(columns["advantages"], batch.response_mask)
        columns["advantages"] = produced["advantages"]
        return produced, metrics | credit_metrics(columns, batch.response_mask)

    def _stage(self, stage: Stage, columns: dict[str, Any]) -> tuple[Any, Metrics]:
        if stage.bound.component.contract == "lists":
            return call_lists(stage.bound, columns), {}
        if stage.bound.component.contract == "context":
            return call_context(stage.bound, columns, columns["episode"], self._hyper)
        value, metrics = _split(self._callable(stage)(*(columns[name] for name in stage.reads)))
        _check(stage, value, columns)
        return value, metrics

    def _callable(self, stage: Stage) -> Callable[..., Any]:
        built: Any = self._built.get((stage.kind, stage.name))
        return stage.bound if built is None else built


def credit_metrics(columns: Mapping[str, Any], response_mask: Tensor) -> Metrics:
    """Advantages of planning and of execution tokens, in every condition: sums over the batch, never mean ratios."""
    advantages = columns["advantages"]
    metrics = {"advantage/mean": float(F.masked.masked_mean(advantages, response_mask))}
    metrics["advantage/abs_mean"] = float(F.masked.masked_mean(advantages.abs(), response_mask))
    if "planning_mask" in columns:
        planning = columns["planning_mask"].bool() & response_mask
        metrics |= {
            "hicra/planning_advantage_mean": float(F.masked.masked_mean(advantages, planning)),
            "hicra/execution_advantage_mean": float(F.masked.masked_mean(advantages, response_mask & ~planning)),
        }
    return metrics


def _rollouts(batch: Batch) -> tuple[Tensor, Batch]:
    """Indices of the rows that are not an expert's, and the batch of them: the same one if that is all."""
    rows = (~batch.is_expert).nonzero()[:, 0]
    return rows, batch if len(rows) == len(batch.is_expert) else batch.rows(rows)


def _split(result: Any) -> tuple[Any, Metrics]:
    """Components return a value, or a value with metrics."""
    return result if isinstance(result, tuple) else (result, {})


def _check(stage: Stage, value: Any, columns: Mapping[str, Any]) -> None:
    """Advantages must have their shape and be finite on response tokens."""
    if stage.writes not in ("episode", "advantages"):
        return
    mask: Tensor = columns["response_mask"]
    shape = mask.shape[:1] if stage.writes == "episode" else mask.shape
    check_shape(stage.kind, stage.name, value, shape)
    finite = value.isfinite()
    if not bool((finite if stage.writes == "episode" else finite | ~mask).all()):
        raise UserCodeError(f'{stage.kind} "{stage.name}" returned a NaN or infinite advantage')


def check_shape(kind: str, name: str, value: Any, shape: Any) -> None:
    """UserCodeError if what a component returned is not a tensor of this shape."""
    found = getattr(value, "shape", type(value).__name__)
    if found != shape:
        raise UserCodeError(f'{kind} "{name}" returned {_shown(found)}, not a tensor of {_shown(shape)}')


def _shown(shape: Any) -> str:
    return shape if isinstance(shape, str) else str(list(shape))


def _spread(value: Any, rows: Tensor, batch: Batch) -> Any:
    """A column of some rows as a column of the whole batch, 0 elsewhere; other values as they are."""
    shape: tuple[int, ...] = tuple(getattr(value, "shape", ()))
    if not shape or shape[0] != len(rows):
        return value
    wide = len(shape) > 1
    full = value.new_zeros(batch.input_ids.shape if wide else batch.rewards.shape)
    if wide:
        full[rows, : shape[1]] = value
    else:
        full[rows] = value
    return full
