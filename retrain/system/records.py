"""Rows of a file and JSON files: read, checked against a type, and every mistake named with file and line."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BeforeValidator, Discriminator, Tag, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json
from typing_extensions import TypedDict

from retrain.errors import DataError, StorageError
from retrain.system.extras import library
from retrain.system.files import read_plain

T = TypeVar("T")
Rows = Iterable[tuple[str, Any]]
"""(place, row) pairs: the place as errors show it, `file:number` from 1; the row as read, or a BadRow."""

_LONGEST = 1_000_000
"""Bytes of a line; one that is longer is a mistake, and reading it whole might not fit in memory."""
_SHOWN = 20
_MOST = 500
"""Characters of what is wrong with a row, whatever its fields are called."""
_LARGE = re.compile(rb"[eE]\+?[0-9]{3}|[0-9]{309}")
"""Part of a number that is too large for a float."""
_FIELD = re.compile(rb'"\s*:')
"""Separator after the name of every field; may occur in text as well."""
_EXPECTED = {
    "bool": "true or false",
    "dict": "an object with named fields",
    "finite_number": "a finite number",
    "float": "a number",
    "greater_than_equal": "a number that is not negative",
    "int": "an integer",
    "list": "a list",
    "model": "an object with named fields",
    "string": "text",
}
"""Prefixes of pydantic's error types, in words."""
_BRANCHES = ("text", "messages", "str", "int", "float", "bool")
"""Names of a union's members in pydantic's place of an error."""


class BadRow(ValueError):  # noqa: N818 - a finding, collected with its likes
    """Why a row cannot be used."""


class Message(TypedDict):
    """A chat message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


Prompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Message], Tag("messages")],
    Discriminator(lambda value: "messages" if isinstance(value, list) else "text"),
]
"""Text, or chat messages."""


OBJECT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])
Listed = BeforeValidator(lambda value: value if isinstance(value, list) else [value])
"""A single value stands for a list of one."""


def parse_json(data: bytes, finite: bool = False) -> Any:
    """The value in JSON text.

    Args:
        finite: refuse NaN, Infinity, and numbers that are too large for a float.
    Raises:
        BadRow: it is not JSON: not UTF-8, cut off, nested more than 200 deep ...; it names the column.
    """
    try:
        value = from_json(data, allow_inf_nan=not finite)
        if finite and _LARGE.search(data):
            json.dumps(value, allow_nan=False)  # refuses what has become infinite
    except ValueError as error:
        problem, _, place = str(error).rpartition(" at line ")
        column = place.rpartition(" ")[2]
        raise BadRow(f"not JSON: {problem} at column {column}" if problem else f"not JSON: {error}") from None
    return value


def checked(schema: TypeAdapter[T], value: Any) -> T:
    """The value as the schema's type; BadRow naming the field where it does not fit."""
    if isinstance(value, BadRow):
        raise value
    try:
        return schema.validate_python(value)
    except ValidationError as error:
        raise BadRow(_words(error.errors(include_url=False)[0], value)[:_MOST]) from None


def _words(error: ErrorDetails, row: Any) -> str:
    first, *rest = error["loc"] or ("",)
    place = str(first) + "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest if part not in _BRANCHES
    )
    kind, where = error["type"], f"{place}: " if place else ""
    if kind == "value_error":
        return f"{where}{error['ctx']['error']}"  # pyright: ignore[reportTypedDictNotRequiredAccess]
    if kind == "missing":
        has = error["input"] if isinstance(error["input"], Mapping) else row
        return f'no field "{place}"; it has {", ".join(map(str, has)) or "none"}'
    expected = next((words for name, words in _EXPECTED.items() if kind.startswith(name)), None)
    if expected is None:
        return f"{where}{error['msg']}"
    return f"{where}expected {expected}, got {type(error['input']).__name__}"


def jsonl_rows(path: str | Path) -> Rows:
    """Every line of a file of JSON lines, which may be packed (.gz), parsed; blank lines are left out.

    Raises:
        DataError: the file cannot be read.
    """
    opened: Any = gzip.open if str(path).endswith(".gz") else open
    try:
        with opened(path, "rb") as file:
            number = 0
            while line := file.readline(_LONGEST + 1):
                number += 1
                complete = len(line) <= _LONGEST
                while not line.endswith(b"\n") and (rest := file.readline(_LONGEST)):
                    line = rest
                if not complete:
                    yield f"{path}:{number}", BadRow(f"the line is longer than {_LONGEST:,} bytes")
                elif line.strip():
                    yield f"{path}:{number}", _parsed(line, number)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def _parsed(line: bytes, number: int) -> Any:
    """A line's value, or the BadRow that it is; only the first line may begin with a byte order mark."""
    try:
        row = parse_json(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, finite=True)
        # Only a row with more colons than fields can have a field twice: most are not read a second time.
        if not isinstance(row, dict) or len(_FIELD.findall(line)) > len(cast(dict[str, Any], row)):
            json.loads(line.decode("utf-8-sig"), object_pairs_hook=_unique)
    except BadRow as reason:
        return reason
    return row


