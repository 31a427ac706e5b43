"""Read rows of a file and JSON files, validate them against a type, and report every error with file and line."""

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

from retrain.errors import DataError, StorageError, did_you_mean
from retrain.system.extras import library
from retrain.system.files import expanded, read_plain

T = TypeVar("T")
Rows = Iterable[tuple[str, Any]]
"""Pairs (place, row). The place is `file:number`, counted from 1, as errors show it. The row is the parsed value, or a
BadRow if it could not be parsed."""

_MAX_LINE = 1_000_000
"""Maximum length of a line in bytes. A longer line is an error and is not read as a whole, to limit memory."""
_MAX_OBJECT = 64 << 20
"""Maximum size in bytes of a JSON file with one object, whose parsed form can be twenty times as large."""
_MAX_LISTED = 20
"""Maximum number of bad rows that an error lists."""
_MAX_REASON = 500
"""Maximum number of characters of the reason why a row is bad, which may contain names of its fields."""
_POSSIBLY_INFINITE = re.compile(rb"[eE]\+?[0-9]{3}|[0-9]{309}")
"""Matches in all texts that contain a number too large for a float, and in some others."""
_FIELD_SEPARATOR = re.compile(rb'"\s*:')
"""Separator after the name of every field. It may also occur inside a string."""
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
"""Maps a prefix of pydantic's error type to the expected value in words."""
_UNION_MEMBERS = ("text", "messages", "str", "int", "float", "bool")
"""Names of union members, which pydantic puts into the location of an error."""


class BadRow(ValueError):  # noqa: N818 - it is collected and reported with others
    """Reason why a row cannot be used."""


class Message(TypedDict):
    """A chat message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


def _with_content(message: Any) -> Any:
    """Return a message that consists of tool calls with content "", which OpenAI's API writes as null."""
    if isinstance(message, dict) and "tool_calls" in message and message.get("content") is None:
        return {**message, "content": ""}
    return cast("Any", message)


Prompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Annotated[Message, BeforeValidator(_with_content)]], Tag("messages")],
    Discriminator(lambda value: "messages" if isinstance(value, list) else "text"),
]
"""A text or a list of chat messages."""


OBJECT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])
Listed = BeforeValidator(lambda value: value if isinstance(value, list) else [value])
"""Validator that turns a value that is not a list into a list of this value."""


def parse_json(data: bytes, finite: bool = False) -> Any:
    """Parse JSON text.

    Args:
        data: the text, in UTF-8.
        finite: reject NaN, Infinity, and numbers that are too large for a float.
    Raises:
        BadRow: the text is not valid JSON or UTF-8, is truncated or is nested more than 200 levels deep. The message
            names the column where the parser stopped.
    """
    try:
        # pydantic's parser bounds the nesting, at which json.loads raises RecursionError.
        value = from_json(data, allow_inf_nan=not finite)
        if finite and _POSSIBLY_INFINITE.search(data):
            json.dumps(value, allow_nan=False)  # raises ValueError if a number was parsed as infinity
    except ValueError as error:
        try:
            data.decode()
        except UnicodeDecodeError as bad:
            raise BadRow(
                f"not UTF-8: byte {data[bad.start]:#x} at column {bad.start + 1}; save the file as UTF-8"
            ) from None
        problem, _, line = str(error).rpartition(" at line ")
        column = line.rpartition(" ")[2]
        raise BadRow(f"not JSON: {problem} at column {column}" if problem else f"not JSON: {error}") from None
    return value


def checked(schema: TypeAdapter[T], value: Any) -> T:
    """Validate a value against a schema and return it as the schema's type.

    Raises:
        BadRow: the value is a BadRow already, or does not fit the schema; the message names the field.
    """
    if isinstance(value, BadRow):
        raise value
    try:
        return schema.validate_python(value)
    except ValidationError as error:
        raise BadRow(_reason(error.errors(include_url=False)[0], value)[:_MAX_REASON]) from None


