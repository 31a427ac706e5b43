"""Find keys that are set for components but that no component of the run reads, so that they have no effect."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from retrain import registry
from retrain.algorithms.graph.column_graph import CONTEXT_PARAMETERS
from retrain.config.loaded_config import LoadedConfig
from retrain.config.positions import KeyPath
from retrain.config.slots import Slot
from retrain.errors import ConfigProblem
from retrain.registry import Component, Finding
from retrain.registry.component import PLAIN_READS

Reason = tuple[str, str]
"""(problem, fix), the texts of an error message."""

_NOTHING = "nothing in this run reads it"


def unread_keys(loaded: LoadedConfig) -> Iterator[Finding]:
    """Yield each key of a component's table, or beside a component's name, that no component of the run reads.

    A component reads the keys of its schema, except those that its trait `when` switches off.
    """
    # An algorithm replaces the advantage, which then reads nothing.
    replaced = "advantage" if loaded.optional("algorithm") else ""
    used = {slot: component for slot, component in loaded.slots.items() if slot.kind != replaced}
    readers = [*_readers(loaded, used)]
    for name, table in loaded.tables.items():
        for key in table if isinstance(table, dict) else ():
            if why := _unread(name, key, readers):
                yield Finding((name, key), *why)
    for slot, component in used.items():
        for key in slot.params if slot.inline else ():
            if why := _switched_off(component, key):
                yield Finding((*slot.params_path, key), *why)
    for name in ("advantage_params", "transform_params", "params"):
        yield from _unread_params(name, getattr(loaded.config.algorithm, name), used)


def judged(
    unread: Iterable[tuple[KeyPath, ConfigProblem]], overridden: bool
) -> tuple[list[ConfigProblem], list[ConfigProblem]]:
    """Split unread keys into (errors, warnings).

    A key that no component reads, but that a plug-in can read through its argument `ctx`, is a warning.
    If the command line overrides keys, unread keys of the file are ignored: with
    `--set rollout.engine=torch` nothing reads [vllm], but the file is correct.

    Args:
        unread: unread keys with their problems.
        overridden: True if the command line overrides keys.
    """
    ordered = sorted(unread, key=lambda row: (row[1].line, row[1].column))
    asked = [(path, problem) for path, problem in ordered if not (overridden and problem.line)]
    if not asked:
        return [], []
    # `ctx` shows these keys, and the planning mask and SEPA's pooling weight, which depend on keys of signals.
    signals = [
        component.table for component in registry.components("signal") if component.name in PLAIN_READS["context"]
    ]
    shown = [(registry.find("transform", name).table, key) for name, key in CONTEXT_PARAMETERS.values()]
    odd = [problem for path, problem in asked if problem.problem == _NOTHING and (path[0] in signals or path in shown)]
    return [problem for _, problem in asked if problem not in odd], odd


def _unread_params(name: str, params: Mapping[str, Any], used: Mapping[Slot, Component]) -> Iterator[Finding]:
    """Yield the unread keys of [algorithm.advantage_params], [algorithm.transform_params] or [algorithm.params].

    Only dotted paths and plain functions read these tables.
    """
    named = {slot: component for slot, component in used.items() if slot.params_path == ("algorithm", name)}
    dotted = {slot.name: component for slot, component in named.items() if component.has_params_table}
    tables = " or ".join(f"[{component.table}]" for component in named.values() if not component.has_params_table)
    why = "only a dotted path reads this table", f"set it in {tables}" if tables else "name one, or remove the key"
    if dotted:
        why = f"{' and '.join(dotted)} do not take it", "remove it"
    for key in params:
        if not any(key in component.params for component in dotted.values()):
            yield Finding(("algorithm", name, key), *why)


def _readers(loaded: LoadedConfig, used: Mapping[Slot, Component]) -> Iterator[tuple[Component, Collection[str]]]:
    """Yield each component of the run with the keys that are set beside its name.

    This includes components that the run file does not name: engines, corrections and signals.
    """
    for slot, component in used.items():
        yield component, {*(slot.params if slot.inline else ()), *(() if slot.weight is None else ("weight",))}
    # With "auto" all engines that may be chosen are readers, because the choice needs the model.
    engines = loaded.engines()
    on_policy = not loaded.config.rollout.ahead
    # The update adds a correction unless sampler and trainer agree, and then the correction's table is read.
    exact = on_policy and all(registry.engine.traits_of(engine).exact for engine in engines)
    others = [*engines, *loaded.objective(exact).corrections]
    others += [stage for stage in loaded.pipeline.graph if stage.kind == "signal"]
    if any(component.contract == "context" for component in used.values()):
        others += [
            component for name, _ in CONTEXT_PARAMETERS.values() if (component := loaded.named("transform", name))
        ]
    yield from ((component, ()) for component in others)


def _unread(name: str, key: str, readers: Sequence[tuple[Component, Collection[str]]]) -> Reason | None:
    """Return the reason why nothing reads `[name] key`; None if a component reads it."""
    why: list[Reason] = []
    for component, entry in readers:
        # The same file configures `retrain serve`, which reads these keys.
        served = registry.engine.traits_of(component).serve_keys if component.kind == "engine" else ()
        if component.table == name and (component.takes({key: None}) or key in served):
            reason = _switched_off(component, key)
            if key in entry:
                reason = f'the entry that names "{component.name}" sets it as well', "keep one of the two"
            if reason is None:
                return None
            why.append(reason)
    return why[0] if why else (_NOTHING, _fix(name, key))


def _switched_off(reader: Component, key: str) -> Reason | None:
    """Return the reason why a component ignores one of its keys, by its trait `when`; None if it reads the key."""
    other, values = reader.traits.when.get(key, ("", ()))
    if not other or reader.params[other] in values:
        return None
    value = reader.params[other]
    shown = "unset" if value is None else f'"{value}"' if isinstance(value, str) else str(value).lower()
    return f"{other} = {shown} does not read it", "remove one of the two"


def _fix(name: str, key: str) -> str:
    """Return a fix that names the components that read the key."""
    from retrain.config.mistakes import aliases

    if advice := aliases()["unread"].get(f"{name}.{key}"):
        return advice
    named: dict[str, list[str]] = {}
    for component in registry.components(tables=[name]):
        if key in component.schema.model_fields:
            named.setdefault(component.kind, []).append(component.name)
    quoted = {
        kind: " or ".join(f'"{name_of_reader}"' for name_of_reader in names)
        for kind, names in named.items()
        if kind != "signal"
    }
    texts = [f"{kind} {names}" for kind, names in quoted.items()]
    texts = texts or [f"a component that reads {name}, or [logging] observe" for name in named.get("signal", ())]
    return f"use {' or '.join(texts)}, or remove the key" if texts else "remove it"
