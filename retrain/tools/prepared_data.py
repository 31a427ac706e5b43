"""Data files for other trainers: problems of any task as rows that verl, slime and `retrain` can read."""

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
from retrain.system.files import write_bytes, writing
from retrain.types import Problem, messages_of

DataRow = dict[str, Any]

_TRAIN_SIZE = 200
"""Default number of training problems of a task that generates problems."""
_VAL_SIZE = 50
"""Default number of its validation problems."""
_HELD_SHARE = 0.1
"""Share of validation problems in a data set whose task holds out none."""


def select(
    task: Task, train_size: int | None = None, val_size: int | None = None
) -> tuple[list[Problem], list[Problem]]:
    """Return distinct training and validation problems of a task; no prompt occurs in both.

    Validation problems are the held-out problems of the task. If a data set has none, they are the first of its
    problems in the order of a hash of their prompts. Training problems keep the task's own seeded order.

    Args:
        task: the task.
        train_size, val_size: largest numbers of problems. None: all rows of a data set, a tenth of them for validation
            if it has no held-out problems; or 200 and 50 problems of a task that generates them.
    Returns:
        (training problems, validation problems).
    Raises:
        DataError: one of the two lists would be empty.
    """
    if isinstance(task, RowTask):
        everything, draws = distinct(task.train), len(task.train)
        train_size = train_size or draws
        val = distinct(task.held)[:val_size]
        # By hash and not by position, because a file may be sorted, by difficulty for instance.
        val = val or sorted(everything, key=prompt_hash)[: val_size or ceil(_HELD_SHARE * len(everything))]
    else:
        train_size = train_size or _TRAIN_SIZE
        # A small task repeats itself, and held-out problems are skipped, so many more draws are allowed than needed.
        draws = 1000 + 20 * train_size
        val = distinct(task.heldout(val_size or _VAL_SIZE))
    taken = set(map(prompt_hash, val))
    free = (problem for problem in map(task.problem, range(draws)) if prompt_hash(problem) not in taken)
    train = distinct(free, train_size)
    if not train or not val:
        raise DataError(f"{len(train)} problems are left to train on and {len(val)} to validate on; give more data")
    return train, val


def divide(
    task: Task, sets: Mapping[str, tuple[Task, int]], train_size: int | None = None, val_size: int | None = None
) -> dict[str, list[Problem]]:
    """Return the problems of "train", "val" and one "test_NAME" for each set.

    No prompt of a set occurs in "train" or "val".

    Args:
        task: task of the training and validation problems.
        sets: name of each set -> (its task, number of its held-out problems).
        train_size, val_size: as for `select`.
    Raises:
        DataError: a split or a set would have no problems.
    """
    train, val = select(task, train_size, val_size)
    tests = {f"test_{name}": distinct(task.heldout(count)) for name, (task, count) in sets.items()}
    if empty := [name for name, problems in tests.items() if not problems]:
        raise DataError(f"{', '.join(empty)}: the task has no held-out problems; set heldout_fraction or heldout_path")
    # By prompt, not by id: one problem may have two ids in two sets.
    held = {prompt_hash(problem) for problems in tests.values() for problem in problems}
    sides = (("train", train), ("val", val))
    kept = {name: [problem for problem in side if prompt_hash(problem) not in held] for name, side in sides}
    if lost := [name for name, side in kept.items() if not side]:
        raise DataError(f"all problems of {' and '.join(lost)} are in a test set; give the sets other problems")
    return {**kept, **tests}


def distinct(problems: Iterable[Problem], most: int | None = None) -> list[Problem]:
    """Return the first problem with each prompt; at most `most` problems, or all if it is None."""
    by_prompt: dict[str, Problem] = {}
    for problem in problems:
        if most is not None and len(by_prompt) >= most:
            break
        by_prompt.setdefault(prompt_hash(problem), problem)
    return list(by_prompt.values())


def final_answer(problem: Problem) -> Problem:
    """Return the problem with only the text after the last #### as its answer.

    The text before it becomes the solution, unless the problem has one.
    """
    before, mark, after = problem.answer.rpartition("####")
    return replace(problem, answer=after.strip(), solution=problem.solution or before.strip()) if mark else problem


def rows(problems: Sequence[Problem], split: str, source: str, ability: str) -> list[DataRow]:
    """Return one row per problem, in a format for verl, slime and `retrain`.

    verl reads data_source, prompt (chat messages), ability, reward_model and extra_info; slime reads prompt and label;
    `retrain` reads prompt, or question as plain text, with answer and solution. Further fields of the problem keep
    their names.

    Args:
        problems: the problems.
        split: name of the split, for extra_info.
        source: value of data_source; a problem of a mixture has the label of its task instead.
        ability: value of ability.
    """
    made: list[DataRow] = []
    for index, problem in enumerate(problems):
        text = problem.prompt if isinstance(problem.prompt, str) else problem.prompt[-1]["content"]
        row: DataRow = {
            "id": problem.id,
            "data_source": problem.environment or source,
            "prompt": messages_of(problem.prompt),
            "ability": ability,
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"split": split, "index": index, "question": text, "answer": problem.answer},
            "label": problem.answer,
            "question": text,
            "answer": problem.answer,
        }
        if problem.solution is not None:
            row["solution"] = problem.solution
        # A field of the problem must not replace one that a trainer reads.
        made.append(row | {name: value for name, value in problem.extra.items() if name not in row})
    return made


def as_jsonl(made: Sequence[DataRow]) -> bytes:
    """Return the rows as JSON lines in UTF-8."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made).encode()


def as_parquet(made: Sequence[DataRow]) -> bytes:
    """Return the rows as a parquet file; a field that a row lacks is null.

    Raises:
        MissingExtraError: pyarrow (extra `parquet`) is not installed.
        DataError: a field has values of several types.
    """
    arrow, parquet = library("pyarrow", "parquet"), library("pyarrow.parquet", "parquet")
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in made for name in row):
        try:
            columns[name] = arrow.array([row.get(name) for row in made])
        except (arrow.ArrowException, TypeError) as error:
            raise DataError(f'field "{name}" does not fit into one column of a parquet file: {error}') from error
    # Into memory first: `publish` writes files atomically, and pyarrow would not.
    sink = arrow.BufferOutputStream()
    try:
        parquet.write_table(arrow.table(columns), sink)
    except arrow.ArrowException as error:
        raise DataError(f"the rows do not fit into a parquet file: {error}") from error
    return sink.getvalue().to_pybytes()


def publish(folder: Path, files: Mapping[str, bytes], force: bool = False) -> None:
    """Write files to a directory, each atomically.

    Args:
        folder: the directory, which is created.
        files: name -> content.
        force: overwrite files with other contents.
    Raises:
        StorageError: the directory cannot be written, a file's name is taken by a directory, or a file exists with
            other contents and `force` is False.
    """
    contents = {folder / name: data for name, data in files.items()}
    with writing(folder, "choose another --out"):
        for path, data in contents.items():
            # Every file is checked before the first is written, so that a refusal changes nothing.
            if path.is_dir():
                raise StorageError(f"{path} is a directory, and a file needs this name; choose another --out")
            if path.exists() and not force and path.read_bytes() != data:
                raise StorageError(f"{path} exists already with other contents; use --force to overwrite it")
        folder.mkdir(parents=True, exist_ok=True)
        for path, data in contents.items():
            write_bytes(path, data)
