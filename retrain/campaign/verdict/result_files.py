"""Results that other programs wrote: tables with a row per run, and the metric files of trainers.

A table (CSV or JSON lines) has the columns `method` (or `condition`) and `seed`, one with the metric, and may have
`task` and `step`. A log is one run: `trainer_state.json` of transformers and TRL, or JSON lines of
`{"step": ..., NAME: ...}` (prime-rl) or `{"step": ..., "data": {NAME: ...}}` (verl). A chart that was exported from
Weights & Biases as CSV has a column `Step` and one `RUN - NAME` for each run. Method and seed of a run in a chart, or
of a log, come from its name, such as `grpo-s3` or `grpo_seed3`. The name of a log is that of its file, or that of its
directory if the file's name does not end with a number.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from retrain.campaign.verdict.results import Cell
from retrain.errors import ConfigError, ConfigProblem, DataError
from retrain.system.files import read_plain
from retrain.system.records import BadRow, jsonl_rows, parse_json, refusal

_SEEDED = re.compile(r"(?P<method>.*?)[-_. /]*(?:seed|s)?[-_=]?(?P<seed>\d+)$", re.IGNORECASE)
"""Pattern of a run's name, which consists of method and seed."""
_CHECKPOINT = re.compile(r"checkpoint-\d+$")
"""Pattern of the directory in a run's directory to which transformers writes trainer_state.json."""
_METHOD, _SEED, _TASK, _STEP = ("method", "condition"), ("seed",), ("task",), ("step", "global_step")
_PLACE = {*_METHOD, *_SEED, *_TASK, *_STEP}
_NO_METRIC = {"status", "reason", "host", "path", "epoch", "time", "timestamp", "elapsed_seconds"}
"""Numeric columns that are not metrics."""
_RESULT = re.compile(r"(^|[^a-z])(eval|val|test|acc|accuracy|pass|avg@|score)")
"""Pattern of the names of likely metrics."""
_NOT_SPENT = ((math.nan, math.nan, math.nan),)
"""`Cell.spent` of a run whose costs are unknown."""


class ResultRow(NamedTuple):
    """The measurements of one run at one step.

    Attributes:
        place: file and line.
        method, seed, task, step: the run, its task ("" without a task column), and the step.
        figures: name of each metric -> value as written.
    """

    place: str
    method: str
    seed: int
    task: str
    step: int
    figures: Mapping[str, Any]


@dataclass(frozen=True)
class FileResults:
    """Results in the files of other programs.

    Attributes:
        metric: name of the metric.
        tasks: names of the tasks; [""] if no file has a task column.
        cells: runs by task, in the order of the files.
    """

    metric: str
    tasks: Sequence[str]
    cells: Mapping[str, Sequence[Cell]]


def read_result_files(files: Sequence[Path], metric: str | None = None) -> FileResults:
    """Read the runs in these files. The last measured value of a run is its result.

    Args:
        files: the files.
        metric: a column or key; None: the only one there is, or `accuracy`.
    Raises:
        DataError: a file cannot be read, has no such metric, or measures one run twice; it names file and line.
        ConfigError: there are several metrics, and none was chosen.
    """
    rows: list[ResultRow] = []
    for file in dict.fromkeys(files):
        rows += _rows(file)
    name = metric or _only_metric(rows)
    measured: dict[tuple[str, str, int], dict[int, ResultRow]] = {}
    for row in rows:
        if name not in row.figures:
            continue
        run = measured.setdefault((row.task, row.method, row.seed), {})
        if row.step in run:
            raise DataError(
                f"{row.place}: {row.method}, seed {row.seed}, was measured at step {row.step} before, in "
                f"{run[row.step].place}: a run has one value per step; give runs different seeds, or add a column step"
            )
        run[row.step] = row
    if not measured:
        available = ", ".join(_metrics(rows)) or "none"
        raise DataError(f"{files[0]}: no row has {name!r}; metrics that rows have: {available}")
    tasks = list(dict.fromkeys(task for task, _, _ in measured))
    cells: dict[str, list[Cell]] = {task: [] for task in tasks}
    for (task, method, seed), run in measured.items():
        cells[task].append(_cell(method, seed, run, name))
    return FileResults(name, tasks, cells)