def _unique(pairs: list[tuple[str, Any]]) -> None:
    """Raise BadRow if an object of JSON has two fields of one name, of which readers would take one or the other."""
    names = Counter(name for name, _ in pairs)
    if len(names) < len(pairs):
        raise BadRow(f'two fields are called "{names.most_common(1)[0][0]}"')


def parquet_rows(path: str | Path) -> Rows:
    """Every row of a parquet file (extra `parquet`) as a dict; places count rows from 1.

    Raises:
        DataError: the file cannot be read. MissingExtraError: pyarrow is not installed.
    """
    arrow, parquet = library("pyarrow", "parquet"), library("pyarrow.parquet", "parquet")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in _batch_rows(batch):
                    number += 1
                    yield f"{path}:{number}", row
    except (OSError, arrow.ArrowException) as error:
        raise _unreadable(path, error) from error


def _batch_rows(batch: Any) -> Iterator[Any]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for row in range(batch.num_rows):
            try:
                yield batch.slice(row, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield BadRow(f"not UTF-8: {error.reason}")


def rows_of(path: str | Path) -> Rows:
    """The rows of .jsonl, .jsonl.gz as a run writes it, or .parquet, by the file's name."""
    return parquet_rows(path) if Path(path).suffix == ".parquet" else jsonl_rows(path)


def parsed_rows(rows: Rows, parse: Callable[[str, Any], T]) -> tuple[list[T], list[str]]:
    """Parse rows: the results of `parse`, and `place: reason` of each row for which it raises BadRow."""
    found: list[T] = []
    return found, bad_rows(rows, lambda place, row: found.append(parse(place, row)))


def bad_rows(rows: Rows, take: Callable[[str, Any], None]) -> list[str]:
    """`place: reason` of each row for which `take`, which gets (place, row as read), raises BadRow."""
    bad: list[str] = []
    for place, row in rows:
        try:
            take(place, row)
        except BadRow as reason:
            bad.append(f"{place}: {reason}")
    return bad


def read_records(path: str, parse: Callable[[str, Any], T], what: str = "") -> list[T]:
    """Every row of a file, parsed.

    Args:
        parse: makes something of (`file:line`, row as read), or raises BadRow to say why it cannot.
        what: the rows are, for errors: " of expert data".
    Raises:
        DataError: the file cannot be read, has no rows, or has bad ones; the first 20 are listed.
    """
    parsed, bad = parsed_rows(rows_of(path), parse)
    if bad:
        raise refusal(bad, f"{path}: {len(bad):,} bad rows{what}: fix or remove them")
    if not parsed:
        raise DataError(f"{path}:1: no rows{what}; it needs at least one")
    return parsed


def refusal(bad: Sequence[str], last: str) -> DataError:
    """The error that lists the first 20 lines of `bad`, and then says `last`."""
    more = [f"... and {len(bad) - _SHOWN:,} more"] if len(bad) > _SHOWN else []
    return DataError("\n".join([*bad[:_SHOWN], *more, last]))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file.

    Raises:
        StorageError: it cannot be read, or is not an object.
    """
    return read_object(path, OBJECT)


def read_object(path: Path, schema: TypeAdapter[T]) -> T:
    """The value in a JSON file, of the schema's type; a file that does not exist counts as {}.

    Raises:
        StorageError: it cannot be read, or does not fit.
    """
    try:
        return checked(schema, parse_json(read_plain(path)))
    except (FileNotFoundError, NotADirectoryError):
        return checked(schema, {})
    except (OSError, ValueError) as error:
        raise damaged(f"{path}:1", error) from error


def damaged(place: str, error: Exception) -> StorageError:
    """The error for a file of a run or campaign that is not as it was written."""
    return StorageError(f"{place}: {getattr(error, 'strerror', None) or error}; restore the file from a copy")


def _unreadable(path: str | Path, error: Exception) -> DataError:
    reason = getattr(error, "strerror", None) or str(error)
    return DataError(f"{path}: cannot be read: {reason}; check the path and the file")
