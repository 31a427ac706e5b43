"""The one place where a component that a document names gets the parameters that the document gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from retrain import registry
from retrain.config.document import Document, left_out
from retrain.config.mistakes import Catalog, catalog, collect
from retrain.config.positions import Path
from retrain.config.presets import preset_names
from retrain.config.resolve import Slot
from retrain.config.schema import Config
from retrain.errors import ComponentError, did_you_mean
from retrain.registry import Bound, Component, Finding, ParameterError, is_dotted
from retrain.registry.call import Call


class Binder:
    """Finds components and validates their parameters, recording every mistake in the document.

    Args:
        slots: all places of the document that name a component.
        search_paths: where dotted paths are looked up.
        known: gives the keys of all tables, for "did you mean"; unset: those of the component's own table.
    """

    def __init__(
        self,
        document: Document,
        slots: Sequence[Slot] = (),
        search_paths: Sequence[str] = (),
        known: Callable[[], Catalog] | None = None,
    ) -> None:
        self.document, self.slots, self.known, self._search_paths = document, slots, known, search_paths
        self.traces: list[str] = []

    def bind(self, slot: Slot) -> Bound | None:
        """The slot's component with its parameters, or None when a mistake was recorded."""
        try:
            component = registry.find(slot.kind, slot.name, self._search_paths)
            component.check()
        except ComponentError as error:
            fix = error.fix
            if slot.kind == "algorithm" and not is_dotted(slot.name):  # its key takes presets as well
                known = [*preset_names(), *registry.names(slot.kind)]
                fix = did_you_mean(slot.name, known, f"known: {', '.join(known)}, or a dotted path to your own")
            self.document.refuse(slot.path, error.problem, fix)
            self.traces += [error.trace] if error.trace else []
            return None
        try:
            bound = component.bind(self._params(slot, component))
        except ParameterError as error:
            known = self.known() if self.known else catalog({component.table: component.schema})
            beside = tuple(part for part in slot.params_path if isinstance(part, str))
            known = {**known, beside: [*component.schema.model_fields]}
            collect(self.document, error.error, known, lambda location: self._locate(slot, component, location))
            return None
        except ComponentError as error:
            self.document.refuse(slot.path, error.problem, error.fix)
            return None
        return bound if slot.weight is None else Bound(component, {**bound.params, "weight": slot.weight})

    def written(self) -> dict[Slot, Bound]:
        """Every registered component whose table is written, whether a slot names it or not; without mistakes."""
        found: dict[Slot, Bound] = {}
        for component in registry.components(tables=self.document.data):
            table = self.document.data.get(component.table)
            if isinstance(table, dict):
                with suppress(ParameterError):
                    slot = Slot(component.kind, component.name, (component.table,))
                    found[slot] = component.bind(component.takes(table))
        return found

    def check(self, trait: str, bound: Mapping[Slot, Bound | None], config: Config) -> None:
        """Record what the components' own checks find, the functions in their trait `check` or its like.

        Components that share a check and their parameters, as the engines of [vllm] do, are checked once.
        """
        checks = {
            (one.component.traits[trait], one.component.table, slot.params_path if slot.params else ()): (slot, one)
            for slot, one in bound.items()
            if one is not None and trait in one.component.traits
        }
        for (check, *_), (slot, one) in checks.items():
            findings: list[Finding] = []
            with Call(slot.kind, slot.name)(), left_out(self.document):
                findings += check(one.params, config)
            for at, problem, fix, fatal, exit_code in findings:
                path = self._locate(slot, one.component, at) if at else slot.path
                note = partial(self.document.refuse, exit_code=exit_code) if fatal else self.document.warn
                note(path, problem, fix)

    def _params(self, slot: Slot, component: Component) -> dict[str, Any]:
        table = self.document.data.get(component.table, {})
        own = dict(slot.params) if slot.inline or is_dotted(slot.name) else {}
        sharing = [other for other in self.slots if other.params_path == slot.params_path and is_dotted(other.name)]
        if len(sharing) > 1 and not slot.inline:
            own = component.takes(own)
        if not isinstance(table, dict):
            return own
        alone = len(registry.components(tables=[component.table])) == 1
        return (dict(table) if alone else component.takes(table)) | own

    def _locate(self, slot: Slot, component: Component, location: Path) -> Path:
        """Where a parameter stands: in the component's own table or next to its name."""
        table = self.document.data.get(component.table)
        in_table = isinstance(table, dict) and (location[0] in table or not is_dotted(slot.name))
        inline = location[0] in slot.params or (slot.params_path and not in_table)
        return (*slot.params_path, *location) if inline else (component.table, *location)