def _cell(method: str, seed: int, run: Mapping[int, ResultRow], metric: str) -> Cell:
    curve = [(step, _number(run[step], metric)) for step in sorted(run)]
    last = run[max(run)]
    path, status, reason = Path(last.place.rpartition(":")[0] or last.place), "done", ""
    if bad := [value for _, value in curve if not math.isfinite(value)]:
        status, reason = "failed", f"{metric} is {bad[-1]} in {last.place}"
    return Cell(method, seed, path, status, reason, tuple(curve), spent=_NOT_SPENT)


def _number(row: ResultRow, metric: str) -> float:
    """Return the metric of a row; NaN for an empty cell."""
    value = row.figures[metric]
    if value is None or (isinstance(value, str) and value.strip().lower() in ("", "nan", "null", "na")):
        return math.nan
    try:
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ValueError
        return float(value)
    except (ValueError, OverflowError):
        raise DataError(f"{row.place}: {metric} is {str(value)[:50]!r}, which is not a number") from None


def _only_metric(rows: Sequence[ResultRow]) -> str:
    names = _metrics(rows)
    if "accuracy" in names:
        return "accuracy"
    if len(names) == 1:
        return names[0]
    if not names:
        raise DataError(f"{rows[0].place}: no row has a metric" if rows else "the files have no rows")
    problem = f"there are several metrics: {', '.join(names[:30])}"
    raise ConfigError([ConfigProblem(rows[0].place, 0, 0, "--metric", problem, "choose one of them")])


def _metrics(rows: Sequence[ResultRow]) -> list[str]:
    """Return the names of numeric columns, likely metrics first."""
    found = dict.fromkeys(
        name for row in rows for name, value in row.figures.items() if name not in _NO_METRIC and _like_number(value)
    )
    return sorted(found, key=lambda name: _RESULT.search(name) is None)


def _like_number(value: Any) -> bool:
    if isinstance(value, str):
        return re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*", value) is not None
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _rows(file: Path) -> list[ResultRow]:
    if file.suffix == ".json":
        return _trainer_state(file)
    found = [*_csv_rows(file)] if file.suffix in (".csv", ".tsv") else [*jsonl_rows(file)]
    bad = [f"{place}: {row}" for place, row in found if isinstance(row, BadRow)]
    bad += [f"{place}: not an object with named fields" for place, row in found if not isinstance(row, (BadRow, dict))]
    if bad:
        raise refusal(bad, file, ": fix or remove them")
    if not found:
        raise DataError(f"{file}: no rows")
    return _kind(cast("dict[str, Any]", found[0][1]))(file, found)


def _csv_rows(file: Path) -> Iterable[tuple[str, Any]]:
    try:
        text = read_plain(file).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: {error}") from error
    reader = csv.reader(io.StringIO(text), delimiter="\t" if file.suffix == ".tsv" else ",")
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


def _kind(first: Mapping[str, Any]) -> Callable[[Path, Sequence[tuple[str, Any]]], list[ResultRow]]:
    """Choose the reader for a file by its first row."""
    if _key(first, _METHOD) and _key(first, _SEED):
        return _table_rows
    if "Step" in first and any(" - " in name for name in first):
        return _chart_rows
    return _log_rows


def _table_rows(file: Path, rows: Sequence[tuple[str, Any]]) -> list[ResultRow]:
    """Read a table with a row for each run, or for each run and step."""
    found: list[ResultRow] = []
    for place, row in rows:
        method_key, seed_key, task_key, step_key = (_key(row, names) for names in (_METHOD, _SEED, _TASK, _STEP))
        if not method_key or not seed_key:
            raise DataError(f"{place}: no {'method' if not method_key else 'seed'}; it has {', '.join(row)}")
        method, task = str(row[method_key]), str(row[task_key]) if task_key else ""
        seed = _whole(row[seed_key], place, "seed")
        step = _whole(row[step_key], place, "step") if step_key else 0
        figures = {name: value for name, value in row.items() if name.lower() not in _PLACE}
        found.append(ResultRow(place, method, seed, task, step, _flat(figures)))
    return found


