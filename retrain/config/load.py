"""Load a TOML file with overrides as a frozen configuration, or report all of its errors at once.

Phase 1 validates the schema: keys of sections and tables, names of components and their parameters. Code of the user
is imported only if everything else is valid. Phase 2 runs the rules of `retrain.config.rules` and the components' own
checks; it needs a configuration that passed phase 1. Each phase reports all its errors. torch is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from retrain import registry
from retrain.algorithms.graph.column_graph import plan
from retrain.config.binder import Binder
from retrain.config.document import Document, read
from retrain.config.loaded_config import LoadedConfig
from retrain.config.positions import KeyPath, leaves
from retrain.config.presets import apply_task_settings
from retrain.config.rules import RULES
from retrain.config.rules.section_rules import search_paths, unmeasured
from retrain.config.rules.unread_keys import judged, unread_keys
from retrain.config.schema import RUN_NAME, Config
from retrain.config.slots import MIXED, Slot, needs_import, slots
from retrain.errors import ComponentError, ConfigError
from retrain.system.masking import hide_named, literal_secrets
from retrain.types import BASE_COLUMNS

if TYPE_CHECKING:
    from retrain.config.mistakes import Catalog

CatalogLoader = Callable[[], "Catalog"]
"""Returns the keys of all tables. It is called only after an error, because it imports every component."""


def load(file: Path | str, overrides: Sequence[str] = (), text: str | None = None) -> LoadedConfig:
    """Read a configuration, apply overrides, and validate it.

    Args:
        file: path of the TOML file.
        overrides: `key=value`, as after `--set`.
        text: content that is read in place of the file's.
    Raises:
        ConfigError: all errors with places and fixes; tracebacks of user code are in its notes.
    """
    document = read(file, overrides, text)
    _check_name(document, Path(file).stem)
    if "campaign" in document.data:
        raise ConfigError([document.at(("campaign",), "makes this a campaign, not a run", f"retrain campaign {file}")])
    loaded = validate(document)
    # A campaign judges unread keys over all conditions, so that `validate` only collects them.
    mistakes, odd = judged(loaded.unread.items(), bool(overrides))
    if mistakes:
        raise ConfigError(mistakes)
    replaced = loaded.preset.replaced if loaded.preset else ()
    return replace(loaded, warnings=(*loaded.warnings, *replaced, *odd))


def _check_name(document: Document, stem: str) -> None:
    """Raise ConfigError if the file's name is not a valid run name and `[logging] name` is not set."""
    logging = document.data.get("logging", {})
    if not re.fullmatch(RUN_NAME, stem) and not (isinstance(logging, dict) and logging.get("name")):
        problem = f"the file's name, {stem!r}, is not a valid run name: letters, digits, dots, dashes, underscores"
        fix = "set [logging] name, or rename the file"
        raise ConfigError.at(repr(document.file), "[logging] name", problem, fix)


def validate(document: Document) -> LoadedConfig:
    """Validate a document that has been read; a campaign applies its conditions to it first.

    Unlike `load`, this records unread keys in the result instead of reporting them as errors.

    Raises:
        ConfigError: all other errors with places and fixes.
    """
    hide_named(document.data)
    preset, algorithm = None, document.data.get("algorithm")
    if isinstance(algorithm, dict) and "algorithm_mode" in algorithm:
        from retrain.config.preset_keys import apply_preset

        preset = apply_preset(document)
    # Below a preset: what a task recommends yields to all that a file says.
    apply_task_settings(document)
    loaded, binder = _check_schema(document)
    _check_rules(document, binder, loaded)
    sets = _eval_sets(document, loaded.config)
    unread = {finding.at: document.at(finding.at, finding.problem, finding.fix) for finding in unread_keys(loaded)}
    if preset is not None:
        # A preset may set keys of components that the file replaces; they are no mistake of the file.
        of_preset = {
            path for path, key_place in document.places.items() if key_place.preset or key_place.file == preset.file
        }
        preset.unread.extend(path for path in unread if path in of_preset)
        unread = {path: problem for path, problem in unread.items() if path not in preset.unread}
    # A key that only an evaluation set reads is read.
    unread = {path: problem for path, problem in unread.items() if all(path in other.unread for other in sets.values())}
    warnings = [*document.warnings, *(warning for config_of_set in sets.values() for warning in config_of_set.warnings)]
    return replace(loaded, warnings=tuple(dict.fromkeys(warnings)), preset=preset, unread=unread, sets=sets)