def _reason(error: ErrorDetails, row: Any) -> str:
    """Describe one of pydantic's errors by the field, the expected value and the value found."""
    first, *rest = error["loc"] or ("",)
    field = str(first) + "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest if part not in _UNION_MEMBERS
    )
    kind = error["type"]
    where = f"{field}: " if field else ""
    if kind == "value_error":
        return f"{where}{error['ctx']['error']}"  # pyright: ignore[reportTypedDictNotRequiredAccess]
    if kind == "missing":
        has = [*map(str, error["input"] if isinstance(error["input"], Mapping) else row)]
        near = did_you_mean(field, has)
        return f'no field "{field}"; it has {", ".join(has) or "none"}' + (f"; {near}" if near else "")
    if kind == "extra_forbidden":
        return f'unknown field "{field}"'
    expected = next((words for name, words in _EXPECTED.items() if kind.startswith(name)), None)
    if expected is None:
        return f"{where}{error['msg']}"
    return f"{where}expected {expected}, got {type(error['input']).__name__}"


def jsonl_rows(path: str | Path, finite: bool = True) -> Rows:
    """Parse every line of a JSON Lines file, which may be compressed (.gz), and skip blank lines.

    Args:
        path: the file.
        finite: reject lines with NaN, Infinity, or numbers that are too large for a float.
    Raises:
        DataError: the file cannot be read.
    """
    opened: Any = gzip.open if str(path).endswith(".gz") else open
    try:
        with opened(expanded(path), "rb") as file:
            number = 0
            # One more than allowed, which tells a longer line from one of exactly that length.
            while line := file.readline(_MAX_LINE + 1):
                number += 1
                complete = len(line) <= _MAX_LINE
                while not line.endswith(b"\n") and (rest := file.readline(_MAX_LINE)):
                    line = rest
                if not complete:
                    yield f"{path}:{number}", BadRow(f"the line is longer than {_MAX_LINE:,} bytes")
                elif line.strip():
                    yield f"{path}:{number}", _parsed(line, number, finite)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def _parsed(line: bytes, number: int, finite: bool) -> Any:
    """Return the parsed value of a line, or a BadRow. Only the first line may begin with a byte order mark."""
    try:
        row = parse_json(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, finite=finite)
        # The slower parser that finds duplicate fields runs only if there are more separators than fields.
        if not isinstance(row, dict) or len(_FIELD_SEPARATOR.findall(line)) > len(cast(dict[str, Any], row)):
            json.loads(line.decode("utf-8-sig"), object_pairs_hook=_check_unique)
    except BadRow as reason:
        return reason
    return row


def _check_unique(pairs: list[tuple[str, Any]]) -> None:
    """Raise BadRow if a JSON object has two fields with the same name: parsers differ in which one they keep."""
    names = Counter(name for name, _ in pairs)
    if len(names) < len(pairs):
        raise BadRow(f'two fields are called "{names.most_common(1)[0][0]}"')


def parquet_rows(path: str | Path) -> Rows:
    """Read every row of a parquet file as a dict; the place of a row is `file:number`, counted from 1.

    Raises:
        DataError: the file cannot be read.
        MissingExtraError: pyarrow (extra `parquet`) is not installed.
    """
    arrow, parquet = library("pyarrow", "parquet"), library("pyarrow.parquet", "parquet")
    number = 0
    try:
        with parquet.ParquetFile(expanded(path)) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in _batch_rows(batch):
                    number += 1
                    yield f"{path}:{number}", arrow_row(row)
    except (OSError, arrow.ArrowException) as error:
        raise _unreadable(path, error) from error


def arrow_row(row: Any) -> Any:
    """Return a row of a parquet file or data set without the nulls that Arrow adds to messages and schemas of tools.

    Arrow gives all structs of a column the members of each, so that the call of a function gets the arguments of
    every other function, as nulls, and a chat template would show them.
    """
    if not isinstance(row, dict):
        return row
    cells = cast("dict[str, Any]", row).items()
    return {name: _without_nulls(cell) if name == "tools" or _is_chat(cell) else cell for name, cell in cells}


def _is_chat(cell: Any) -> bool:
    return isinstance(cell, list) and all(isinstance(turn, dict) and "role" in turn for turn in cast("list[Any]", cell))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(member) for member in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    return {key: _without_nulls(member) for key, member in cast("dict[str, Any]", value).items() if member is not None}