def _log_rows(file: Path, rows: Sequence[tuple[str, Any]]) -> list[ResultRow]:
    """Read a log with a row for each step of one run."""
    if bad := [(place, row) for place, row in rows if not _key(row, _STEP)]:
        place, row = bad[0]
        fields = ", ".join(list(row)[:20])
        fix = "a table needs the columns method and seed, a log needs step"
        raise DataError(f"{place}: neither method and seed nor a step; it has {fields}: {fix}")
    method, seed = _method_and_seed(file)
    found: list[ResultRow] = []
    for place, row in rows:
        figures = row["data"] if isinstance(row.get("data"), dict) else row
        own = {name: value for name, value in _flat(figures).items() if name not in _STEP}
        found.append(ResultRow(place, method, seed, "", _whole(row[_key(row, _STEP)], place, "step"), own))
    return _merged_steps(found)


def _merged_steps(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Merge the rows of one step, because trainers log training and evaluation in separate rows."""
    steps: dict[int, ResultRow] = {}
    for row in rows:
        before = steps.get(row.step)
        steps[row.step] = row if before is None else row._replace(figures={**before.figures, **row.figures})
    return list(steps.values())


def _trainer_state(file: Path) -> list[ResultRow]:
    """Read `log_history` of trainer_state.json (transformers, TRL)."""
    try:
        state = parse_json(read_plain(file))
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: {error}") from error
    history: Any = cast("dict[str, Any]", state).get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list) or not all(isinstance(row, dict) for row in cast("list[Any]", history)):
        raise DataError(f'{file}: no list "log_history": the only supported .json file is trainer_state.json')
    return _log_rows(file, [(str(file), row) for row in cast("list[dict[str, Any]]", history)])


def _chart_rows(file: Path, rows: Sequence[tuple[str, Any]]) -> list[ResultRow]:
    """Read a chart exported from Weights & Biases, with a column for each run; skip `__MIN` and `__MAX`."""
    found: list[ResultRow] = []
    for place, row in rows:
        step = _whole(row["Step"], place, "Step")
        for column, value in row.items():
            run, dash, metric = column.rpartition(" - ")
            if dash and value not in ("", None) and not metric.endswith(("__MIN", "__MAX")) and metric != "_step":
                method, seed = _split(run, f"{file}: the run {run!r}")
                found.append(ResultRow(place, method, seed, "", step, {metric: value}))
    return found


def _method_and_seed(file: Path) -> tuple[str, int]:
    """Return method and seed of a run, from the name of its file or directory."""
    folder = file.resolve().parent
    while _CHECKPOINT.match(folder.name):
        folder = folder.parent
    stem = file.name.partition(".")[0]
    return _split(stem if _SEEDED.fullmatch(stem) else folder.name, str(file))


def _split(name: str, place: str) -> tuple[str, int]:
    """Split a run's name into method and seed; DataError, which names `place`, if it does not end with a seed."""
    found = _SEEDED.fullmatch(name)
    if not found:
        fix = "rename it as in grpo-s3, or give a table"
        raise DataError(f"{place}: the name {name!r} does not end with a seed; {fix}")
    return found["method"] or name, int(found["seed"])


def _key(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the field of a row that has one of these names, ignoring case, or ""."""
    return next((name for name in row if name.lower() in names), "")


def _whole(value: Any, place: str, field: str) -> int:
    """Convert the value of a field to an integer; DataError, which names place and field, if it is not one."""
    try:
        number = float(value)
        if isinstance(value, bool) or not number.is_integer() or abs(number) > 2**53:
            raise ValueError
        return int(number)
    except (TypeError, ValueError, OverflowError):
        raise DataError(f"{place}: {field} is {json.dumps(value, default=str)[:50]}, which is not an integer") from None


def _flat(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields whose values are neither tables nor lists."""
    return {name: value for name, value in figures.items() if not isinstance(value, (dict, list))}