def _check_schema(document: Document) -> tuple[LoadedConfig, Binder]:
    """Run phase 1: validate the sections, and bind every component that they name.

    Components named by invalid keys are skipped.

    Raises:
        ConfigError: all errors in keys, names of components and parameters.
    """
    load_catalog = cache(_known_keys)
    config, wrong = _sections(document, load_catalog)
    # A list with an invalid entry is invalid as a whole, so its names are not looked up.
    named = [slot for slot in slots(config, document.data) if not {slot.path[:1], slot.path[:2]} & wrong]
    deferred = [slot for slot in named if needs_import(slot)]
    naming = [(name,) for name in (*(kind.key[0] for kind in registry.KINDS.values() if kind.key), *MIXED)]
    # A component that does not exist is one mistake, together with its table.
    absent = {slot.name for slot in named if slot.name not in registry.names(slot.kind)}
    may_import = bool(deferred) or any(path in wrong for path in naming)
    # `my.loss.my_loss` reads [my_loss], which is then no misspelled [loss].
    likely = {part for slot in deferred for part in slot.name.split(".")}
    pending = _tables(document, load_catalog, absent, may_import, likely)
    _check_text(document, config)
    binder = Binder(document, named, config.plugins.search_paths, load_catalog)
    # Code of the user runs only if nothing else is wrong: importing it may take seconds or have effects.
    bound = {slot: binder.bind(slot) for slot in named if slot not in deferred}
    document.stop()
    bound |= {slot: binder.bind(slot) for slot in deferred}
    # The imports may have registered components that read these tables.
    if pending:
        _tables(document, cache(_known_keys), absent)
    document.stop()
    tables = {name: table for name, table in document.data.items() if name not in Config.model_fields}
    components = {slot: component for slot in named if (component := bound[slot])}
    hide_named([component.params for component in components.values()])
    return LoadedConfig(document.file, document.text, config, tables, components, document.places), binder


def _check_rules(document: Document, binder: Binder, loaded: LoadedConfig) -> None:
    """Run phase 2: check requirements of keys and components on each other and on this machine.

    Raises:
        ConfigError: all errors that the rules find.
    """
    config = loaded.config
    _check_columns(document, loaded)
    for rules in RULES.values():
        for rule in rules:
            for finding in rule(config, loaded):
                document.report(finding)
    read = {
        Slot("signal", signal.name, ("algorithm", "transform_mode")): signal
        for signal in loaded.pipeline.graph
        if signal.kind == "signal"
    }
    written = {**read, **binder.written(), **loaded.slots}
    binder.check(lambda traits: traits.check, written, config)
    binder.check(lambda traits: traits.check_files, loaded.in_use, config)
    document.stop()


def _check_columns(document: Document, loaded: LoadedConfig) -> None:
    """Check that every column that credit, the loss or `[logging] observe` reads can be computed."""
    config = loaded.config
    steps: dict[KeyPath, Callable[[], object]] = {
        ("loss",): lambda: loaded.objective(exact=False),
        ("logging", "observe"): lambda: plan(config.logging.observe, loaded.signal, BASE_COLUMNS),
        ("algorithm", "transform_mode"): lambda: loaded.pipeline,
    }
    for path, resolve in steps.items():
        # Each step needs the results of those before it, so that the first error ends the loop.
        try:
            resolve()
        except ComponentError as error:
            document.refuse(path, error.problem, error.fix)
            document.stop()


