"""Read a file of results, CSV, TSV, JSON lines or Parquet, as rows.

Its columns are `method` (or `condition`), `seed` and at least one metric; `task`, `step` and `problem` are optional.
"""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from retrain.errors import ConfigError, DataError
from retrain.system.files import read_plain
from retrain.system.records import BadRow, jsonl_rows, parquet_rows, refusal

_METHOD = ("method", "condition")
"""Names of the column of methods; results.csv of a campaign has the second."""
_KEYS = frozenset((*_METHOD, "seed", "task", "step", "problem"))
_NO_METRIC = {"status", "reason", "host", "path", "epoch", "time", "timestamp", "elapsed_seconds"} | {
    *("", "unnamed: 0", "__index_level_0__")  # row numbers, as pandas writes them
}
"""Numeric columns that are not metrics."""
_RESULT = re.compile(r"(^|[^a-z])(eval|val|test|acc|accuracy|pass|avg@|score)")
"""Pattern of the names of likely metrics."""
_BLANK = {"", "-", "null", "none", "na", "n/a", "#n/a", "<na>"}
"""Texts of a cell without a measurement, in lower case."""
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?(?:nan|inf|infinity)", re.IGNORECASE)
_NUMBER_FIX = "write a number as 0.40 or 1400, without % or separators, or leave the cell blank if nothing was measured"
_RECIPES = "docs/compare.md has recipes that make such a table of the files of TRL, verl, prime-rl and W&B"
_LIMIT = 1e15
"""Largest magnitude of a value. Larger ones have rounding errors above 0.1, and sums of their squares overflow."""
_ZERO = 1e-100
"""Magnitudes below count as 0, because their squares underflow."""


class ResultRow(NamedTuple):
    """The measurements of one run at one step.

    Attributes:
        line: file and line.
        method, seed, task: the run, and its task ("" without a column `task`).
        step: the step; None without one.
        metrics: name of each metric -> value as written.
        problem: the problem that was answered, in a file with a row for each; else "".
    """

    line: str
    method: str
    seed: int
    task: str
    step: int | None
    metrics: Mapping[str, Any]
    problem: str = ""


def read_results_file(file: Path) -> list[ResultRow]:
    """Read all rows of a file.

    Raises:
        DataError: the file cannot be read or has invalid rows; the message names file and line.
    """
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        raise DataError(f"{file}: not a table of results: give a file {', '.join(_READERS)}; {_RECIPES}")
    rows = [*reader(file)]
    bad = [f"{line}: {row}" for line, row in rows if isinstance(row, BadRow)]
    bad += [f"{line}: not an object with named fields" for line, row in rows if not isinstance(row, (BadRow, dict))]
    if bad:
        raise refusal(bad, file, ": fix or remove them")
    if not rows:
        raise DataError(f"{file}: no rows")
    return [_result_row(line, row) for line, row in rows]


def _result_row(line: str, row: Mapping[str, Any]) -> ResultRow:
    columns = {name.strip().lower(): name for name in row}
    method = next((columns[name] for name in _METHOD if name in columns), None)
    if method is None or "seed" not in columns:
        missing = "seed" if method else "method"
        raise DataError(f"{line}: no column {missing}; it has {', '.join(list(row)[:20])}: {_RECIPES}")
    step = row[columns["step"]] if "step" in columns else None
    metrics = {
        name.strip(): value
        for lower, name in columns.items()
        if lower not in _KEYS and not isinstance(value := row[name], (dict, list))
    }
    return ResultRow(
        line,
        _text(row[method], line, "method"),
        _integer(row[columns["seed"]], line, "seed"),
        _text(row[columns["task"]], line, "task") if "task" in columns else "",
        None if _blank(step) else _integer(step, line, "step"),
        metrics,
        _text(row[columns["problem"]], line, "problem") if "problem" in columns else "",
    )


