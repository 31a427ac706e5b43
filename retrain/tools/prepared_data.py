"""Files for other trainers: problems of any task as rows that verl, slime and `retrain` itself all read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from retrain.data.problem_store import prompt_hash
from retrain.data.rows import RowTask
from retrain.errors import DataError, StorageError
from retrain.protocols import Task
from retrain.system.extras import library
from retrain.system.files import write_bytes
from retrain.types import Problem

DataRow = dict[str, Any]

_SIZES = 200, 50
_HELD_SHARE = 0.1


def select(
    task: Task, train_size: int | None = None, val_size: int | None = None
) -> tuple[list[Problem], list[Problem]]:
    """Distinct training and validation problems of a task; no prompt is on both sides.

    Validation problems are those that the task holds out; where it holds out none, the first of its
    problems in the order of a hash of their prompts. Training problems come in the task's own seeded order.

    Args:
        train_size, val_size: how many at most; if None, all rows of a file with a tenth for validation, and
            200 and 50 of a task without end.
    Raises:
        DataError: too few distinct problems to have both.
    """
    if isinstance(task, RowTask):
        everything, draws = distinct(task.train), len(task.train)
        train_size = train_size or draws
        val = distinct(task.held)[:val_size]
        val = val or sorted(everything, key=prompt_hash)[: val_size or ceil(_HELD_SHARE * len(everything))]
    else:
        train_size, draws = train_size or _SIZES[0], 1000 + 20 * (train_size or _SIZES[0])
        val = distinct(task.heldout(val_size or _SIZES[1]))
    taken = set(map(prompt_hash, val))
    free = (problem for problem in map(task.problem, range(draws)) if prompt_hash(problem) not in taken)
    train = distinct(free, train_size)
    if not train or not val:
        raise DataError(f"{len(train)} problems are left to train on and {len(val)} to validate on; give more data")
    return train, val


def divide(
    task: Task, sets: Mapping[str, tuple[Task, int]], train_size: int | None = None, val_size: int | None = None
) -> dict[str, list[Problem]]:
    """Problems of `train`, `val` and one `test_NAME` for each set; no prompt of a set is in the first two.

    Args:
        sets: a task and the number of its held-out problems, by name.
        train_size, val_size: as for `select`.
    Raises:
        DataError: too few distinct problems, or a set without problems.
    """
    train, val = select(task, train_size, val_size)
    tests = {f"test_{name}": distinct(one.heldout(count)) for name, (one, count) in sets.items()}
    if empty := [name for name, problems in tests.items() if not problems]:
        raise DataError(f"{', '.join(empty)}: the task holds out no problem; set heldout_fraction or heldout_path")
    held = {prompt_hash(problem) for problems in tests.values() for problem in problems}
    sides = (("train", train), ("val", val))
    kept = {name: [one for one in side if prompt_hash(one) not in held] for name, side in sides}
    if lost := [name for name, side in kept.items() if not side]:
        raise DataError(f"every problem of {' and '.join(lost)} is in a test set; give the sets other problems")
    return {**kept, **tests}


def distinct(problems: Iterable[Problem], most: int | None = None) -> list[Problem]:
    """The first problem with each prompt, at most so many."""
    found: dict[str, Problem] = {}
    for problem in problems:
        if most is not None and len(found) >= most:
            break
        found.setdefault(prompt_hash(problem), problem)
    return list(found.values())


def final_answer(problem: Problem) -> Problem:
    """The problem with only what follows the last #### as its answer; the text before it is the solution."""
    before, mark, after = problem.answer.rpartition("####")
    return replace(problem, answer=after.strip(), solution=problem.solution or before.strip()) if mark else problem


def rows(problems: Sequence[Problem], split: str, source: str, ability: str) -> list[DataRow]:
    """One row for each problem, for three readers at once; a problem of a mix has its label as `data_source`.

    verl reads data_source, prompt (chat messages), ability, reward_model and extra_info; slime reads prompt
    and label; `retrain` reads prompt, or question as plain text, with answer and solution. What else the
    problem held follows under its own names.
    """
    made: list[DataRow] = []
    for index, problem in enumerate(problems):
        text = problem.prompt if isinstance(problem.prompt, str) else problem.prompt[-1]["content"]
        chat = [{"role": "user", "content": problem.prompt}] if isinstance(problem.prompt, str) else problem.prompt
        row: DataRow = {
            "id": problem.id,
            "data_source": problem.environment or source,
            "prompt": chat,
            "ability": ability,
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"split": split, "index": index, "question": text, "answer": problem.answer},
            "label": problem.answer,
            "question": text,
            "answer": problem.answer,
        }
        if problem.solution is not None:
            row["solution"] = problem.solution
        made.append(row | {name: value for name, value in problem.extra.items() if name not in row})
    return made


def as_jsonl(made: Sequence[DataRow]) -> bytes:
    """A JSON object per line, UTF-8."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made).encode()


def as_parquet(made: Sequence[DataRow]) -> bytes:
    """The rows as a parquet file (extra `parquet`); a field that a row lacks is null there.

    Raises:
        MissingExtraError: pyarrow is not installed.
        DataError: a field whose values are of several types.
    """
    arrow, parquet = library("pyarrow", "parquet"), library("pyarrow.parquet", "parquet")
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in made for name in row):
        try:
            columns[name] = arrow.array([row.get(name) for row in made])
        except (arrow.ArrowException, TypeError) as error:
            raise DataError(f'field "{name}" does not fit into one column of a parquet file: {error}') from error
    sink = arrow.BufferOutputStream()
    try:
        parquet.write_table(arrow.table(columns), sink)
    except arrow.ArrowException as error:
        raise DataError(f"the rows do not fit into a parquet file: {error}") from error
    return sink.getvalue().to_pybytes()


def publish(folder: Path, files: Mapping[str, bytes], force: bool = False) -> None:
    """Write files into a folder, each at once.

    Raises:
        StorageError: the folder cannot be written, a folder has the name of a file, or a file of that name has
            other contents and `force` is False.
    """
    places = {folder / name: data for name, data in files.items()}
    try:
        for path, data in places.items():
            if path.is_dir():
                raise StorageError(f"{path} is a folder, and a file is to have this name; choose another --out")
            if path.exists() and not force and path.read_bytes() != data:
                raise StorageError(f"{path} exists already with other contents; --force overwrites it")
        folder.mkdir(parents=True, exist_ok=True)
        for path, data in places.items():
            write_bytes(path, data)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}; choose another --out") from error