def _eval_sets(document: Document, config: Config) -> dict[str, LoadedConfig]:
    """Validate each of `[[eval.sets]]` as a configuration of its own; report the errors of all sets together."""
    configs_of_sets: dict[str, LoadedConfig] = {}
    for index, entry in enumerate(config.eval.sets):
        from retrain.config.preset_keys import of_eval_set

        try:
            configs_of_sets[entry.name] = validate(of_eval_set(document, index, entry))
        except ConfigError as error:
            document.problems += error.problems
            document.traces += getattr(error, "__notes__", ())
    if configs_of_sets:
        for finding in unmeasured(
            config, {name: config_of_set.config.eval for name, config_of_set in configs_of_sets.items()}
        ):
            document.report(finding)
    document.stop()
    return configs_of_sets


def _known_keys() -> Catalog:
    from retrain.config.mistakes import catalog

    tables = {name: registry.table_schema(readers) for name, readers in registry.table_names().items()}
    return catalog({name: Config.model_fields[name].annotation for name in Config.model_fields} | tables)


def _sections(document: Document, load_catalog: CatalogLoader) -> tuple[Config, set[KeyPath]]:
    """Validate the sections. Return them and the paths of invalid keys, which get their defaults.

    An error in an entry of a list invalidates the whole list.
    """
    sections: dict[str, Any] = {name: document.data[name] for name in document.data if name in Config.model_fields}
    try:
        return Config.model_validate(sections), set()
    except ValidationError as error:
        if document.take_text(error):
            return _sections(document, load_catalog)
        from retrain.config.mistakes import collect

        culprits = collect(document, error, load_catalog())
    wrong: set[KeyPath] = {
        path[:2] if all(isinstance(part, str) for part in path[:2]) else path[:1] for path in culprits
    }
    kept = {
        name: {key: table[key] for key in table if (name, key) not in wrong} if isinstance(table, dict) else table
        for name, table in sections.items()
        if (name,) not in wrong
    }
    return Config.model_validate(kept), wrong


def _check_text(document: Document, config: Config) -> None:
    """Check that no string contains a NUL and that plug-in directories exist; warn about literal secrets."""
    for path, value in leaves(document.data):
        if isinstance(value, str) and "\0" in value:
            document.refuse(path, "contains a NUL character", "remove it")
    for finding in search_paths(config):
        document.report(finding)
    for path in literal_secrets(document.data):
        document.warn(
            path,
            "looks like a secret, and would be stored in the run's config.toml and config.resolved.json",
            f"set {path[-1]}_env to the name of an environment variable, and read that where the secret is used",
        )


def _tables(
    document: Document,
    load_catalog: CatalogLoader,
    absent: Container[str],
    may_import: bool = False,
    likely: Container[str] = (),
) -> bool:
    """Validate the tables of components.

    Args:
        document: the configuration.
        load_catalog: returns the keys of all tables.
        absent: names in the file that no component has; their tables are not judged.
        may_import: True if code that is not imported yet may declare further tables.
        likely: names of tables that such code probably declares, even if they resemble others.
    Returns:
        True if a table is left that only such code can declare.
    """
    tables = [name for name in document.data if name not in Config.model_fields]
    if not tables:
        return False
    from retrain.config.mistakes import close, collect, unknown_key

    pending = False
    entry_points = {name for kind in registry.KINDS for name in registry.names(kind)}
    for name in tables:
        if readers := registry.components(tables=[name]):
            try:
                registry.table_schema(readers).model_validate(document.data[name])
            except ValidationError as error:
                if document.take_text(error, (name,)):
                    # Again, with the text that --set typed.
                    tables.append(name)
                else:
                    collect(document, error, load_catalog(), lambda location, table=name: (table, *location))
        elif (
            isinstance(document.data[name], dict) and may_import and (name in likely or not close(name, load_catalog()))
        ):
            pending = True
        elif name not in entry_points and name not in absent:
            value = document.data[name]
            document.refuse((name,), *unknown_key((name,), value, load_catalog(), document.data))
    return pending
