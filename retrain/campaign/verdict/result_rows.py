"""Read the files of other programs as rows: tables with a row per run, charts, and the metric files of trainers.

A table (CSV or JSON lines) has the columns `method` (or `condition`) and `seed`, one with the metric, and may have
`task` and `step`. A log is one run: `trainer_state.json` of transformers and TRL, or JSON lines of
`{"step": ..., NAME: ...}` (prime-rl) or `{"step": ..., "data": {NAME: ...}}` (verl). A chart that was exported from
Weights & Biases as CSV has a column of its x axis, such as `Step`, and one `RUN - NAME` for each run.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from retrain.campaign.verdict.run_names import run_of_file, run_of_name
from retrain.errors import ConfigError, DataError
from retrain.system.files import read_plain
from retrain.system.records import BadRow, jsonl_rows, parse_json, refusal

_METHOD, _SEED, _TASK = ("method", "condition"), ("seed",), ("task",)
_STEP = ("step", "global_step", "_step", "train/global_step", "trainer/global_step", "training/global_step")
_PROBLEM = ("problem", "problem_id", "question_id", "item")
_PLACE = {*_METHOD, *_SEED, *_TASK, *_STEP, *_PROBLEM}
_INDEX = ("", "unnamed: 0")
"""Names of the column that pandas adds for row numbers."""
_NO_METRIC = {"status", "reason", "host", "path", "epoch", "time", "timestamp", "elapsed_seconds", *_INDEX}
"""Numeric columns that are not metrics."""
_RESULT = re.compile(r"(^|[^a-z])(eval|val|test|acc|accuracy|pass|avg@|score)")
"""Pattern of the names of likely metrics."""
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""First bytes of a text that Excel exports as "Unicode text"."""
_BLANK = {"", "-", "null", "none", "na", "n/a", "#n/a", "<na>"}
"""Texts of a cell without a measurement, in lower case."""
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?(?:nan|inf|infinity)", re.IGNORECASE)
_ALMOST = re.compile(r"[-+]?[0-9]*(?:[.,]?[0-9]+)(?:,[0-9]+)*(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)? ?%?")
"""Number, possibly with a percent sign, a decimal comma or separators of thousands, which are errors."""
_NUMBER_FIX = "write a number as 0.40 or 1400, without % or separators, or leave the cell blank if nothing was measured"
_LIMIT = 1e15
"""Largest magnitude of a value. Larger ones have rounding errors above 0.1, and sums of their squares overflow."""
_ZERO = 1e-100
"""Magnitudes below count as 0, because their squares underflow."""


class ResultRow(NamedTuple):
    """The measurements of one run at one step.

    Attributes:
        place: file and line.
        file: the file.
        origin: file of the run, and its name in a chart. Two origins are two runs.
        method, seed, task: the run, and its task ("" without a task column).
        step: the step; None if the file has no steps.
        figures: name of each metric -> value as written.
        problem: the problem that was answered, in a table with a row for each; else "".
        table: True if the row is of a table with the columns method and seed.
    """

    place: str
    file: Path
    origin: str
    method: str
    seed: int
    task: str
    step: int | None
    figures: Mapping[str, Any]
    problem: str = ""
    table: bool = False


def rows_of_files(files: Sequence[Path]) -> list[ResultRow]:
    """Read all rows of files.

    Raises:
        DataError: the file cannot be read or has invalid rows; the message names file and line.
    """
    return [row for file in dict.fromkeys(files) for row in _rows(file)]


def _rows(file: Path) -> list[ResultRow]:
    suffix = file.suffix.lower()
    if suffix == ".json":
        return _trainer_state(file)
    found = [*_csv_rows(file)] if suffix in (".csv", ".tsv") else [*jsonl_rows(file, finite=False)]
    bad = [f"{place}: {row}" for place, row in found if isinstance(row, BadRow)]
    bad += [f"{place}: not an object with named fields" for place, row in found if not isinstance(row, (BadRow, dict))]
    if bad:
        raise refusal(bad, file, ": fix or remove them")
    if not found:
        raise DataError(f"{file}: no rows")
    return _kind(cast("dict[str, Any]", found[0][1]))(file, found)


def measured(row: ResultRow, metric: str) -> float | None:
    """Return the metric of a row, which may be NaN or infinite; None for a blank cell or null.

    Raises:
        DataError: the value is not a number, or its magnitude is larger than 1e15.
    """
    value = row.figures[metric]
    if _blank(value):
        return None
    text = str(value).strip()
    if isinstance(value, bool) or not (_NUMBER.fullmatch(text) or _NOT_FINITE.fullmatch(text)):
        raise DataError(f"{row.place}: {metric} is {text[:50]!r}, which is not a number; {_NUMBER_FIX}")
    number = float(text)
    if not _NOT_FINITE.fullmatch(text) and abs(number) > _LIMIT:
        fix = "fix the value, or give the metric in a larger unit"
        raise DataError(f"{row.place}: {metric} is {text[:50]}, larger in magnitude than {_LIMIT:.0e}; {fix}")
    return number if not abs(number) < _ZERO else 0.0


