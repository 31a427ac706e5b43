"""`load`: a TOML file and overrides to a frozen configuration, or all that is wrong with it at once.

Two phases: everything that can be known without running anybody's code, and only when that is in order,
dotted paths and entry points are imported. torch is imported by neither.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path as FilePath
from typing import Any

from pydantic import BaseModel, ValidationError

from retrain import registry
from retrain.algorithms.graph.column_graph import Stage
from retrain.algorithms.graph.pipeline import Pipeline
from retrain.config.binder import Binder
from retrain.config.checks import check, check_measured
from retrain.config.credit_checks import check_credit, check_expert, check_overlap
from retrain.config.document import Document, left_out, read
from retrain.config.environment_checks import check_environment
from retrain.config.mistakes import Catalog, catalog, close, collect, unknown_key
from retrain.config.positions import Path
from retrain.config.presets import lay_task, lay_under, of_eval_set
from retrain.config.resolve import LoadedConfig, Resolved, Slot, needs_import, slots
from retrain.config.schema import RUN_NAME, Config
from retrain.config.unread import judged, unread_keys
from retrain.errors import ComponentError, ConfigError, ConfigProblem
from retrain.registry import Bound
from retrain.rewards.signatures import form_of
from retrain.system.masking import hide_named

CatalogLoader = Callable[[], Catalog]
"""Gives the keys of all tables: they take the import of every component, and a valid file needs none of it."""


def load(file: FilePath | str, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read, override and validate a configuration.

    Args:
        overrides: `key=value`, as after `--set`.
    Raises:
        ConfigError: every mistake with its place and a fix; a traceback of user code is among its notes.
    """
    document = read(file, overrides)
    _check_name(document, FilePath(file).stem)
    if "campaign" in document.data:
        raise ConfigError([document.at(("campaign",), "makes this a campaign, not a run", f"retrain campaign {file}")])
    loaded = validate(document)
    mistakes, odd = judged([*loaded.unread.items()], (lambda: load(file)) if overrides else None)
    if mistakes:
        raise ConfigError(mistakes)
    return replace(loaded, warnings=(*loaded.warnings, *odd))


def _check_name(document: Document, stem: str) -> None:
    """A file whose name cannot be that of a run needs a name in `[logging]`."""
    logging = document.data.get("logging", {})
    if not re.fullmatch(RUN_NAME, stem) and not (isinstance(logging, dict) and logging.get("name")):
        problem = f"the file's name, {stem!r}, cannot be that of a run: letters, digits, dots, dashes, underscores"
        raise ConfigError([ConfigProblem(repr(document.file), 0, 0, "[logging] name", problem, "set it, or rename it")])


def validate(document: Document) -> LoadedConfig:
    """As `load`, from a document that has been read (a campaign lays its conditions over it first).

    Unread keys are noted, not refused. What sections and components demand of each other is checked even if keys
    have mistakes, as far as it does not depend on those.
    """
    hide_named(document.data)
    preset = lay_under(document)
    lay_task(document)
    known = cache(_known_keys)
    config, sure = _sections(document, known)
    binder = Binder(document, list(slots(config, document.data)), config.plugins.search_paths, known)
    later = [slot for slot in binder.slots if needs_import(slot)]
    found = len(document.problems)
    pending = _tables(document, known, may_import=bool(later))
    tables_are_sure = len(document.problems) == found
    bound = {slot: binder.bind(slot) for slot in binder.slots if slot not in later}
    _check_sure(document, binder, sure, bound, plan=tables_are_sure and not later)
    _stop(document, binder)
    own = {slot: binder.bind(slot) for slot in later}
    bound |= own
    binder.check("check", own, config)
    binder.check("check_files", own, config)
    binder.check("check_code", {**binder.written(), **bound}, config)
    if pending:
        _tables(document, cache(_known_keys), may_import=False)
    _stop(document, binder)
    tables = _own_tables(document)
    resolved = _resolved(tables, config, {slot: bound[slot] for slot in binder.slots})
    hide_named([bound.params for bound in resolved.every()])
    graph = _plan(document, config, resolved)
    sets = _eval_sets(document, binder, config)
    unread = unread_keys(document, config, resolved, {slot: one for slot, one in bound.items() if one}, graph)
    return LoadedConfig(
        document.file,
        document.text,
        config,
        tables,
        resolved,
        document.places,
        tuple(dict.fromkeys([*document.warnings, *(warning for one in sets.values() for warning in one.warnings)])),
        preset,
        {
            path: one
            for path, one in unread.items()
            if (preset is None or one.file != preset.file) and all(path in other.unread for other in sets.values())
        },
        sets,
    )


def _eval_sets(document: Document, binder: Binder, config: Config) -> dict[str, LoadedConfig]:
    """Each of `[[eval.sets]]` as a configuration; their mistakes are reported together, behind those of the run."""
    _stop(document, binder)
    found: dict[str, LoadedConfig] = {}
    for index, entry in enumerate(config.eval.sets):
        try:
            found[entry.name] = validate(of_eval_set(document, index, entry))
        except ConfigError as error:
            document.problems += error.problems
            binder.traces += getattr(error, "__notes__", ())
    if found:
        check_measured(config, document, {name: one.config.eval for name, one in found.items()})
    _stop(document, binder)
    return found


def _check_sure(
    document: Document, binder: Binder, sure: Config, bound: Mapping[Slot, Bound | None], plan: bool
) -> None:
    """What the keys and components that are sure demand of each other; with `plan` also of the stages of credit."""
    check(sure, document)
    binder.check("check", {**binder.written(), **bound}, sure)
    binder.check("check_files", bound, sure)
    if document.problems and plan:
        with left_out(document):
            if all(bound.get(slot) for slot in slots(sure, document.data)):
                _plan(document, sure, _resolved(_own_tables(document), sure, bound))


