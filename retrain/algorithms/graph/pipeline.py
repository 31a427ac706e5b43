"""Pipeline from rewards to token advantages: resolves components to a column graph and runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from retrain import functional as F
from retrain.algorithms.graph.column_graph import SignalLookup, plan
from retrain.algorithms.graph.unsaved import attributes
from retrain.algorithms.planning.token_text import TokenText
from retrain.protocols import StatefulComponent
from retrain.registry import Component, signal
from retrain.registry.call import Call
from retrain.types import BASE_COLUMNS, POLICY_COLUMNS, Batch, Metrics

if TYPE_CHECKING:
    from torch import Tensor

_UNMARKED_BATCHES = 10
"""Number of consecutive batches without a flagged token after which a warning names the signal."""


class Pipeline:
    """Runs the stages in order on a batch. Each signal is computed once, before its first reader.

    Attributes:
        graph: the stages in order, for `explain`.
        policy_columns: columns of `policy.logprobs` that the batch must have before `credit`.
        stateful: components with a state for checkpoints, by name.
    """

    def __init__(self, graph: list[Component], policy_columns: frozenset[str], hyper: Mapping[str, Any]) -> None:
        self.graph, self.policy_columns, self._hyper = graph, policy_columns, hyper
        self.stateful: dict[str, StatefulComponent] = {}
        self._built: dict[tuple[str, str], StatefulComponent] = {}
        self._unmarked: dict[str, int] = {}
        self._unsaved: dict[tuple[str, str], Mapping[str, Any]] = {}

    @classmethod
    def resolve(
        cls,
        credit: Sequence[Component],
        group_filter: Component,
        signal: SignalLookup,
        *,
        observed: Sequence[str] = (),
        hyper: Mapping[str, Any] = MappingProxyType({}),
        given: frozenset[str] = frozenset(),
    ) -> Pipeline:
        """Order the stages.

        Args:
            credit: an advantage, or an algorithm in its place, and the transforms in order.
            group_filter: selects the groups to train on.
            signal: see `SignalLookup`.
            observed: columns that are computed even if no stage reads them: for a loss term (`Objective.signals`), or
                for their metrics (`[logging] observe`).
            hyper: parameters of other components for context-style plug-ins, by field of TransformContext.
            given: columns of batches besides the base columns.
        Raises:
            ComponentError: nothing provides a column, columns need each other, or the result of a stage is not used.
        """
        # The filter is last: it reads the advantages after all transforms.
        graph = plan([*credit, *observed, group_filter], signal, BASE_COLUMNS | given)
        policy = frozenset(name for stage in graph for name in stage.reads) | frozenset(observed)
        return cls(graph, (policy & POLICY_COLUMNS) - given, hyper)

    def build(self, resources: Mapping[str, Any]) -> None:
        """Create the components that are classes.

        Args:
            resources: objects of the run that constructors may take, by parameter name.
        Raises:
            ComponentError: a resource is missing.
        """
        if (tokenizer := resources.get("tokenizer")) is not None:
            text = cache(partial(TokenText, tokenizer, special=True))  # built only for a plug-in that reads texts

            def pieces(ids: Sequence[int]) -> list[str]:
                return text().pieces(ids)

            self._hyper = {**self._hyper, "pieces": pieces}
        for stage in self.graph:
            if stage.stateful:
                with Call(stage.kind, stage.name)():
                    part = self._built[stage.kind, stage.name] = stage.build(resources)
                if part.stateful:
                    self.stateful[stage.name] = part
                elif stage.source != "built-in":
                    self._unsaved[stage.kind, stage.name] = attributes(part)

    def unsaved(self) -> str:
        """Return a warning about components that have changed and have no `state_dict`; "" if there are none.

        It names each of them once. Built-in components may keep caches.
        """
        if not self._unsaved:
            return ""

        unsaved: list[str] = []
        for part_key, before in [*self._unsaved.items()]:
            now = attributes(self._built[part_key])
            if names := [name for name in now if name not in before or now[name] != before[name]]:
                # Each component is named once in a run.
                del self._unsaved[part_key]
                unsaved.append(f"{' '.join(part_key)} has changed its {', '.join(names)} and has no state_dict")
        fix = "a resumed run starts with new ones: write state_dict and load_state_dict, unless they are caches"
        return f"{'; '.join(unsaved)}; {fix}" if unsaved else ""

    def before(self, batch: Batch) -> Metrics:
        """Call `before` of every class component with the step's rollouts, without expert rows; return their metrics.

        Nothing is called if there are no rollouts.
        """
        return self._reports(batch, lambda part, rollouts: part.before(rollouts))

    def after(self, batch: Batch) -> Metrics:
        """Call `after` of every class component; `batch` is the result of `credit`. Return their metrics."""
        return self._reports(batch, lambda part, rollouts: part.after(rollouts))

    @property
    def is_epochwise(self) -> bool:
        """True if credit changes between the epochs of an update (`StatefulComponent.every_epoch`)."""
        return any(part.every_epoch for part in self._built.values())

    def next_epoch(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Call the components with `every_epoch`; return the batch with the next epoch's credit, and their metrics."""
        named = {name: part for name, part in self._built.items() if part.every_epoch}
        metrics = self._reports(batch, lambda part, rollouts: part.after(rollouts), named)
        metrics |= self._reports(batch, lambda part, rollouts: part.before(rollouts), named)
        return self.credit(batch)[0], metrics

    def _reports(
        self,
        batch: Batch,
        method: Callable[[StatefulComponent, Batch], Metrics],
        of: Mapping[tuple[str, str], StatefulComponent] | None = None,
    ) -> Metrics:
        """Call these class components, by default all, and return their metrics; {} without rollouts."""
        _, rollouts = _rollouts(batch)
        parts = self._built if of is None else of
        metrics: Metrics = {}
        for name, part in parts.items() if len(rollouts.rewards) else ():
            call = Call(*name)
            with call({**vars(rollouts), **rollouts.extra}):
                reported = method(part, rollouts)
            metrics |= call.metrics(reported)
        return metrics

    def credit(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Return the batch with advantages and the signals' columns, and the metrics of every stage.

        The state of components does not change. Expert rows get advantage 0 and are left out of all statistics.
        """
        rows, part = _rollouts(batch)
        columns, metrics = self._run(part) if len(rows) else self._without_rollouts(batch)
        if part is not batch:
            columns = {name: _spread(value, rows, batch) for name, value in columns.items()}
        return batch.replace(**columns), metrics

    def _without_rollouts(self, batch: Batch) -> tuple[dict[str, Any], Metrics]:
        """Compute the signals that do not read rollouts, such as schedules; other signals are 0."""
        columns: dict[str, Any] = {"step": batch.step, "max_tokens": batch.max_tokens}
        produced: dict[str, Any] = {}
        metrics: Metrics = {}
        for stage in self.graph:
            if stage.kind not in ("signal", "uncertainty"):
                continue
            # Zeros of the right shape and dtype, in case the signal cannot be computed.
            produced[stage.writes] = batch.advantages
            if set(stage.reads) <= columns.keys() and not stage.stateful:
                columns[stage.writes], reported = self._called(stage, columns)
                produced[stage.writes] = columns[stage.writes]
                metrics |= reported
        return produced, metrics

    @property
    def flags_to_store(self) -> dict[str, str]:
        """Columns of flags to store with the rollouts: {column: stored name}, from the trait `stored` of signals."""
        signals = [stage for stage in self.graph if stage.kind == "signal"]
        stored = {stage.writes: signal.traits_of(stage).stored for stage in signals}
        # A name with a slash is a metric's; it is stored with the metrics.
        return {column: name for column, name in stored.items() if name and "/" not in name}

    def unmarked(self, batch: Batch) -> str:
        """Return a warning if a signal of `flags_to_store` flagged no token in ten consecutive batches; otherwise "".

        A stage that reads such a signal has no effect, which metrics may not show.
        """
        for column, name in self.flags_to_store.items():
            is_unmarked = not bool(batch.column(column).any())
            self._unmarked[column] = self._unmarked.get(column, 0) + 1 if is_unmarked else 0
            if self._unmarked[column] == _UNMARKED_BATCHES:
                readers = ", ".join(stage.name for stage in self.graph if column in stage.reads)
                return (
                    f"no {name} token in {_UNMARKED_BATCHES} steps, so {readers} has no effect; look at completions in "
                    "the report, and set [planning] strategic_grams to phrases that occur in them"
                )
        return ""

    def holds_policy(self, step: int) -> bool:
        """Return True if the policy is not updated in this step, because only a component is trained."""
        return any(part.holds_policy(step) for part in self._built.values())

    @property
    def reads(self) -> frozenset[str]:
        """All columns that stages read."""
        return frozenset(name for stage in self.graph for name in stage.reads)

    @property
    def judges_rollouts(self) -> bool:
        """True if the filter does not read computed credit, so that it can run before credit is computed."""
        # Every batch has `advantages`, but they are zeros until credit is computed.
        return not set(self.graph[-1].reads) - (BASE_COLUMNS - {"advantages"})

    def informative(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Run the filter.

        Args:
            batch: batch with advantages, which are not needed if the filter `judges_rollouts`.
        Returns:
            [N] bool, True for rows that are kept, and metrics. Expert rows are always kept; the filter does not get
            them.
        """
        stage, (rows, part) = self.graph[-1], _rollouts(batch)
        if not len(rows):
            return batch.is_expert, {}
        keep, metrics = self._called(stage, {name: part.column(name) for name in stage.reads})
        check_result(Call(stage.kind, stage.name), stage, keep, vars(part))
        # Expert rows start as True and are kept.
        kept = batch.is_expert.clone()
        kept[rows] = keep
        return kept, metrics

    def _run(self, batch: Batch) -> tuple[dict[str, Any], Metrics]:
        columns: dict[str, Any] = {name: getattr(batch, name) for name in BASE_COLUMNS} | dict(batch.extra)
        metrics: Metrics = {}
        produced: dict[str, Any] = {}
        # Until an advantage replaces them: an algorithm starts from the rewards.
        columns["episode"] = batch.rewards
        for stage in self.graph:
            value, reported = self._stage(stage, columns)
            metrics.update(reported)
            columns[stage.writes] = value
            if stage.kind in ("signal", "uncertainty"):
                produced[stage.writes] = value
            elif stage.kind == "advantage":
                columns["advantages"] = F.masked.expand(value.to(batch.rewards.dtype), batch.response_mask)
        advantages = F.masked.keep(columns["advantages"], batch.response_mask)
        # The filter, the update, metrics and pictures all read these: a group without credit has advantages of 0.
        credited = F.groups.has_credit(advantages, batch.rewards, batch.group_ids)
        produced["advantages"] = advantages.where(credited[:, None], 0.0)
        for name, column in {"mean": produced["advantages"], "abs_mean": produced["advantages"].abs()}.items():
            metrics[f"advantage/{name}"] = float(F.masked.masked_mean(column, batch.response_mask))
        return produced, metrics

    def _stage(self, stage: Component, columns: dict[str, Any]) -> tuple[Any, Metrics]:
        if stage.contract == "lists":
            from retrain.algorithms.graph.plain_functions import call_lists

            value, metrics = call_lists(stage, columns), {}
        elif stage.contract == "context":
            from retrain.algorithms.graph.plain_functions import call_context

            value, metrics = call_context(stage, columns, columns["episode"], self._hyper)
        else:
            value, metrics = self._called(stage, columns)
        check_result(Call(stage.kind, stage.name), stage, value, columns)
        return value, metrics

    def _called(self, stage: Component, columns: Mapping[str, Any]) -> tuple[Any, Metrics]:
        call, result = called(stage, columns, self._built.get((stage.kind, stage.name)))
        value, metrics = call.split(result)
        return value, call.metrics(metrics)


def _rollouts(batch: Batch) -> tuple[Tensor, Batch]:
    """Return the indices of the policy's rows and a batch of these rows, which is the same object if they are all."""
    rows = (~batch.is_expert).nonzero()[:, 0]
    return rows, batch if len(rows) == len(batch.is_expert) else batch.rows(rows)


def called(component: Component, columns: Mapping[str, Any], built: Any = None) -> tuple[Call, Any]:
    """Call a component with the columns that it reads; return the call, which checks its result, and the result.

    Args:
        component: the component.
        columns: columns by name, at least those that it reads.
        built: the instance of a component that is a class.
    """
    call = Call(component.kind, component.name)
    read = {name: columns[name] for name in component.reads}
    with call(read):
        return call, (component if built is None else built)(*read.values())


def check_result(call: Call, stage: Component, value: Any, columns: Mapping[str, Any]) -> None:
    """Check the result of a stage.

    A filter returns [N] bool, equal within a group; an advantage [N]; a signal a number, [N] or [N, T]; all other
    stages [N, T]. Advantages and uncertainties are finite on response tokens.

    Args:
        call: describes the component in error messages.
        stage: the stage.
        value: its result.
        columns: columns of the batch by name.
    Raises:
        UserCodeError: the result is invalid.
    """
    mask: Tensor = columns["response_mask"]
    rows, shape = mask.shape[:1], mask.shape
    if stage.kind == "signal":
        size = tuple(getattr(value, "shape", ()))
        if size:
            call.tensor(value, rows if len(size) == 1 else shape, mask)
        else:
            call.number(value, "the column")
        return
    values = call.tensor(value, rows if stage.kind in ("advantage", "filter") else shape, mask)
    if stage.kind == "filter":
        members = F.groups.group_size(columns["group_ids"], values.bool())
        if values.dtype != mask.dtype or bool(((members > 0) != values).any()):
            raise call.fail("must return booleans that are the same for all rows of a group")
        return
    values = values.to(columns["rewards"].dtype)  # the dtype of training, in which the value must be finite
    # Outside the response, [N, T] columns may hold anything, because nothing reads it.
    finite = values.isfinite() if stage.kind == "advantage" else values.isfinite() | ~mask
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0, 0])
        group = int(columns["group_ids"][row])
        rewards = ", ".join(f"{reward:.4g}" for reward in columns["rewards"][columns["group_ids"] == group].tolist())
        raise call.fail(
            f"row {row}, of group {group}: returned a NaN or infinite {stage.writes}; the group's rewards: {rewards}"
        )


def _spread(value: Any, rows: Tensor, batch: Batch) -> Any:
    """Scatter a column of some rows into the whole batch, with 0 elsewhere; pass other values through."""
    shape: tuple[int, ...] = tuple(getattr(value, "shape", ()))
    if not shape or shape[0] != len(rows):
        return value
    wide = len(shape) > 1
    full = value.new_zeros(batch.input_ids.shape if wide else batch.rewards.shape)
    if wide:
        # Without the expert rows the batch may be narrower.
        full[rows, : shape[1]] = value
    else:
        full[rows] = value
    return full
