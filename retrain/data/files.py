"""Tasks from local files: JSON lines and parquet."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from retrain.data.rows import (
    BadRow,
    Fraction,
    OnBadRow,
    Reading,
    Rows,
    RowTask,
    digest_of,
    in_hash_order,
    prompt_hash,
    read_problems,
    split,
)
from retrain.errors import DataError, MissingExtraError
from retrain.registry import task

_LONGEST = 1_000_000
"""Bytes of a line; one that is longer is a mistake, and reading it whole might not fit in memory."""


class FileTask(RowTask, ABC):
    """Problems from the rows of a file; all bad rows are reported together.

    Args:
        seed: of the order of every epoch.
        path: of the file with the training problems.
        heldout_path: of a file with the held-out problems; a training row with one of its prompts is bad.
        heldout_fraction: share of `path` to hold out where there is no `heldout_path`.
        prompt_field, answer_field, solution_field, id_field, on_bad_row, max_bad_fraction: see `Reading`.
        shuffle: a new order for every epoch; False keeps the order of the file.
    """

    kind: ClassVar[str]

    def __init__(  # noqa: PLR0913 - its keyword-only parameters are its table
        self,
        seed: int,
        *,
        path: str,
        heldout_path: str | None = None,
        heldout_fraction: Fraction = 0.1,
        prompt_field: str = "prompt",
        answer_field: str = "answer",
        solution_field: str = "solution",
        id_field: str = "id",
        on_bad_row: OnBadRow = "error",
        max_bad_fraction: Fraction = 0.01,
        shuffle: bool = True,
    ) -> None:
        reading = Reading(prompt_field, answer_field, solution_field, id_field, on_bad_row, max_bad_fraction)
        if heldout_path is None:
            train, held = split(read_problems(self.rows(path), path, reading), heldout_fraction, path)
            contents = [_file_hash(path), heldout_fraction]
        else:
            held = in_hash_order(read_problems(self.rows(heldout_path), heldout_path, reading))
            train = read_problems(self.rows(path), path, reading, frozenset(map(prompt_hash, held)))
            contents = [_file_hash(path), _file_hash(heldout_path)]
        super().__init__(seed, train, held, digest_of(self.kind, vars(reading), shuffle, contents), shuffle)

    @staticmethod
    @abstractmethod
    def rows(path: str) -> Rows:
        """The rows of a file with their places."""


@task("jsonl")
class Jsonl(FileTask):
    """One JSON object per line, UTF-8, at most 1,000,000 bytes; blank lines are ignored."""

    kind = "jsonl"

    @staticmethod
    def rows(path: str) -> Rows:
        """Every line, parsed."""
        try:
            with open(path, "rb") as file:
                number = 0
                while line := file.readline(_LONGEST + 1):
                    number += 1
                    complete = len(line) <= _LONGEST
                    while not line.endswith(b"\n") and (rest := file.readline(_LONGEST)):
                        line = rest
                    if not complete:
                        yield f"{path}:{number}", BadRow(f"the line is longer than {_LONGEST:,} bytes")
                    elif line.strip():
                        yield f"{path}:{number}", parse_line(line, first=number == 1)
        except OSError as error:
            raise _unreadable(path, error) from error


@task("parquet", extra=("pyarrow", "parquet"))
class Parquet(FileTask):
    """Rows of a parquet file (extra `parquet`); places count rows from 1."""

    kind = "parquet"

    @staticmethod
    def rows(path: str) -> Rows:
        """Every row as a dict."""
        try:
            arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
        except ModuleNotFoundError as error:
            raise MissingExtraError("pyarrow", "parquet") from error
        number = 0
        try:
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=1024):
                    for row in _batch_rows(batch):
                        number += 1
                        yield f"{path}:{number}", row
        except (OSError, arrow.ArrowException) as error:
            raise _unreadable(path, error) from error


def parse_line(line: bytes, *, first: bool) -> Any:
    """A line of JSON, or the BadRow that it is; only the first may begin with a byte order mark."""
    try:
        text = line.decode("utf-8-sig" if first else "utf-8")
        return json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except UnicodeDecodeError as error:
        return BadRow(f"not UTF-8: byte {error.start + 1} is 0x{line[error.start]:02x}")
    except json.JSONDecodeError as error:
        return BadRow(f"not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return BadRow(f"not JSON: {error}")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.40} is too large for a number")
    return number


def _batch_rows(batch: Any) -> Iterator[Any]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for row in range(batch.num_rows):
            try:
                yield batch.slice(row, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield BadRow(f"not UTF-8: {error.reason}")


def _file_hash(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unreadable(path: str, error: Exception) -> DataError:
    reason = getattr(error, "strerror", None) or str(error)
    return DataError(f"{path}: cannot be read: {reason}; check the path and the file")