def _own_tables(document: Document) -> dict[str, Any]:
    """The tables of components."""
    return {name: table for name, table in document.data.items() if name not in Config.model_fields}


def _resolved(tables: Mapping[str, Any], config: Config, bound: Mapping[Slot, Bound | None]) -> Resolved:
    resolved = Resolved(tables, config.logging.observe)
    for slot, component in bound.items():
        if component is not None:
            resolved.bound.setdefault(slot.kind, []).append(component)
    return resolved


def _known_keys() -> Catalog:
    tables = {name: registry.table_schema(readers) for name, readers in registry.table_names().items()}
    return catalog({name: Config.model_fields[name].annotation for name in Config.model_fields} | tables)


def _sections(document: Document, known: CatalogLoader) -> tuple[Config, Config]:
    """The sections, and those of them that are sure: where there are mistakes, the rest is kept, to find more."""
    sections = {name: document.data[name] for name in document.data if name in Config.model_fields}
    try:
        config = Config.model_validate(sections)
    except ValidationError as error:
        sections = copy.deepcopy(sections)
        culprits = collect(document, error, known())
        for path in culprits:
            _drop(sections, path)
        config = Config.model_validate(sections)
        return config, _sure(config, document, culprits)
    return config, config


def _sure(config: Config, document: Document, culprits: Sequence[Path]) -> Config:
    """The sections without the keys whose values are in doubt; reading one of those raises AttributeError.

    In doubt is what has a mistake, and what is not written while a fix of a mistake names it: a misspelt
    `group_size` must not be compared as if the default had been meant.
    """
    named = {word for problem in document.problems for word in re.findall(r"\w+", problem.fix)}
    doubtful = {path[:1] if len(path) < 3 and path not in document.places else path[:2] for path in culprits}
    sure = config.model_copy(deep=True)
    for name, part in [*sure]:
        if (name,) in doubtful or (isinstance(part, tuple) and any(path[:1] == (name,) for path in doubtful)):
            del vars(sure)[name]
        elif isinstance(part, BaseModel):
            for key in type(part).model_fields:
                if (name, key) in doubtful or (key in named and (name, key) not in document.places):
                    del vars(part)[key]
    return sure


def _drop(data: dict[str, Any], path: Path) -> None:
    """Remove what is at `path`, or the table that lacks it; a list goes whole: its entries are known by their index."""
    if any(isinstance(part, int) for part in path):
        data.pop(str(path[0]), None)
        return
    table = data
    for part in path[:-1]:
        table = table.get(str(part), {})
    if str(path[-1]) in table:
        del table[str(path[-1])]
    elif path[:-1]:
        _drop(data, path[:-1])


def _tables(document: Document, known: CatalogLoader, may_import: bool) -> bool:
    """Validate the tables of components.

    Args:
        may_import: code that is not imported yet may declare further tables.
    Returns:
        Whether a table is left that only such code can know.
    """
    pending = False
    entry_points = {name for kind in registry.KINDS for name in registry.names(kind)}
    for name in [name for name in document.data if name not in Config.model_fields]:
        if readers := registry.components(tables=[name]):
            try:
                registry.table_schema(readers).model_validate(document.data[name])
            except ValidationError as error:
                collect(document, error, known(), lambda location, table=name: (table, *location))
        elif isinstance(document.data[name], dict) and may_import and not close(name, known()):
            pending = True
        elif name not in entry_points:
            value = document.data[name]
            document.refuse((name,), *(("", "") if document.full else unknown_key((name,), value, known())))
    return pending


def _plan(document: Document, config: Config, resolved: Resolved) -> Sequence[Stage]:
    """The stages of credit; a chain whose columns cannot all be computed, or a loss without terms, is refused."""
    path: Path = ()
    try:
        for index, reward in enumerate(resolved.all("reward")):
            path = ("rewards", index, "name")
            _check_reward(document, path, reward, resolved.all("task"))
        path = ("environment", "name")
        check_environment(config, document, resolved)
        path = ("loss",)
        objective = resolved.objective(exact=False)
        check_expert(config, document, resolved.all("loss"))
        path = ("logging", "observe")
        resolved.check_observed()
        path = ("algorithm", "transform_mode")
        pipeline = Pipeline.resolve(resolved.stages(objective.signals), resolved.signal)
        check_credit(config, document, resolved, objective, pipeline.graph)
        check_overlap(config, document, resolved, pipeline)
        return pipeline.graph
    except ComponentError as error:
        document.refuse(path, error.problem, error.fix)
        return ()


def _check_reward(document: Document, path: Path, reward: Bound, tasks: Sequence[Bound]) -> None:
    """A reward must fit a form, and find what it compares with."""
    form = form_of(reward.component)
    for task in tasks:
        if "answer" in form.required and task.params.get("answer_field") == "":
            problem = f'reward "{reward.name}" reads the answer, and [{task.name}] answer_field = "" says there is none'
            document.refuse(path, problem, "name the column, or choose a reward that needs none")


def _stop(document: Document, binder: Binder) -> None:
    if document.problems:
        in_order = sorted(dict.fromkeys(document.problems), key=lambda problem: (problem.line, problem.column))
        if document.unlisted:
            more = f"and {document.unlisted:,} more mistakes"
            in_order.append(ConfigProblem(document.file, 0, 0, "file", more, "correct these first"))
        error = ConfigError(in_order)
        for trace in binder.traces:
            error.add_note(trace)
        raise error
