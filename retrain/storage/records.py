"""Rows of a file that a command reads: every one is checked, and all mistakes are told together."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from retrain.data.files import Jsonl, Parquet, parse_line
from retrain.data.rows import BadRow
from retrain.errors import DataError

Record = Mapping[str, Any]
Parsed = TypeVar("Parsed")

_SHOWN = 20


def read_records(path: str, parse: Callable[[str, Record], Parsed]) -> list[Parsed]:
    """Every row of a file, parsed.

    Args:
        path: of the file.
        parse: makes something of (`file:line`, row), or raises BadRow to say why it cannot.
    Raises:
        DataError: the file cannot be read, has no rows, or has bad ones; the first 20 are listed.
    """
    parsed: list[Parsed] = []
    bad: list[str] = []
    for place, row in rows_of(Path(path)):
        try:
            if isinstance(row, BadRow):
                raise row
            if not isinstance(row, dict):
                raise BadRow(f"expected an object with named fields, got {type(row).__name__}")
            parsed.append(parse(place, cast("Record", row)))
        except BadRow as reason:
            bad.append(f"{place}: {reason}")
    refuse(bad, path)
    if not parsed:
        raise DataError(f"{path}: no rows; it needs at least one")
    return parsed


def rows_of(path: Path) -> Iterator[tuple[str, Any]]:
    """(`file:line`, row as read or a BadRow) of .jsonl, .jsonl.gz as a run writes it, or .parquet.

    Raises:
        DataError: the file cannot be read.
    """
    if path.suffix == ".parquet":
        yield from Parquet.rows(str(path))
    elif path.suffix == ".gz":
        yield from _packed_rows(path)
    else:
        yield from Jsonl.rows(str(path))


def _packed_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with gzip.open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                yield f"{path}:{number}", parse_line(line, first=number == 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}; give a .jsonl.gz file that a run wrote") from None


def refuse(bad: Sequence[str], path: str, fix: str = "mend or remove them") -> None:
    """DataError with the first 20 lines of `bad` and the fix, if there are any."""
    if bad:
        more = [f"... and {len(bad) - _SHOWN:,} more"] if len(bad) > _SHOWN else []
        raise DataError("\n".join([*bad[:_SHOWN], *more, f"{path}: {len(bad):,} bad rows; {fix}"]))


def listed(row: Record, name: str, kinds: type | tuple[type, ...], what: str) -> list[Any]:
    """The field as a list of values of these kinds; a single value is a list of one. BadRow otherwise."""
    if name not in row:
        raise BadRow(f'no field "{name}"; it has {", ".join(row) or "none"}')
    values = cast("list[Any]", row[name] if isinstance(row[name], list) else [row[name]])
    for index, value in enumerate(values):
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise BadRow(f"{name}[{index}]: expected {what}, got {type(value).__name__}")
    return values
