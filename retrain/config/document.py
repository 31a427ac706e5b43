"""A TOML file with command-line overrides laid over it, and the place where every value was written."""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

import tomli

from retrain import registry
from retrain.config.positions import Path, positions
from retrain.errors import ConfigError, ConfigProblem
from retrain.system.masking import HIDDEN, literal_secrets

_BEYOND = (ValueError, RecursionError)
"""What Python raises for integers of thousands of digits, and tomli for nesting and keys of hundreds of levels."""
_MOST = 100
"""Mistakes that are listed: a file with more of them is not a configuration."""
_DEEPEST = 32
"""Parts of an overridden key: no configuration is nested deeper."""
_SHORTER = "shorten the number, the key or the nesting"


def aliases() -> dict[Path, Path]:
    """Documented second names of keys -> the first ones. Setting a key twice in one file is a mistake.

    Those of signals are in their trait `aliases`: other tables, with the keys of theirs that may stand there.
    """
    found: dict[Path, Path] = {("training", "lr"): ("optimizer", "lr")}
    for one in registry.components("signal", trait="aliases"):
        for table, keys in one.traits["aliases"].items():
            found |= {(table, key): (one.table, key) for key in keys}
    return found


def _excluded(path: Path) -> list[Path]:
    """Keys that a configuration cannot have together with this one, by a component's trait `exclusive`."""
    sets = (one.traits.get("exclusive", ()) for one in registry.components(tables=path[:-1] if len(path) == 2 else ()))
    return [(*path[:-1], key) for keys in sets if path[-1] in keys for key in keys if key != path[-1]]


@dataclass(frozen=True)
class Place:
    """Where a value was written: file, line and column (0 for an override), and the key as it was typed."""

    file: str
    line: int
    column: int
    typed: Path


@dataclass
class Document:
    """A configuration as it is read: values under their canonical keys, their places, and all mistakes so far."""

    file: str
    text: str = ""
    data: dict[str, Any] = field(default_factory=dict[str, Any])
    places: dict[Path, Place] = field(default_factory=dict[Path, Place])
    problems: list[ConfigProblem] = field(default_factory=list[ConfigProblem])
    warnings: list[ConfigProblem] = field(default_factory=list[ConfigProblem])
    unlisted: int = 0

    @property
    def full(self) -> bool:
        """Whether so many mistakes are listed that further ones are only counted, in `unlisted`."""
        return len(self.problems) >= _MOST

    def at(self, path: Path, problem: str, fix: str, exit_code: int = 2) -> ConfigProblem:
        """The problem at the place of `path`, or of the nearest table around it that was written."""
        around = next((path[:n] for n in range(len(path), 0, -1) if path[:n] in self.places), ())
        place = self.places.get(around, Place(self.file, 1, 1, ()))
        key = show((*place.typed, *path[len(around) :]))
        return ConfigProblem(place.file, place.line, place.column, key, problem, fix, exit_code)

    def refuse(self, path: Path, problem: str, fix: str, exit_code: int = 2) -> None:
        """Record a mistake; of more than a hundred the number."""
        if self.full:
            self.unlisted += 1
        else:
            self.problems.append(self.at(path, problem, fix, exit_code))

    def warn(self, path: Path, problem: str, fix: str) -> None:
        """Record something that works and is probably not what was meant."""
        self.warnings.append(self.at(path, problem, fix))

    def move_aliases(self) -> None:
        """Give aliased values their canonical key; the place keeps the key that was typed."""
        for alias, key in aliases().items():
            table = self.data.get(str(alias[0]))
            if not isinstance(table, dict) or alias[1] not in table:
                continue
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

    def override(self, text: str) -> Path:
        """Apply one `--set key=value`; returns the key. The value is TOML, or a string where it is not."""
        name, equals, typed = text.partition("=")
        path: Path = tuple(int(part) if part.isdecimal() else part for part in name.strip().split("."))
        value = _value(typed.strip())
        secret = any(literal_secrets({part: value}) for part in name.strip().split("."))
        flag = f"--set {name}={HIDDEN}" if secret else f"--set {text}"
        if not equals:
            problem = "there is no value"
        elif len(path) > _DEEPEST:
            problem = f"the key has {len(path)} parts"
        else:
            path = aliases().get(path, path)
            problem = _set(self.data, path, value)
        if problem:
            fix = "write --set section.key=value, and an index for a list: --set rewards.0.weight=2"
            self.problems.append(ConfigProblem(flag, 0, 0, name.strip(), problem, fix))
            return path
        self._forget(path)
        for other in _excluded(path):
            self.data[str(other[0])].pop(other[1], None)
            self._forget(other)
        for depth in range(1, len(path) + 1):
            self.places.setdefault(path[:depth], Place(flag, 0, 0, path[:depth]))
        return path

    def _forget(self, path: Path) -> None:
        """Drop the places of `path` and of what is below it."""
        for below in [known for known in self.places if known[: len(path)] == path]:
            del self.places[below]


