"""Export a task's worked solutions as expert data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from retrain.config.loaded_config import LoadedConfig
from retrain.errors import DataError
from retrain.protocols import Task
from retrain.rewards.signatures import completion_item
from retrain.system.files import write_text, writing
from retrain.types import Problem, messages_of

Format = Literal["messages", "prompt"]

_DRAWS = 50
"""Largest number of training problems to examine per requested row."""
_CHUNK = 256
"""Number of solutions that are scored together."""


@dataclass(frozen=True)
class Exported:
    """Counts of an export.

    Attributes:
        rows: number of written rows.
        solutions: number of solutions that were examined for them.
    """

    rows: int
    solutions: int


def export_solutions(
    loaded: LoadedConfig, file: Path, count: int, *, seed: int, form: Format, correct_only: bool
) -> Exported:
    """Write worked solutions of distinct training problems as JSON lines that `[expert] path` reads.

    Solutions of held-out problems are left out.

    Args:
        loaded: configuration that names the task and the rewards.
        file: the file to write.
        count: number of rows to write; fewer if the task has fewer problems.
        seed: seed of the problems.
        form: "messages" for chat messages, or "prompt" for prompt and completion.
        correct_only: leave out solutions that the rewards do not judge correct.
    Raises:
        DataError: no solution is left to write.
        StorageError: the file cannot be written.
    """
    task = loaded.task(seed)
    solved: list[Problem] = []
    seen = 0
    problems = _distinct(task, count)
    while len(solved) < count and (chunk := list(islice(problems, _CHUNK))):
        # In chunks, so that the workers of the rewards start once for many solutions.
        kept = _correct(loaded, chunk) if correct_only else chunk
        missing = count - len(solved)
        # Solutions behind the last one that is written were not needed, and are not counted.
        seen += len(chunk) if len(kept) <= missing else chunk.index(kept[missing - 1]) + 1
        solved += kept[:missing]
    if not solved:
        raise DataError(
            f"none of {seen:,} solutions is correct by the rewards; leave out --correct-only, or correct the data"
        )
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, "".join(json.dumps(_row(problem, form), ensure_ascii=False) + "\n" for problem in solved))
    return Exported(len(solved), seen)


def _distinct(task: Task, count: int) -> Iterator[Problem]:
    """Yield distinct training problems with solutions.

    Raises:
        DataError: a problem has no solution.
    """
    seen: set[str] = set()
    for problem in map(task.problem, range(_DRAWS * count)):
        if problem.solution is None:
            raise DataError(f"problem {problem.id!r} has no worked solution to export; the task must have solutions")
        if problem.id not in seen:
            seen.add(problem.id)
            yield problem


def _correct(loaded: LoadedConfig, problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems whose solution the rewards judge correct."""
    from retrain.run.build import reward_pool  # both imported late, because they import torch
    from retrain.training.chat import plain_text

    most = loaded.config.training.max_tokens
    items = [  # the token ids are unknown without a tokenizer
        completion_item(problem, plain_text(problem.prompt), problem.solution or "", (), most, group)
        for group, problem in enumerate(problems)
    ]
    with reward_pool(loaded) as pool:
        return [problem for problem, score in zip(problems, pool.score(items), strict=True) if score.correct]


def _row(problem: Problem, form: Format) -> dict[str, object]:
    if form == "prompt":
        return {"prompt": problem.prompt, "completion": problem.solution}
    return {"messages": [*messages_of(problem.prompt), {"role": "assistant", "content": problem.solution}]}