def measured(row: ResultRow, metric: str) -> float | None:
    """Return the metric of a row, which may be NaN or infinite; None for a blank cell or null.

    Raises:
        DataError: the value is not a number, or its magnitude is larger than 1e15.
    """
    value = row.metrics[metric]
    if _blank(value):
        return None
    text = str(value).strip()
    # float() also takes "1_000" and digits of other scripts, which a table hardly means.
    if isinstance(value, bool) or not (_NUMBER.fullmatch(text) or _NOT_FINITE.fullmatch(text)):
        raise DataError(f"{row.line}: {metric} is {text[:50]!r}, which is not a number; {_NUMBER_FIX}")
    # Parquet and JSON give numbers, CSV texts; one way through text treats them alike.
    number = float(text)
    if not _NOT_FINITE.fullmatch(text) and abs(number) > _LIMIT:
        fix = "fix the value, or give the metric in a larger unit"
        raise DataError(f"{row.line}: {metric} is {text[:50]}, larger in magnitude than {_LIMIT:.0e}; {fix}")
    return number if not abs(number) < _ZERO else 0.0


def only_metric(rows: Sequence[ResultRow]) -> str:
    """Return the only metric that rows have, or `accuracy` if it is one of several.

    Raises:
        DataError: the rows have no metric.
        ConfigError: there are several metrics.
    """
    names = metrics(rows)
    if any("accuracy" in row.metrics for row in rows):
        return "accuracy"
    if len(names) == 1:
        return names[0]
    if not names:
        raise DataError(f"{rows[0].line}: no column holds numbers: add one with the results; {_NUMBER_FIX}")
    problem = f"there are several metrics: {', '.join(names[:30])}"
    raise ConfigError.at(rows[0].line, "--metric", problem, "choose one of them")


def metrics(rows: Sequence[ResultRow]) -> list[str]:
    """Return the names of numeric columns, likely metrics first."""
    numeric = dict.fromkeys(
        name
        for row in rows
        for name, value in row.metrics.items()
        if name.lower() not in _NO_METRIC and not isinstance(value, bool) and _NUMBER.fullmatch(str(value).strip())
    )
    return sorted(numeric, key=lambda name: _RESULT.search(name) is None)


def _blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.strip().lower() in _BLANK)


def _csv_rows(file: Path) -> Iterable[tuple[str, Any]]:
    try:
        text = read_plain(file).decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{file}: {error}") from error
    except UnicodeDecodeError:
        raise DataError(f"{file}: not a text in UTF-8; export it as CSV in UTF-8") from None
    first = text.lstrip().partition("\n")[0]
    # A spreadsheet in a locale with decimal commas separates columns by semicolons.
    separator = "\t" if file.suffix.lower() == ".tsv" else max(",;\t", key=first.count)
    # newline=None: a line may end with a carriage return alone
    reader = csv.reader(io.StringIO(text, newline=None), delimiter=separator)
    header: list[str] | None = None
    try:
        for line in reader:
            if not any(cell.strip() for cell in line):
                continue
            if header is None:
                header = [name.strip() for name in line]
                if len(set(header)) < len(header):
                    raise DataError(f"{file}:{reader.line_num}: two columns have the same name")
            elif len(line) != len(header):
                yield f"{file}:{reader.line_num}", BadRow(f"{len(line)} values for {len(header)} columns")
            else:
                yield f"{file}:{reader.line_num}", dict(zip(header, line, strict=True))
    except csv.Error as error:
        raise DataError(f"{file}:{reader.line_num}: {error}") from error


def _text(value: Any, line: str, field: str) -> str:
    """Return a name on one line and in Unicode's NFC form; DataError if it is blank or not a text."""
    written = str(value) if isinstance(value, (str, int, float)) and value == value else ""  # NaN != NaN
    # Editors and file systems write `é` in two ways, which are one method.
    text = " ".join(unicodedata.normalize("NFC", written).split())
    if not text:
        raise DataError(f"{line}: {field} is blank or not a text; write the name of the {field}")
    return text


def _integer(value: Any, line: str, field: str) -> int:
    """Convert the value of a field to an integer; DataError, which names line and field, if it is not one."""
    try:
        number = float(value)
        # Beyond 2^53 a float skips integers, so that two seeds could become one.
        if isinstance(value, bool) or not number.is_integer() or abs(number) > 2**53:
            raise ValueError
        return int(number)
    except (TypeError, ValueError, OverflowError):
        shown = json.dumps(value, default=str)[:50]
        raise DataError(f"{line}: {field} is {shown}, which is not an integer") from None


_READERS = {
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".jsonl": lambda file: jsonl_rows(file, finite=False),
    ".parquet": parquet_rows,
}
"""Suffix of a file -> its reader."""
