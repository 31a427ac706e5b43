"""Find the values of a stored configuration that need `--trust`, because somebody else may have written it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pydantic import ValidationError

from retrain.config.document import Document
from retrain.config.loaded_config import LoadedConfig
from retrain.config.positions import KeyPath
from retrain.config.schema import Config

_EFFECTS: dict[tuple[str, str], str] = {
    ("model", "trust_remote_code"): "runs Python files that come with the model",
    ("plugins", "search_paths"): "adds directories of modules",
    ("environment", "python"): "starts this program",
    ("reward_pool", "env"): "shows these environment variables to rewards",
}
"""Keys of sections with their effects. Components name further keys by their trait `reaches`."""


class ForeignValue(NamedTuple):
    """A value that needs trust: its key, the value as text, and its effect."""

    path: KeyPath
    value: str
    effect: str


def in_sections(document: Document) -> Iterator[ForeignValue]:
    """Yield values that take effect during validation; none if a section is invalid, which ends validation earlier."""
    try:
        config = Config.model_validate({key: document.data[key] for key in document.data if key in Config.model_fields})
    except ValidationError:
        return
    for path, effect in _EFFECTS.items():
        # An empty value (False, None, no entries) has no effect that needs trust.
        if value := getattr(getattr(config, path[0]), path[1]):
            yield ForeignValue(path, repr(value), effect)


def in_components(loaded: LoadedConfig) -> Iterator[ForeignValue]:
    """Yield parameters by which components of a validated configuration connect to a server or load code."""
    named = [(slot.params_path, slot.params, component) for slot, component in loaded.slots.items()]
    # No key names a signal, so its parameters can only be in its own table.
    computed = [((), {}, stage) for stage in loaded.pipeline.graph if stage.kind == "signal"]
    for at, params, component in (*named, *computed):
        for key, effect in component.traits.reaches.items():
            if component.params.get(key) is not None:
                path = at if key in params else (component.table,)
                yield ForeignValue((*path, key), repr(component.params[key]), effect)
    for entry in loaded.sets.values():
        yield from in_components(entry)