def only_metric(rows: Sequence[ResultRow]) -> str:
    """Return the only metric that rows have, or `accuracy` if it is one of several.

    Raises:
        DataError: the files have no rows, or the rows have no metric.
        ConfigError: there are several metrics.
    """
    names = metrics(rows)
    if any("accuracy" in row.figures for row in rows):
        return "accuracy"
    if len(names) == 1:
        return names[0]
    if not names:
        raise DataError(_no_metric(rows) if rows else "the files have no rows")
    problem = f"there are several metrics: {', '.join(names[:30])}"
    raise ConfigError.at(rows[0].place, "--metric", problem, "choose one of them")


def metrics(rows: Sequence[ResultRow]) -> list[str]:
    """Return the names of numeric columns, likely metrics first."""
    found = dict.fromkeys(
        name
        for row in rows
        for name, value in row.figures.items()
        if name.lower() not in _NO_METRIC and _like_number(value)
    )
    return sorted(found, key=lambda name: _RESULT.search(name) is None)


def _no_metric(rows: Sequence[ResultRow]) -> str:
    """Describe rows without a metric by the first cell that is not a number."""
    cells = ((row.place, *cell) for row in rows for cell in row.figures.items() if cell[0].lower() not in _NO_METRIC)
    for place, name, value in cells:
        if not _blank(value):
            text = str(value).strip()
            return f"{place}: no row has a metric: {name} is {text[:50]!r}, not a number; {_NUMBER_FIX}"
    return f"{rows[0].place}: no row has a metric; add a column with the results"


def _blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.strip().lower() in _BLANK)


def _like_number(value: Any) -> bool:
    """Return True for a number, NaN, and a text that is meant as a number."""
    if isinstance(value, str):
        text = value.strip()
        return bool(_ALMOST.fullmatch(text) or _NUMBER.fullmatch(text) or _NOT_FINITE.fullmatch(text))
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _csv_rows(file: Path) -> Iterable[tuple[str, Any]]:
    text = _decoded(file)
    # newline=None: a line may end with a carriage return alone
    reader = csv.reader(io.StringIO(text, newline=None), delimiter=_delimiter(file, text))
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


def _decoded(file: Path) -> str:
    try:
        content = read_plain(file)
        return content.decode("utf-16" if content.startswith(_UTF_16) else "utf-8-sig")
    except OSError as error:
        raise DataError(f"{file}: {error}") from error
    except UnicodeDecodeError:
        raise DataError(f"{file}: not a text in UTF-8; export it as CSV in UTF-8") from None


def _delimiter(file: Path, text: str) -> str:
    """Return the separator of columns: the first that gives a known column, else the one that gives most columns."""
    header = next((line for line in text.splitlines() if line.strip()), "")
    known = lambda one: any(name.strip(' "').lower() in _PLACE for name in header.split(one))  # noqa: E731
    separators = "\t,;|" if file.suffix.lower() == ".tsv" else ",;\t|"
    return max(separators, key=lambda one: (known(one), 0 if known(one) else header.count(one)))


def _kind(first: Mapping[str, Any]) -> Callable[[Path, Sequence[tuple[str, Any]]], list[ResultRow]]:
    """Choose the reader for a file by its first row."""
    if _key(first, _METHOD) and _key(first, _SEED):
        return _table_rows
    plain = [name for name in first if " - " not in name and name.lower() not in _INDEX]
    if len(plain) < len(first) and (len(plain) == 1 or "Step" in plain) and any(" - " in name for name in first):
        return _chart_rows
    return _log_rows


def _table_rows(file: Path, rows: Sequence[tuple[str, Any]]) -> list[ResultRow]:
    """Read a table with a row for each run, or for each run and step."""
    found: list[ResultRow] = []
    for place, row in rows:
        method_key, seed_key, task_key, step_key = (_key(row, names) for names in (_METHOD, _SEED, _TASK, _STEP))
        if not method_key or not seed_key:
            raise DataError(f"{place}: no {'method' if not method_key else 'seed'}; it has {', '.join(row)}")
        method, task = _text(row, method_key, place), _text(row, task_key, place) if task_key else ""
        seed = _whole(row[seed_key], place, "seed")
        step = _whole(row[step_key], place, "step") if step_key else None
        problem = _text(row, key, place) if (key := _key(row, _PROBLEM)) else ""
        figures = _figures(row, _PLACE)
        found.append(ResultRow(place, file, str(file), method, seed, task, step, figures, problem, True))
    return found


