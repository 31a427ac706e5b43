"""Ordering of stages, so that earlier stages provide every column that a stage reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from retrain.errors import ComponentError, did_you_mean
from retrain.registry import Component, names
from retrain.types import POLICY_COLUMNS

SignalLookup = Callable[[str], Component | None]
"""Name of a column -> the signal, or the uncertainty, that computes it; None if there is none."""
CONTEXT_PARAMETERS = {"gtpo_beta": ("gtpo", "beta"), "hicra_alpha": ("hicra", "alpha")}
"""Fields of TransformContext that contain a parameter of another transform: {field: (transform, parameter)}."""


def plan(order: Sequence[Component | str], signal: SignalLookup, available: frozenset[str]) -> list[Component]:
    """Return the stages in order; each signal comes just before the first stage that reads it.

    Args:
        order: components, and names of columns that must exist at that point.
        signal: see `SignalLookup`.
        available: columns that exist from the start.
    Raises:
        ComponentError: nothing provides a column, columns need each other, or a stage's result is not used.
    """
    # One forward pass of the policy computes all of its columns, so no stage has to provide them.
    planner = _Planner(signal, set(available | POLICY_COLUMNS))
    for component in order:
        if isinstance(component, str):
            planner.provide(component, ())
        else:
            planner.add(component)
    _check_used(planner.graph)
    _check_states(planner.graph)
    return planner.graph


def hyper_of(transform: Callable[[str], Component | None]) -> dict[str, Any]:
    """Return the fields of TransformContext that come from other transforms.

    Args:
        transform: returns the bound transform of a name, or None.
    """
    stages = {field: (transform(name), key) for field, (name, key) in CONTEXT_PARAMETERS.items()}
    return {field: stage.params[key] for field, (stage, key) in stages.items() if stage}


def contributing(graph: Sequence[Component], wanted: Collection[str] = ("advantages",)) -> list[Component]:
    """Return the stages, in order, on which the final values of the wanted columns depend.

    An advantage does not contribute if a transform replaces it. A filter does not contribute to any column.
    """
    needed = set(wanted)
    stages: list[Component] = []
    for stage in reversed(graph):
        # An advantage writes `episode`, and the pipeline spreads it over the tokens.
        written = {stage.writes, "advantages"} if stage.kind in ("advantage", "algorithm") else {stage.writes}
        if stage.kind != "filter" and written & needed:
            stages.append(stage)
            context = stage.contract == "context"  # it receives the episode's advantages
            # Backwards: what an earlier stage wrote under these names is replaced here.
            needed = (needed - written) | {*stage.reads, *(("advantages",) if context else ())}
    return stages[::-1]


def _check_used(graph: Sequence[Component]) -> None:
    """Check that a later stage reads every column that a transform writes, except advantages."""
    for index, stage in enumerate(graph):
        read_later = {name for other in graph[index + 1 :] for name in other.reads}
        if stage.kind == "transform" and stage.writes not in {"advantages", *read_later}:
            raise ComponentError(
                f'"{stage.name}" changes {stage.writes}, but no later stage reads it',
                f"put it before a stage that reads {stage.writes}, or remove it",
            )


def _check_states(graph: Sequence[Component]) -> None:
    """Check that stages with state have different names, because checkpoints store states by name."""
    names = [stage.name for stage in graph if stage.stateful]
    for name in names:
        if names.count(name) > 1:
            raise ComponentError(f'two stages with state have the name "{name}"', "use it once, or rename one")


class _Planner:
    def __init__(self, signal: SignalLookup, available: set[str]) -> None:
        self.graph: list[Component] = []
        self._signal = signal
        self._provided = available

    def add(self, stage: Component) -> None:
        for column in stage.reads:
            self.provide(column, (stage.name,))
        if stage.kind == "transform":  # the only kind that chooses the column that it writes
            # A transform that reads neither starts anew, which is fine only at the beginning.
            if stage.writes == "advantages" and not {"advantages", "episode"} & {*stage.reads}:
                self._check_first(stage)
            self._provided.add(stage.writes)
        self.graph.append(stage)

    def provide(self, column: str, readers: tuple[str, ...]) -> None:
        if column in self._provided:
            return
        # `readers` is the path from the first reader to here; a column on it waits for itself.
        if column in readers:
            raise ComponentError(f"columns need each other: {' -> '.join((*readers, column))}", "break the cycle")
        stage = self._signal(column)
        if stage is None:
            raise ComponentError(*self._unknown(column, readers))
        for needed in stage.reads:
            self.provide(needed, (*readers, column))
        self._provided.add(column)
        self.graph.append(stage)

    def _unknown(self, column: str, readers: tuple[str, ...]) -> tuple[str, str]:
        reader = f'"{readers[-1]}" reads' if readers else "the run needs"
        columns = sorted({*self._provided, "uncertainty", *names("signal")})
        fix = did_you_mean(column, columns, f"write a signal of that name; known: {', '.join(columns)}")
        return f'{reader} column "{column}", which nothing provides', fix

    def _check_first(self, transform: Component) -> None:
        """Reject a transform that ignores the advantages after stages that gave each token its own."""
        lost = [stage.name for stage in self.graph if stage.writes == "advantages"]
        if lost:
            context = transform.contract == "context"
            reason = "takes a context" if context else "replaces the advantages"
            fix = ", or decorate it with @transform to read `advantages`" if context else ""
            raise ComponentError(
                f'"{transform.name}" {reason}, so it would undo {", ".join(lost)}',
                f"put it first, or keep one of them{fix}",
            )