def _batch_rows(batch: Any) -> Iterator[Any]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        # One bad text fails the whole batch; row by row, only its row is bad.
        for row in range(batch.num_rows):
            try:
                yield batch.slice(row, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield BadRow(f"not UTF-8: {error.reason}")


def rows_of(path: str | Path) -> Rows:
    """Read the rows of a file: parquet if its name ends in .parquet, else JSON Lines, compressed if it ends in .gz."""
    return parquet_rows(path) if Path(path).suffix == ".parquet" else jsonl_rows(path)


def parsed_rows(rows: Rows, parse: Callable[[str, Any], T]) -> tuple[list[T], list[str]]:
    """Parse rows.

    Args:
        rows: the rows, each with its place.
        parse: called with place and row; returns the parsed row or raises BadRow.
    Returns:
        The parsed rows, and `place: reason` of each bad row.
    """
    parsed: list[T] = []
    return parsed, bad_rows(rows, lambda line, row: parsed.append(parse(line, row)))


def bad_rows(rows: Rows, take: Callable[[str, Any], None]) -> list[str]:
    """Pass each row with its place to `take`; return `place: reason` of each row for which it raises BadRow."""
    bad: list[str] = []
    for line, row in rows:
        try:
            take(line, row)
        except BadRow as reason:
            bad.append(f"{line}: {reason}")
    return bad


def read_records(path: str, parse: Callable[[str, Any], T], what: str = "") -> list[T]:
    """Read and parse every row of a file.

    Args:
        path: the file; see `rows_of` for the formats.
        parse: called with `file:line` and the row; returns the parsed row or raises BadRow with the reason.
        what: kind of the rows for errors, with a leading space, such as " of expert data".
    Raises:
        DataError: the file cannot be read, has no rows, or has bad rows; the first 20 of them are listed.
    """
    parsed, bad = parsed_rows(rows_of(path), parse)
    if bad:
        no_lines = not parsed and all("not JSON" in line for line in bad)
        fix = "write one JSON object per line" if no_lines else "fix or remove them"
        raise refusal(bad, path, f"{what}: {fix}")
    if not parsed:
        raise DataError(f"{path}:1: no rows{what}; it needs at least one")
    return parsed


def refusal(bad: Sequence[str], name: object, rest: str) -> DataError:
    """Return an error that lists the first 20 reasons in `bad` and ends with `name: N bad rows`, followed by `rest`."""
    reasons = by_reason(bad)
    more = [f"... and {len(reasons) - _MAX_LISTED:,} more"] if len(reasons) > _MAX_LISTED else []
    last = f"{name}: {len(bad):,} bad row{'s' * (len(bad) != 1)}{rest}"
    return DataError("\n".join([*reasons[:_MAX_LISTED], *more, last]))


def by_reason(bad: Sequence[str]) -> list[str]:
    """Return one line for each reason in `bad`, with the place of its first row and the number of the others."""
    counts = Counter(line.partition(": ")[2] for line in bad)
    # Reversed, so that of equal reasons the first row stays.
    first = {line.partition(": ")[2]: line for line in reversed(bad)}
    lines = [(first[reason], counts[reason] - 1) for reason in counts]
    return [f"{line} (and {more:,} more row{'s' * (more > 1)})" if more else line for line, more in lines]


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; return {} if the file does not exist.

    Raises:
        StorageError: the file cannot be read, or its value is not an object.
    """
    return read_object(path, OBJECT)


def read_object(path: Path, schema: TypeAdapter[T]) -> T:
    """Read a JSON file and validate its value against a schema; a file that does not exist counts as {}.

    Raises:
        StorageError: the file cannot be read or is larger than 64 MB, or its value does not fit the schema.
    """
    try:
        return checked(schema, parse_json(read_plain(path, _MAX_OBJECT)))
    except (FileNotFoundError, NotADirectoryError):
        return checked(schema, {})
    except (OSError, ValueError) as error:
        raise damaged(f"{path}:1", error) from error


def damaged(line: str, error: Exception) -> StorageError:
    """Return the error for a file of a run or campaign that is damaged.

    Args:
        line: file and line.
        error: the exception that was raised when the file was read.
    """
    return StorageError(f"{line}: {getattr(error, 'strerror', None) or error}; restore the file from a copy")


def _unreadable(path: str | Path, error: Exception) -> DataError:
    reason = getattr(error, "strerror", None) or str(error)
    return DataError(f"{path}: cannot be read: {reason}; check the path and the file")
