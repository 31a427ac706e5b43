"""Bind components to their parameters: find each component that a document names, and validate its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from retrain import registry
from retrain.config.document import Document
from retrain.config.positions import KeyPath
from retrain.config.presets import preset_names
from retrain.config.schema import Config
from retrain.config.slots import Slot
from retrain.errors import ComponentError, did_you_mean
from retrain.registry import Component, Finding, ParameterError, is_dotted
from retrain.registry.call import Call
from retrain.registry.traits import ComponentCheck, Traits

if TYPE_CHECKING:
    from retrain.config.mistakes import Catalog


class Binder:
    """Finds components and validates their parameters; errors are recorded in the document.

    Args:
        document: the configuration.
        slots: all places of the document that name a component.
        search_paths: directories in which dotted paths are looked up.
        load_catalog: returns the keys of all tables, for "did you mean"; None: only the keys of the component's own
            table.
    """

    def __init__(
        self,
        document: Document,
        slots: Sequence[Slot] = (),
        search_paths: Sequence[str] = (),
        load_catalog: Callable[[], Catalog] | None = None,
    ) -> None:
        self.document, self.slots = document, slots
        self._load_catalog, self._search_paths = load_catalog, search_paths

    def bind(self, slot: Slot) -> Component | None:
        """Return the component of a slot with its parameters, or None after recording an error."""
        try:
            component = registry.find(slot.kind, slot.name, self._search_paths)
            component.check()
        except ComponentError as error:
            fix = error.fix
            if slot.kind == "algorithm" and not is_dotted(slot.name):  # the key also accepts presets
                valid_names = [*preset_names(), *registry.names(slot.kind)]
                fix = did_you_mean(
                    slot.name, valid_names, f"known: {', '.join(valid_names)}, or a dotted path to your own"
                )
            self.document.refuse(slot.path, error.problem, fix)
            self.document.traces += [error.trace] if error.trace else []
            return None
        try:
            bound = component.bind(self._params(slot, component))
        except ParameterError as error:
            from retrain.config.mistakes import catalog, collect

            valid_names = self._load_catalog() if self._load_catalog else catalog({component.table: component.schema})
            # The paths of a catalog have no list indices.
            params_path = tuple(part for part in slot.params_path if isinstance(part, str))
            valid_names = {**valid_names, params_path: [*component.schema.model_fields]}
            collect(self.document, error.error, valid_names, lambda location: self._locate(slot, component, location))
            return None
        except ComponentError as error:
            self.document.refuse(slot.path, error.problem, error.fix)
            return None
        # The weight of an entry is above the `weight` in the term's own table.
        return bound if slot.weight is None else replace(bound, params={**bound.params, "weight": slot.weight})

    def written(self) -> dict[Slot, Component]:
        """Return the registered components whose tables the document sets, named by a slot or not.

        Tables with invalid parameters are left out; `bind` reports them.
        """
        written: dict[Slot, Component] = {}
        for component in registry.components(tables=self.document.data):
            table = self.document.data.get(component.table)
            if isinstance(table, dict):
                with suppress(ParameterError):
                    slot = Slot(component.kind, component.name, (component.table,))
                    # The table may also have keys of other components that share it.
                    written[slot] = component.bind(component.takes(table))
        return written

    def check(
        self, trait: Callable[[Traits], ComponentCheck | None], bound: Mapping[Slot, Component], config: Config
    ) -> None:
        """Run the components' own checks, and record their findings.

        Components that share a check and parameters, such as the engines that read [vllm], are checked once.

        Args:
            trait: returns the check of a component's traits, or None.
            bound: components to check.
            config: the sections.
        """
        checks = {
            # Parameters beside the name make the values its own, so that it is checked separately.
            (check, component.table, slot.params_path if slot.params else ()): (slot, component)
            for slot, component in bound.items()
            if (check := trait(component.traits))
        }
        for (check, *_), (slot, component) in checks.items():
            with Call(slot.kind, slot.name)():
                findings: list[Finding] = [*check(component.params, config)]
            for finding in findings:
                at = self._locate(slot, component, finding.at) if finding.at else slot.path
                self.document.report(finding._replace(at=at))

    def _params(self, slot: Slot, component: Component) -> dict[str, Any]:
        """Return the parameters of a slot: those in the component's table, overridden by those next to its name.

        A component that shares a table with others gets only the keys of its own schema.
        """
        table = self.document.data.get(component.table, {})
        beside = dict(slot.params) if slot.inline or component.has_params_table else {}
        # Several dotted paths share [algorithm.transform_params], and each takes what it has.
        if beside and not slot.inline and self._readers(slot.params_path) > 1:
            beside = component.takes(beside)
        # The schema reports a table that is another value.
        if not isinstance(table, dict):
            return beside
        # With one reader every unknown key is a mistake; with several it may be a key of another.
        has_one_reader = len(registry.components(tables=[component.table])) == 1
        return (dict(table) if has_one_reader else component.takes(table)) | beside

    def _readers(self, params_path: KeyPath) -> int:
        """Count the components whose parameters are in the table at a path, without those that do not exist."""
        count = 0
        for slot in self.slots:
            if slot.params_path == params_path:
                with suppress(ComponentError):
                    count += registry.find(slot.kind, slot.name, self._search_paths).has_params_table
        return count

    def _locate(self, slot: Slot, component: Component, location: KeyPath) -> KeyPath:
        """Return the path of a parameter: in the component's own table or next to its name."""
        table = self.document.data.get(component.table)
        # A missing parameter is in neither place: it is reported in the component's table if the file has that.
        in_table = isinstance(table, dict) and (location[0] in table or not component.has_params_table)
        inline = location[0] in slot.params or (slot.params_path and not in_table)
        return (*slot.params_path, *location) if inline else (component.table, *location)