def _log_rows(file: Path, rows: Sequence[tuple[str, Any]]) -> list[ResultRow]:
    """Read a log with a row for each step of one run."""
    if bad := [(place, row) for place, row in rows if not _key(row, _STEP)]:
        place, row = bad[0]
        fields = ", ".join(list(row)[:20])
        fix = "a table needs the columns method and seed, a log needs step"
        raise DataError(f"{place}: neither method and seed nor a step; it has {fields}: {fix}")
    method, seed = run_of_file(file)
    run = _one_line(method), seed
    found: list[ResultRow] = []
    for place, row in rows:
        step = _whole(row[_key(row, _STEP)], place, "step")
        own = _figures(row["data"] if isinstance(row.get("data"), dict) else row, _STEP)
        found.append(ResultRow(place, file, str(file), *run, "", step, own))
    return _merged_steps(found)


def _merged_steps(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Merge the rows of one step, because trainers log training and evaluation in separate rows.

    A later value replaces an earlier one, but a cell that is blank or NaN does not replace a value.
    """
    steps: dict[int | None, ResultRow] = {}
    for row in rows:
        if before := steps.get(row.step):
            known = {name: value for name, value in row.figures.items() if not _no_value(value)}
            row = row._replace(figures={**row.figures, **before.figures, **known})
        steps[row.step] = row
    return list(steps.values())


def _no_value(value: Any) -> bool:
    return _blank(value) or str(value).strip().lower() == "nan"


def _trainer_state(file: Path) -> list[ResultRow]:
    """Read `log_history` of trainer_state.json (transformers, TRL)."""
    try:
        state = parse_json(read_plain(file))
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: {error}") from error
    history: Any = cast("dict[str, Any]", state).get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list) or not all(isinstance(row, dict) for row in cast("list[Any]", history)):
        raise DataError(f'{file}: no list "log_history": the only supported .json file is trainer_state.json')
    if not history:
        raise DataError(f"{file}: log_history has no rows; was the run stopped before its first logging step?")
    rows = enumerate(cast("list[dict[str, Any]]", history))
    return _log_rows(file, [(f"{file}: log_history[{index}]", row) for index, row in rows])


def _chart_rows(file: Path, rows: Sequence[tuple[str, Any]]) -> list[ResultRow]:
    """Read a chart exported from Weights & Biases, with a column for each run; skip `__MIN` and `__MAX`.

    Cells are blank at steps that only other runs have. A run without any value has one row, so that it is reported.
    """
    columns = [name for name in rows[0][1] if " - " in name and not name.endswith(("__MIN", "__MAX"))]
    plain = [name for name in rows[0][1] if " - " not in name and name.lower() not in _INDEX]
    axis = _key(dict.fromkeys(plain), _STEP) or plain[0]
    if "time" in axis.lower():
        raise DataError(f"{file}: its x axis is {axis!r}; export the chart with Step as its x axis")
    found: list[ResultRow] = []
    for column in columns:
        run, _, metric = column.rpartition(" - ")
        if metric in ("_step", axis):
            continue
        origin = f"{file}: the run {run!r}"
        method, seed = run_of_name(_one_line(run), origin)
        for place, row in [one for one in rows if not _blank(one[1].get(column))] or rows[:1]:
            step = _whole(row.get(axis), place, axis, "; export the chart with Step as its x axis")
            found.append(ResultRow(place, file, origin, method, seed, "", step, {metric: row.get(column)}))
    return found


def _key(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the field of a row that has the first of these names that occurs, ignoring case, or ""."""
    return next((name for wanted in names for name in row if name.strip().lower() == wanted), "")


def _text(row: Mapping[str, Any], field: str, place: str) -> str:
    """Return the text of a field without surrounding spaces; DataError if it is blank or not a text."""
    value = row[field]
    text = _one_line(str(value)) if isinstance(value, (str, int, float)) and value == value else ""  # NaN != NaN
    if not text:
        raise DataError(f"{place}: {field} is blank or not a text; write the name of the {field}")
    return text


def _one_line(name: str) -> str:
    """Return a name on one line and in Unicode's NFC form: file systems and editors write `é` in two ways."""
    return " ".join(unicodedata.normalize("NFC", name).split())


def _whole(value: Any, place: str, field: str, fix: str = "") -> int:
    """Convert the value of a field to an integer; DataError, which names place and field, if it is not one."""
    try:
        number = float(value)
        if isinstance(value, bool) or not number.is_integer() or abs(number) > 2**53:
            raise ValueError
        return int(number)
    except (TypeError, ValueError, OverflowError):
        shown = json.dumps(value, default=str)[:50]
        raise DataError(f"{place}: {field} is {shown}, which is not an integer{fix}") from None


def _figures(row: Mapping[str, Any], others: Iterable[str]) -> dict[str, Any]:
    """Return the fields whose values are neither tables nor lists, and whose names are not among the others."""
    return {
        name.strip(): value
        for name, value in row.items()
        if name.strip().lower() not in others and not isinstance(value, (dict, list))
    }
