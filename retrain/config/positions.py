"""Line and column of every key of a TOML text, for error messages.

tomli parses the text. The scanner only walks text that tomli has accepted, and records where keys begin.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any

import tomli

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the root of a document to a value."""

# Commas count as blank: the scanner need not check a syntax that tomli has accepted.
_BLANK = re.compile(r"(?:[ \t\n,]|#[^\n]*)*")
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
"""A key that TOML writes without quotes."""
_SCALAR = re.compile(r"[^,\]}#\n]+")
_STRINGS = tuple(
    # Longest delimiters first, so that """ is not read as an empty string and a quote. Up to two quotes may stand
    # before the closing three, hence {3,5}.
    re.compile(pattern, re.DOTALL)
    for pattern in (r'"""(?:\\.|(?!""").)*"{3,5}', r"'''(?:(?!''').)*'{3,5}", r'"(?:\\.|[^"\\])*"', r"'[^']*'")
)


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every value in `value` that is not a table, with its path, which begins with `path`."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, inner in value.items():
        yield from leaves(inner, (*path, key))


def positions(text: str) -> dict[KeyPath, tuple[int, int]]:
    """Return the (line, column), both from 1, of every key, table header and list item in valid TOML.

    Entries of a list of tables are numbered in the order of their headers: `("rewards", 0, "weight")`.
    """
    # tomli counts columns after this replacement, too.
    return _Scanner(text.replace("\r\n", "\n")).document()


class _Scanner:
    """Walk valid TOML from its start, and record where every key, header and list item begins."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.lines = [0, *(match.end() for match in re.finditer("\n", text))]
        self.found: dict[KeyPath, tuple[int, int]] = {}
        self.entries: dict[KeyPath, int] = {}

    def document(self) -> dict[KeyPath, tuple[int, int]]:
        table: KeyPath = ()
        self.skip_blank()
        while self.at < len(self.text):
            if self.text[self.at] == "[":
                table = self.header()
            else:
                self.pair(table)
            self.skip_blank()
        return self.found

    def mark(self, path: KeyPath, at: int) -> None:
        line = bisect_right(self.lines, at)
        # The first header of a table wins: a later [table.inner] marks `table` again.
        self.found.setdefault(path, (line, at - self.lines[line - 1] + 1))

    def take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        assert match is not None, f"the scanner rejects TOML that tomli accepted, at offset {self.at}"
        self.at = match.end()
        return match.group()

    def skip_blank(self) -> None:
        self.take(_BLANK)

    def header(self) -> KeyPath:
        start, is_list = self.at, self.text.startswith("[[", self.at)
        self.at += 1 + is_list
        names = [name for name, _ in self.dotted_key()]
        self.at += 1 + is_list
        path: KeyPath = ()
        for name in names[:-1]:
            path = self.latest_entry((*path, name))
            # [a.b] makes the table `a` as well, and an error may be about it.
            self.mark(path, start)
        path = (*path, names[-1])
        self.mark(path, start)
        if is_list:
            self.entries[path] = self.entries.get(path, -1) + 1
        path = self.latest_entry(path)
        self.mark(path, start)
        return path

    def latest_entry(self, path: KeyPath) -> KeyPath:
        return (*path, self.entries[path]) if path in self.entries else path

    def dotted_key(self) -> list[tuple[str, int]]:
        """Return the names of a dotted key with their offsets; also consumes the whitespace after it."""
        names: list[tuple[str, int]] = []
        while True:
            self.skip_blank()
            start = self.at
            quoted = self.text[self.at] in "\"'"
            word = self.string() if quoted else self.take(BARE_KEY)
            # tomli resolves the escapes of a quoted key.
            names.append((str(tomli.loads(f"key = {word}")["key"]) if quoted else word, start))
            self.skip_blank()
            if self.text[self.at] != ".":
                return names
            self.at += 1

    def string(self) -> str:
        pattern = next(pattern for pattern in _STRINGS if pattern.match(self.text, self.at))
        return self.take(pattern)

    def pair(self, table: KeyPath) -> None:
        path = table
        for name, start in self.dotted_key():
            path = (*path, name)
            self.mark(path, start)
        self.at += 1  # the equals sign
        self.value(path)

    def value(self, path: KeyPath) -> None:
        self.skip_blank()
        first = self.text[self.at]
        if first in "\"'":
            self.string()
        elif first in "[{":
            self.container(path, "]" if first == "[" else "}")
        else:
            self.take(_SCALAR)

    def container(self, path: KeyPath, end: str) -> None:
        self.at += 1
        self.skip_blank()
        count = 0
        while self.text[self.at] != end:
            if end == "}":
                self.pair(path)
            else:
                self.mark((*path, count), self.at)
                self.value((*path, count))
                count += 1
            self.skip_blank()
        self.at += 1
