"""A TOML file with command-line overrides applied, and the place of every value."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import isfile
from pathlib import Path
from typing import Any

import tomli
import tomli_w
from pydantic import ValidationError

from retrain import registry
from retrain.config.positions import KeyPath, leaves, positions
from retrain.errors import ConfigError, ConfigProblem, raise_all
from retrain.registry import Finding
from retrain.registry.built_in import ALIASES, ALTERNATIVES
from retrain.system.files import expanded
from retrain.system.masking import HIDDEN, literal_secrets

EXTENDS = "extends"
"""Key that names another file; the keys of this file override those of the named one."""
PRESET_KEY: KeyPath = ("algorithm", "algorithm_mode")
"""Key that may name a preset."""
_CREDIT = ("advantage_mode", "transform_mode")
"""Keys of [algorithm] that an algorithm replaces."""


@dataclass(frozen=True)
class Place:
    """Place of a value: file, line and column (0 for an override), and the key as it was typed.

    For a value of a built-in preset it is the place that names the preset.
    """

    file: str
    line: int
    column: int
    typed: KeyPath
    preset: str = ""


@dataclass
class Document:
    """A configuration before validation.

    Attributes:
        file, text: path and content of the file.
        data: values under their canonical keys.
        places: canonical key -> place.
        problems: errors so far.
        warnings: settings that are valid but probably not intended.
        traces: tracebacks of errors that code of the user raised.
        lower: keys that layers below the one that names the preset set; the preset replaces them.
        typed: values of `--set` that TOML reads as something else than text -> their text, as it was typed.
    """

    file: str
    text: str = ""
    data: dict[str, Any] = field(default_factory=dict[str, Any])
    places: dict[KeyPath, Place] = field(default_factory=dict[KeyPath, Place])
    problems: list[ConfigProblem] = field(default_factory=list[ConfigProblem])
    warnings: list[ConfigProblem] = field(default_factory=list[ConfigProblem])
    traces: list[str] = field(default_factory=list[str])
    lower: set[KeyPath] = field(default_factory=set[KeyPath])
    typed: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])

    def at(self, path: KeyPath, problem: str, fix: str, exit_code: int = 2) -> ConfigProblem:
        """Return a problem at the place of `path`, or of the innermost table around it that the file has."""
        # A missing key has no place of its own; the innermost table around it has.
        around = next((path[:n] for n in range(len(path), 0, -1) if path[:n] in self.places), ())
        key_place = self.places.get(around, Place(self.file, 1, 1, ()))
        key = show((*key_place.typed, *path[len(around) :]))
        problem += f' (set by preset "{key_place.preset}")' if key_place.preset else ""
        return ConfigProblem(key_place.file, key_place.line, key_place.column, key, problem, fix, exit_code)

    def refuse(self, path: KeyPath, problem: str, fix: str, exit_code: int = 2) -> None:
        """Record an error."""
        self.problems.append(self.at(path, problem, fix, exit_code))

    def warn(self, path: KeyPath, problem: str, fix: str) -> None:
        """Record a warning about a setting that is valid but probably not intended."""
        self.warnings.append(self.at(path, problem, fix))

    def report(self, finding: Finding) -> None:
        """Record the finding of a rule as an error or a warning."""
        if finding.fatal:
            self.refuse(finding.at, finding.problem, finding.fix, finding.exit_code)
        else:
            self.warn(finding.at, finding.problem, finding.fix)

    def stop(self) -> None:
        """Raise ConfigError with all errors, in the order of the file, if there are any."""
        raise_all(self.problems, self.traces)

    def move_aliases(self) -> None:
        """Move the values of key aliases to their canonical keys; their places keep the key as typed."""
        for alias, key in ALIASES.items():
            table = self.data.get(str(alias[0]))
            if not isinstance(table, dict) or alias[1] not in table:
                continue
            # The schema reports a section that is not a table.
            if not isinstance(self.data.setdefault(str(key[0]), {}), dict):
                continue
            if key in self.places:
                first = self.places[key]
                self.refuse(
                    alias, f"the same setting as {show(first.typed)} in line {first.line}", "keep one of the two"
                )
            self.data[str(key[0])][key[1]] = table.pop(alias[1])
            for path in [path for path in self.places if path[:2] == alias]:
                self.places.setdefault((*key, *path[2:]), self.places[path])

    def override(self, text: str) -> KeyPath:
        """Apply one `--set key=value`, and return the canonical key; a value that is not TOML is a string."""
        name, equals, typed = text.partition("=")
        path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in name.strip().split("."))
        path = ALIASES.get(path, path)
        value = _value(typed.strip())
        # Errors and the stored file show the flag, which must not show a secret.
        secret = any(literal_secrets({part: value}) for part in name.strip().split("."))
        flag = f"--set {name}={HIDDEN}" if secret else f"--set {text}"
        if not equals:
            problem = "the value is missing"
        else:
            # Tables that the flag creates have its place too.
            around = [path[:depth] for depth in range(1, len(path) + 1)]
            problem = self.set(path, value, {part: Place(flag, 0, 0, part) for part in around})
        if problem:
            fix = "write --set section.key=value, and an index for a list: --set rewards.0.weight=2"
            self.problems.append(ConfigProblem(flag, 0, 0, name.strip(), problem, fix))
            return path
        # See `take_text`.
        if not isinstance(value, str):
            self.typed[path] = typed.strip()
        if (other := ALTERNATIVES.get(path)) is not None:
            self.data[other[0]].pop(other[1], None)
            self.forget(other)
        return path

    def set(self, path: KeyPath, value: Any, places: Mapping[KeyPath, Place]) -> str:
        """Set `value` at `path`, creating tables on the way; return the error in the path, or "".

        An index equal to a list's length appends to it.

        Args:
            path: canonical key.
            value: the value; it replaces a table as a whole.
            places: places of the value and of what it contains. Tables around it keep the places that they have.
        """
        node: Any = self.data
        part: Any
        for depth, part in enumerate(path):
            if problem := _no_child(node, part, show(path[:depth])):
                return problem
            if isinstance(node, list) and part == len(node):
                node.append({})
            if depth == len(path) - 1:
                node[part] = value
            else:
                # An index as the next part means that this key is a list.
                inner: Any = [] if isinstance(path[depth + 1], int) else {}
                node = node.setdefault(part, inner) if isinstance(node, dict) else node[part]
        # A value replaces all that was set below its key.
        self.forget(path)
        self.places |= {part: places[part] for part in places if part not in self.places}
        return ""

    def take_text(self, error: ValidationError, table: KeyPath = ()) -> bool:
        """Give keys that must be text the text that `--set` typed for them; return True if a value changed.

        A shell drops the quotes of `--set logging.name="83e2010"`, and TOML reads 83e2010 as a number.

        Args:
            error: what is wrong with the values.
            table: path of the values that were validated.
        """
        texts = {(*table, *detail["loc"]) for detail in error.errors() if detail["type"] == "string_type"}
        changed = texts & self.typed.keys()
        for path in changed:
            self.set(path, self.typed.pop(path), {path: self.places[path]})
        return bool(changed)

    def override_all(self, texts: Iterable[str]) -> list[KeyPath]:
        """Apply overrides as one layer, and return their canonical keys."""
        texts = [*texts]
        changes: list[tuple[KeyPath, Any]] = []
        for name, _, typed in (text.partition("=") for text in texts):
            changes.append((tuple(name.strip().split(".")), _value(typed.strip())))
        self.begin_layer(changes)
        return [self.override(text) for text in texts]

    def begin_layer(self, changes: Iterable[tuple[KeyPath, Any]]) -> None:
        """Note what the next layer replaces besides the keys that it sets, before any of them is set.

        If it names a preset, the preset replaces all keys so far; if it names an algorithm, that replaces advantage and
        transform; and if it names one of these, an algorithm that a layer below names no longer replaces them.
        """
        values = (leaf for key_path, change in changes for leaf in leaves(change, key_path))
        named = {str(path[1]): value for path, value in values if path[0] == "algorithm" and len(path) > 1}
        section = self.data.get("algorithm")
        below: dict[str, Any] = section if isinstance(section, dict) else {}
        displaced: Iterable[str] = ()
        # The three keys replace each other, so that the last layer decides which method is trained.
        if "algorithm_mode" in named:
            self.lower = {path for path, _ in leaves(self.data)}
            displaced = _CREDIT if _is_algorithm(named["algorithm_mode"]) else ()
        elif named.keys() & {*_CREDIT} and _is_algorithm(below.get("algorithm_mode")):
            displaced = ("algorithm_mode",)
        for key in displaced:
            below.pop(key, None)
            self.forget(("algorithm", key))

    def forget(self, path: KeyPath) -> None:
        """Remove the places of `path` and of all keys below it; a preset no longer replaces what is set there."""
        for by_path in (self.places, self.typed):
            for below in [key_path for key_path in by_path if key_path[: len(path)] == path]:
                del by_path[below]
        self.lower = {key_path for key_path in self.lower if not overlap(key_path, path)}


def read(file: str | Path, overrides: Sequence[str] = (), text: str | None = None) -> Document:
    """Read a TOML file with the files that it extends, and apply `key=value` overrides.

    Args:
        file: path of the file.
        overrides: `key=value`, as after `--set`.
        text: content that is read in place of the file's.
    Raises:
        ConfigError: a file cannot be read, is not TOML, or has an invalid `extends`. Other errors are recorded in the
            document.
    """
    document = _over_bases(_parsed(str(file), text), (Path(file).resolve(),))
    # Overrides are one layer, above all files.
    document.override_all(overrides)
    return document


def _over_bases(document: Document, chain: tuple[Path, ...]) -> Document:
    """Merge a document with the file that it extends, recursively; the document's own keys win.

    Tables are merged key by key; a list replaces the list of the extended file. Every value keeps its place.

    Args:
        document: the extending document.
        chain: the files so far, this one last.
    """
    if EXTENDS not in document.data:
        return document
    value, at = document.data.pop(EXTENDS), (EXTENDS,)
    path = Path(document.file).parent / expanded(value) if isinstance(value, str) else None
    if path is None or not isfile(path):
        problem = f'there is no file "{path}"' if path else "must be the path of a TOML file"
        raise ConfigError([document.at(at, problem, 'write extends = "base.toml", relative to this file')])
    # Resolved, so that a cycle through a symbolic link is found.
    if path.resolve() in chain:
        raise ConfigError([document.at(at, f'"{value}" extends this file in turn', "break the cycle")])
    base = _over_bases(_parsed(str(path)), (*chain, path.resolve()))
    overlay(base, [((name,), value, (name,)) for name, value in document.data.items()], document)
    base.problems += document.problems
    return replace(base, file=document.file, text=flat(document.file, base.data))


def flat(file: str, data: Mapping[str, Any]) -> str:
    """Format a configuration that was merged from several files as the text of a single TOML file."""
    return f"# {file}, with the keys of the files that it names\n\n{tomli_w.dumps(data)}"


def _parsed(name: str, text: str | None = None) -> Document:
    """Parse a file, or the text that is given in its place."""
    try:
        # Windows editors write a byte order mark, which TOML does not allow.
        text = Path(name).read_bytes().decode("utf-8-sig") if text is None else text
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise _unreadable(name, line, 1, "not UTF-8 text", "save the file as UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: the path contains a NUL
        problem = getattr(error, "strerror", None) or str(error)
        raise _unreadable(name, 0, 0, problem, "give the path of a TOML file") from None
    try:
        data = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        fix = "write each key once, strings in quotes, and true and false in lower case"
        raise _unreadable(name, error.lineno, error.colno, f"not valid TOML: {error.msg}", fix) from None
    places = {path: Place(name, line, column, path) for path, (line, column) in positions(text).items()}
    document = Document(name, text, data, places)
    document.move_aliases()
    return document


def fork(document: Document) -> Document:
    """Return a copy that can be changed independently."""
    lists = {"problems": [*document.problems], "warnings": [*document.warnings], "traces": [*document.traces]}
    data = copy.deepcopy(document.data)
    places = {**document.places}
    return replace(document, data=data, places=places, lower={*document.lower}, typed={**document.typed}, **lists)


def overlap(first: KeyPath, second: KeyPath) -> bool:
    """Return True if one of two paths lies within the other, or they are equal."""
    shorter = min(len(first), len(second))
    return first[:shorter] == second[:shorter]


def _is_algorithm(name: Any) -> bool:
    """Return True for the name of an algorithm, which replaces advantage and transforms; a preset is not one."""
    return (
        isinstance(name, str)
        and not name.endswith(".toml")
        and (registry.is_dotted(name) or name in registry.names("algorithm"))
    )


def overlay(document: Document, changes: Sequence[tuple[KeyPath, Any, KeyPath]], source: Document) -> None:
    """Set keys as one layer above all that `document` sets.

    See docs/configuration.md, "Order of precedence".

    Args:
        document: the configuration to change.
        changes: (path, value, path of the value in `source`) of each key.
        source: the configuration that the values come from.
    """
    document.begin_layer([(path, value) for path, value, _ in changes])
    for path, value, at in changes:
        merge(document, path, value, source, at)


def merge(document: Document, path: KeyPath, value: Any, source: Document, at: KeyPath) -> None:
    """Set `value` at `path`, with the places of `at` in `source`. Tables are merged; other values are replaced.

    Args:
        document: the configuration to change.
        path: path of the value in `document`.
        value: the value to set.
        source: the configuration that the value comes from.
        at: path of the value in `source`.
    """
    if isinstance(value, dict):
        if not set_already(document.data, path):
            document.set(path, {}, {})
        if at in source.places:
            document.places.setdefault(path, source.places[at])
        for key, inner in value.items():
            merge(document, (*path, key), inner, source, (*at, key))
        return
    path = ALIASES.get(path, path)
    places = {
        (*path, *key_path[len(at) :]): place for key_path, place in source.places.items() if key_path[: len(at)] == at
    }
    if problem := document.set(path, copy.deepcopy(value), places):
        document.problems.append(source.at(at, problem, "name a key of a table"))


def set_already(data: Any, path: KeyPath) -> KeyPath:
    """Return the shortest part of `path` at which `data` has another value than a table, or all of it, or ()."""
    for depth, part in enumerate(path, 1):
        if isinstance(part, str) and part not in data:
            return ()
        data = data[part]
        if not isinstance(data, dict) and not (depth < len(path) and isinstance(path[depth], int)):
            return path[:depth]
    return path


def canonical(key: str) -> str:
    """Replace an alias by its canonical key: `training.lr` -> `optimizer.lr`."""
    path = tuple(key.split("."))
    return ".".join(str(part) for part in ALIASES.get(path, path))


def show(path: KeyPath) -> str:
    """Format a path as in error messages: `[training] lr`, `[[rewards]] weight`, `[gtpo]`."""
    names = [part for part in path if isinstance(part, str)]
    if len(path) == 1 or not names:
        return "".join(names) or "file"
    if isinstance(path[-1], int):
        return f"{show(path[:-1])}[{path[-1]}]"
    table = ".".join(names[:-1])
    return f"[[{table}]] {names[-1]}" if any(isinstance(part, int) for part in path) else f"[{table}] {names[-1]}"


def _unreadable(file: str, line: int, column: int, problem: str, fix: str) -> ConfigError:
    return ConfigError([ConfigProblem(file, line, column, "file", problem, fix)])


def _value(text: str) -> Any:
    try:
        document = tomli.loads(f"value = {text}")
    except tomli.TOMLDecodeError:
        return text
    # "1\nother = 2" is valid TOML of two keys, and no value.
    return document["value"] if len(document) == 1 else text


def _no_child(node: Any, part: str | int, name: str) -> str:
    """Return why `part` cannot be set in `node`, or ""."""
    if isinstance(node, list):
        fits = isinstance(part, int) and part <= len(node)
        return "" if fits else f"{name} is a list of {len(node)} items, and {part!r} is not one of its indices"
    if not isinstance(node, dict):
        return f"{name} is not a table"
    return "" if isinstance(part, str) and part else f"{part!r} is not a key"
