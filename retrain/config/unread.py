"""Keys that nothing in the resolved run reads: whoever writes one expects an effect that it does not have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from retrain import registry
from retrain.algorithms.graph.column_graph import Stage
from retrain.algorithms.graph.plain_functions import CONTEXT_READS, shown
from retrain.config.document import Document
from retrain.config.positions import Path
from retrain.config.resolve import Resolved, Slot
from retrain.config.schema import Config
from retrain.errors import ConfigError, ConfigProblem
from retrain.registry import Bound, is_dotted

Reason = tuple[str, str]
"""What is wrong, and what to do about it."""

_NOTHING = "nothing in this run reads it"


def unread_keys(
    document: Document, config: Config, resolved: Resolved, bound: Mapping[Slot, Bound], graph: Sequence[Stage]
) -> dict[Path, ConfigProblem]:
    """Every parameter of a component, in its own table or in one beside its name, that nothing in the run reads.

    A component reads the keys that it has a parameter for, except those that its trait `when` ties to another value:
    with `when={"peak": ("schedule", ("chord",))}` it reads `peak` where `schedule` is "chord".

    Args:
        bound: the component of every slot.
        graph: the stages of credit, signals included.
    """
    algorithm = resolved.optional("algorithm") is not None  # in the place of advantage and transforms
    used = {slot: one for slot, one in bound.items() if not (algorithm and slot.kind in ("advantage", "transform"))}
    readers = [*_readers(config, resolved, used, graph)]
    found: dict[Path, Reason] = {}
    for name, table in document.data.items():
        if name not in Config.model_fields and isinstance(table, dict):
            found |= {(name, key): why for key in table if (why := _unread(name, key, readers))}
    for slot, one in used.items():
        if slot.inline:
            found |= {(*slot.params_path, key): why for key in slot.params if (why := _idle(one, key))}
    for name in ("advantage_params", "transform_params", "params"):
        found |= _unread_params(name, getattr(config.algorithm, name), used)
    return {path: document.at(path, *why) for path, why in found.items()}


def judged(
    unread: Sequence[tuple[Path, ConfigProblem]], load_alone: Callable[[], object] | None
) -> tuple[list[ConfigProblem], list[ConfigProblem]]:
    """The unread keys that are mistakes, and those that are odd: what the context of any plug-in would show.

    A key of a file that something reads without the overrides is neither. `--set rollout.engine=torch` leaves nothing
    that reads [vllm], and the file is right.

    Args:
        load_alone: loads the file without overrides; None if there are none.
    """
    alone = set[tuple[str, int, int]]()
    if unread and load_alone:
        try:
            load_alone()
        except ConfigError as error:
            unread_alone = (one for one in error.problems if one.exit_code == ConfigError.exit_code)
            alone = {(one.file, one.line, one.column) for one in unread_alone}
        unread = [(at, one) for at, one in unread if not one.line or (one.file, one.line, one.column) in alone]
    unread = sorted(unread, key=lambda row: (row[1].line, row[1].column))
    odd = [one for path, one in unread if one.problem == _NOTHING and _is_shown(path)]
    return [one for _, one in unread if one not in odd], odd


def _is_shown(path: Path) -> bool:
    """Whether ctx shows the key itself, or a column that its table decides: planning tokens, SEPA's pooling weight."""
    signals = [one.table for one in registry.components("signal") if one.name in CONTEXT_READS]
    return path[0] in signals or path in [(one.table, key) for one in shown() for key in one.traits["context"].values()]


def _unread_params(name: str, params: Mapping[str, Any], used: Mapping[Slot, Bound]) -> dict[Path, Reason]:
    """Of a table of [algorithm] with the parameters of dotted paths."""
    beside = {slot: one for slot, one in used.items() if slot.params_path == ("algorithm", name)}
    taken = {key for slot, one in beside.items() if is_dotted(slot.name) for key in one.params}
    tables = " or ".join(f"[{one.component.table}]" for slot, one in beside.items() if not is_dotted(slot.name))
    why = "only a dotted path reads this table", f"set it in {tables}" if tables else "name one, or remove the key"
    if any(is_dotted(slot.name) for slot in beside):
        why = f"{' and '.join(slot.name for slot in beside if is_dotted(slot.name))} do not take it", "remove it"
    return {("algorithm", name, key): why for key in params if key not in taken}


def _readers(
    config: Config, resolved: Resolved, used: Mapping[Slot, Bound], graph: Sequence[Stage]
) -> Iterator[tuple[Bound, Collection[str]]]:
    """Every component in use, with the keys of its table that the entry which names it sets as well."""
    for slot, one in used.items():
        yield one, {*(slot.params if slot.inline else ()), *(() if slot.weight is None else ("weight",))}
    engines = resolved.engines(config.model.path)
    exact = all(one.component.traits.get("exact") for one in engines) and not config.rollout.overlap
    others = [*engines, *resolved.objective(exact).corrections]
    others += [stage.bound for stage in graph if stage.kind == "signal"]
    if any(one.component.contract == "context" for one in used.values()):
        others += [one for component in shown() if (one := resolved.named("transform", component.name))]
    yield from ((one, ()) for one in others)


def _unread(name: str, key: str, readers: Sequence[tuple[Bound, Collection[str]]]) -> Reason | None:
    """Why nothing reads `[name] key`; None if something does."""
    why: list[Reason] = []
    for one, elsewhere in readers:
        component = one.component
        if component.table == name and (component.takes({key: None}) or key in component.traits.get("also", ())):
            reason = _idle(one, key)
            if key in elsewhere:
                reason = f'the entry that names "{one.name}" sets it as well', "keep one of the two"
            if reason is None:
                return None
            why.append(reason)
    return why[0] if why else (_NOTHING, _fix(name, key))


def _idle(one: Bound, key: str) -> Reason | None:
    """Why a component does not read a key of its own: another value switches it off."""
    other, values = one.component.traits.get("when", {}).get(key, ("", ()))
    if not other or one.params[other] in values:
        return None
    value = one.params[other]
    shown = "unset" if value is None else f'"{value}"' if isinstance(value, str) else str(value).lower()
    return f"{other} = {shown} does not read it", "remove one of the two"


def _fix(name: str, key: str) -> str:
    """Name what would read the key."""
    takers = [one for one in registry.components(tables=[name]) if key in one.schema.model_fields]
    named: dict[str, list[str]] = {}
    for one in takers:
        if one.kind != "signal":
            named.setdefault(one.kind, []).append(f'"{one.name}"')
    texts = [f"{kind} {' or '.join(names)}" for kind, names in named.items()]
    texts = texts or [str(one.traits.get("needed_by", one.name)) for one in takers]
    return f"{' or '.join(texts)} would: use that, or remove the key" if texts else "remove it"