@contextmanager
def left_out(document: Document) -> Generator[None]:
    """A check that reads a key in doubt is left out: where there are mistakes, such a key is no attribute."""
    try:
        yield
    except AttributeError:
        if not document.problems:
            raise


def read(file: str | FilePath, overrides: Sequence[str] = ()) -> Document:
    """Read a TOML file and lay `key=value` overrides over it.

    Raises:
        ConfigError: the file cannot be read or is not TOML; nothing further can be said about it then.
    """
    name = str(file)
    try:
        text = FilePath(file).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise _unreadable(name, line, 1, "not UTF-8 text", "save the file as UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
        problem = getattr(error, "strerror", None) or str(error)
        raise _unreadable(name, 0, 0, problem, "give the path of a TOML file") from None
    try:
        data = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        fix = "each key once; strings in quotes; true and false in lower case"
        raise _unreadable(name, error.lineno, error.colno, f"not valid TOML: {error.msg}", fix) from None
    except _BEYOND as error:
        raise _unreadable(name, *_longest_line(text), f"cannot be read: {error}", _SHORTER) from None
    places = {path: Place(name, line, column, path) for path, (line, column) in positions(text).items()}
    document = Document(name, text, data, places)
    document.move_aliases()
    for override in overrides:
        document.override(override)
    return document


def _longest_line(text: str) -> tuple[int, int]:
    """Line and column of the longest line, where what is too long for the parser most likely stands."""
    lines = text.split("\n")
    return max(range(len(lines)), key=lambda index: len(lines[index])) + 1, 1


def fork(document: Document) -> Document:
    """A copy with the same values and places; a change of either leaves the other as it is."""
    lists = {"problems": [*document.problems], "warnings": [*document.warnings]}
    return replace(document, data=copy.deepcopy(document.data), places={**document.places}, **lists)


def lay(document: Document, path: Path, value: Any, source: Document, at: Path) -> None:
    """Set `value` at `path` as written at `at` in `source`; tables are laid key by key, anything else is replaced."""
    if isinstance(value, dict):
        if at in source.places:
            document.places.setdefault(path, source.places[at])
        _table(document, path)
        for key, inner in value.items():
            lay(document, (*path, key), inner, source, (*at, key))
        return
    path = aliases().get(path, path)
    table = _table(document, path[:-1])
    if table is None:
        document.problems.append(source.at(at, f"{show(path[:-1])} is not a table", "name a key of a table"))
        return
    table[str(path[-1])] = copy.deepcopy(value)
    for below in [known for known in document.places if known[: len(path)] == path]:
        del document.places[below]
    for known in [known for known in source.places if known[: len(at)] == at]:
        document.places[(*path, *known[len(at) :])] = source.places[known]


def _table(document: Document, path: Path) -> dict[str, Any] | None:
    """The table at `path`, made where it is missing; None where something else is."""
    node: Any = document.data
    for part in path:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            return None
    return node


def canonical(key: str) -> str:
    """A dotted key by its first name: `training.lr` is `optimizer.lr`."""
    path = tuple(key.split("."))
    return ".".join(str(part) for part in aliases().get(path, path))


def show(path: Path) -> str:
    """A path as people write it: `[training] lr`, `[[rewards]] weight`, `[gtpo]`."""
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
    except (tomli.TOMLDecodeError, *_BEYOND):
        return text
    return document["value"] if len(document) == 1 else text


def _set(data: dict[str, Any], path: Path, value: Any) -> str:
    """Set `value` at `path`, making tables on the way; says what is wrong with the path, or ""."""
    node: Any = data
    part: Any
    for depth, part in enumerate(path):
        if problem := _no_child(node, part, show(path[:depth])):
            return problem
        if isinstance(node, list) and part == len(node):
            node.append({})
        if depth == len(path) - 1:
            node[part] = value
        else:
            inner: Any = [] if isinstance(path[depth + 1], int) else {}
            node = node.setdefault(part, inner) if isinstance(node, dict) else node[part]
    return ""


def _no_child(node: Any, part: str | int, name: str) -> str:
    """Why `part` cannot be set in `node`, or ""; the index behind a list's last appends to it."""
    if isinstance(node, list):
        fits = isinstance(part, int) and part <= len(node)
        return "" if fits else f"{name} is a list of {len(node)}, and {part!r} is not one of its indices"
    if not isinstance(node, dict):
        return f"{name} is not a table"
    return "" if isinstance(part, str) and part else f"{part!r} is not a key"
