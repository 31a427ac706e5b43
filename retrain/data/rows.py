"""Rows of a file or data set become problems: checked, split, and served in a seeded order."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, create_model

from retrain.errors import DataError
from retrain.functional.seeds import derive_seed
from retrain.protocols import Task
from retrain.system.records import BadRow, Message, Prompt, Rows, checked, refusal
from retrain.types import Problem

Fraction = Annotated[float, Field(ge=0, lt=1)]
BAD_ROWS = {"max_bad_fraction": ("on_bad_row", ("skip",))}
"""Trait `when` of a task that reads rows."""

OnBadRow = Literal["error", "skip"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """How rows are read.

    Attributes:
        prompt_field: column with the prompt, as text or as a list of chat messages (role, content); where rows
            have no `prompt`, `messages` serves.
        answer_field: column with the answer, text.
        solution_field: column with a worked solution; a row may lack it.
        id_field: column with a unique text or integer; rows that lack it are called by their place.
        on_bad_row: "error" refuses the whole source; "skip" leaves bad rows out, up to max_bad_fraction.
        max_bad_fraction: share of bad rows that "skip" puts up with.
    """

    prompt_field: str = "prompt"
    answer_field: str = "answer"
    solution_field: str = "solution"
    id_field: str = "id"
    # None refuses as "error" does, where the user has no such key.
    on_bad_row: OnBadRow | None = "error"
    max_bad_fraction: float = 0.01


@dataclass(frozen=True)
class RowTask(Task):
    """Problems in memory: training endless, each epoch in an order of its own; held-out fixed.

    Attributes:
        seed: of the order of every epoch; shuffle: False keeps the order of the source.
        train, held: the two sides of the split.
        digest: of the settings and contents that made them.
    """

    seed: int
    train: Sequence[Problem]
    held: Sequence[Problem]
    digest: str
    shuffle: bool = True

    def problem(self, index: int) -> Problem:
        """Training problem number `index`; after the last problem the next epoch begins."""
        epoch, position = divmod(index, len(self.train))
        return self.train[epoch_order(self.seed, epoch, len(self.train))[position] if self.shuffle else position]

    def heldout(self, count: int) -> list[Problem]:
        """The first `count` held-out problems, in the order of a hash of their prompts."""
        return list(self.held[:count])

    def fingerprint(self) -> str:
        """Hash of everything that decides what the problems are, the seed aside."""
        return self.digest


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, count: int) -> list[int]:
    """The numbers below `count`, shuffled anew for every epoch."""
    order = list(range(count))
    Random(derive_seed(seed, "epoch", epoch)).shuffle(order)
    return order


def read_problems(rows: Rows, name: str, reading: Reading, forbidden: frozenset[str] = frozenset()) -> list[Problem]:
    """The problems in `rows`.

    Args:
        name: of the source, for errors.
        forbidden: hashes of prompts (`prompt_hash`) that must not occur: the held-out ones.

    Raises:
        DataError: no rows, or more bad ones than `reading` allows; it lists the first of them together.
    """
    problems: list[Problem] = []
    bad: list[str] = []
    places: dict[str, str] = {}
    for place, row in rows:
        try:
            problem = _problem(row, place, reading)
            if problem.id in places:
                raise BadRow(f'{reading.id_field} "{problem.id}" is taken by {places[problem.id]}')
            if prompt_hash(problem) in forbidden:
                raise BadRow("this prompt is held out")
        except BadRow as reason:
            bad.append(f"{place}: {reason}")
        else:
            places[problem.id] = place
            problems.append(problem)
    _judge(bad, len(problems), name, reading)
    return problems


def split(problems: Sequence[Problem], fraction: float, name: str) -> tuple[list[Problem], list[Problem]]:
    """(training, held-out): a hash of the prompt decides, so equal prompts end on one side, whatever the seed."""
    hashes = {problem.id: prompt_hash(problem) for problem in problems}
    held = {id_ for id_, digest in hashes.items() if int(digest[:16], 16) < fraction * 2**64}
    train = [problem for problem in problems if problem.id not in held]
    if not train:
        raise DataError(f"{name}: all {len(problems)} rows are held out; lower heldout_fraction = {fraction:g}")
    return train, in_hash_order([problem for problem in problems if problem.id in held])


def in_hash_order(problems: Iterable[Problem]) -> list[Problem]:
    """Sorted by a hash of the prompt: the first few are a fair sample of all, the same in every run."""
    return sorted(problems, key=prompt_hash)


def prompt_hash(problem: Problem) -> str:
    """sha256 of the prompt, in hex."""
    return digest_of(problem.prompt)


def digest_of(*parts: Any) -> str:
    """sha256 of JSON values, in hex."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _judge(bad: list[str], good: int, name: str, reading: Reading) -> None:
    total = good + len(bad)
    if not total:
        raise DataError(f"{name}: no rows; it needs at least one")
    allowed = reading.max_bad_fraction * total if reading.on_bad_row == "skip" else 0
    if len(bad) > allowed or not good:
        most = f"max_bad_fraction = {reading.max_bad_fraction:g}"
        fixes = {
            "skip": f"more than {most} of {total:,} rows; mend them or raise it",
            "error": 'mend them, or leave them out with on_bad_row = "skip"',
            None: "mend or remove them",
        }
        raise refusal(bad, f"{name}: {len(bad):,} bad rows: {fixes[reading.on_bad_row]}")
    if bad:
        _logger.warning("%s: %d of %d rows skipped, the first: %s", name, len(bad), total, bad[0])


def _problem(row: Any, place: str, reading: Reading) -> Problem:
    if isinstance(row, dict) and reading.prompt_field == "prompt" and "prompt" not in row and "messages" in row:
        reading = replace(reading, prompt_field="messages")
    found = checked(_schema(reading), row)
    id_ = place if found.id is None else str(found.id)
    return Problem(id_, found.prompt, found.answer, found.solution, extra=found.model_extra)


@lru_cache(maxsize=16)
def _schema(reading: Reading) -> TypeAdapter[Any]:
    """A row under the names of its columns; it keeps whatever else it holds."""
    row: Any = create_model(
        "Row",
        __config__=ConfigDict(strict=True, extra="allow"),
        prompt=(Annotated[Prompt, AfterValidator(_answerable)], Field(alias=reading.prompt_field)),
        answer=(str, Field(alias=reading.answer_field)),
        solution=(str | None, Field(None, alias=reading.solution_field)),
        id=(str | int | None, Field(None, alias=reading.id_field)),
    )
    return TypeAdapter(row)


def _answerable(prompt: str | list[Message]) -> str | list[Message]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError("empty")
    elif not prompt or prompt[-1]["role"] == "assistant":
        raise ValueError("messages must end with something to answer")
    return prompt
