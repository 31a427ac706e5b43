"""Components of a command without a configuration file, whose parameters are set by `--set table.key=value`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrain.config.binder import Binder
from retrain.config.document import Document
from retrain.config.mistakes import catalog, unknown_key
from retrain.config.slots import Slot
from retrain.registry import Component, find, table_schema


class Parameters:
    """Binds components to the parameters of their tables, and refuses parameters that no component reads.

    Args:
        overrides: `table.key=value`, with the value in TOML, as for `retrain train --set`.
    Raises:
        ConfigError: an override is invalid.
    """

    def __init__(self, overrides: Sequence[str] = ()) -> None:
        self._document = Document("--set")
        self._document.override_all(overrides)
        self._document.stop()
        self._readers: dict[str, list[Component]] = {}

    def bind(self, kind: str, name: str, /, **given: Any) -> Component:
        """Return a component with its parameters.

        Args:
            kind: kind of the component.
            name: name of the component.
            given: parameters that apply where the component has them and its table does not set them.
        Raises:
            ComponentError: there is no such component.
            ConfigError: a parameter is invalid.
        """
        component = find(kind, name)
        # Registered before it is bound, so that a misspelt key is compared with its keys.
        self._readers.setdefault(component.table, []).append(component)
        table = self._document.data.setdefault(component.table, {})
        if isinstance(table, dict):
            # What the user sets outranks what the command gives.
            table |= {key: value for key, value in component.takes(given).items() if key not in table}
        bound = Binder(self._document, load_catalog=self._known).bind(Slot(kind, name, (kind,)))
        self._document.stop()
        assert bound is not None, "stop raises if the component is invalid"
        return bound

    def refuse_unread(self) -> None:
        """Raise ConfigError if there are parameters that no component bound so far reads."""
        keys = self._known()
        for table, values in self._document.data.items():
            if table not in self._readers or not isinstance(values, dict):
                self._document.refuse((table,), *unknown_key((table,), values, keys, {}))
                continue
            # Several components may share a table; a key is read if one of them reads it.
            read = {key for reader in self._readers[table] for key in reader.takes(values)}
            for key in [key for key in values if key not in read]:
                self._document.refuse((table, key), *unknown_key((table, key), None, keys, {}))
        self._document.stop()

    def _known(self) -> dict[tuple[str, ...], list[str]]:
        """Return the keys of the tables of all components bound so far."""
        return catalog({table: table_schema(readers) for table, readers in self._readers.items()})
