"""Tasks whose problems are rows of a file or data set: checked, split, and served in a seeded order."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, create_model

from retrain.errors import DataError
from retrain.functional.seeds import derive_seed
from retrain.protocols import Task
from retrain.registry import Finding, task
from retrain.system import records
from retrain.system.extras import library
from retrain.system.files import NO_FILE_FIX, no_file, sha256
from retrain.types import Problem

Fraction = Annotated[float, Field(ge=0, lt=1)]
_BAD_ROWS = {"max_bad_fraction": ("on_bad_row", ("skip",))}
_FILE = {**_BAD_ROWS, "heldout_fraction": ("heldout_path", (None,))}
"""Trait `when` of a task that reads a file."""

_logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Reading:
    """How rows are read.

    Args:
        prompt_field: column with the prompt, as text or as a list of chat messages (role, content); where rows
            have no `prompt`, `messages` is read instead.
        answer_field: column with the answer, text.
        solution_field: column with a worked solution; a row may lack it.
        id_field: column with a unique text or integer; a row that lacks it is named by its place.
        on_bad_row: "error" refuses the whole source; "skip" leaves bad rows out, up to max_bad_fraction.
        max_bad_fraction: largest share of bad rows that "skip" accepts.
    """

    prompt_field: str = "prompt"
    answer_field: str = "answer"
    solution_field: str = "solution"
    id_field: str = "id"
    on_bad_row: Literal["error", "skip"] = "error"
    max_bad_fraction: Fraction = 0.01
    fix: ClassVar[str] = "mend or remove them"


@dataclass
class RowTask(Reading, Task):
    """Problems in memory: training problems without end, each epoch in its own order; held-out problems fixed.

    A subclass adds keyword-only fields that say where the rows are; all fields together are its TOML table.

    Args:
        seed: of the order of every epoch.
        heldout_fraction: share of the training rows to hold out where the held-out rows have no other source.
        shuffle: a new order for every epoch; False keeps the order of the source.
    Attributes:
        train, held: the two sides of the split.
        digest: of the settings and contents that made them.
    """

    seed: int
    train: Sequence[Problem] = field(init=False, repr=False)
    held: Sequence[Problem] = field(init=False, repr=False)
    digest: str = field(init=False)
    _: KW_ONLY
    heldout_fraction: Fraction = 0.1
    shuffle: bool = True
    fix: ClassVar[str] = 'mend them, or leave them out with on_bad_row = "skip"'

    def divide(self, rows: records.Rows, name: str, heldout: tuple[records.Rows, str] | None) -> None:
        """Read the problems of both sides. Names are those of the sources, for errors.

        Args:
            heldout: None holds out a fraction of `rows`; otherwise a training row with one of its prompts is bad.
        """
        if heldout is None:
            self.train, self.held = split(read_problems(rows, name, self), self.heldout_fraction, name)
        else:
            self.held = in_hash_order(read_problems(*heldout, self))
            self.train = read_problems(rows, name, self, frozenset(map(prompt_hash, self.held)))

    def sign(self, kind: str, contents: Sequence[Any]) -> None:
        """Set the digest: of the task's kind, of how rows are read, and of what identifies their contents."""
        reading = {one.name: getattr(self, one.name) for one in fields(Reading)}
        self.digest = digest_of(kind, reading, self.shuffle, contents)

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


@dataclass
class FileTask(RowTask):
    """Problems from the rows of a file; all bad rows are reported together.

    Args:
        seed: of the order of every epoch.
        path: of the file with the training problems.
        heldout_path: of a file with the held-out problems; a training row with one of its prompts is bad.
        heldout_fraction: share of `path` to hold out where there is no `heldout_path`.
        shuffle: a new order for every epoch; False keeps the order of the file.
    """

    kind: ClassVar[str]
    rows: ClassVar[Callable[[str], records.Rows]]
    """The rows of a file with their places."""
    _: KW_ONLY
    path: str
    heldout_path: str | None = None

    def __post_init__(self) -> None:
        rows, heldout = type(self).rows, self.heldout_path
        self.divide(rows(self.path), self.path, None if heldout is None else (rows(heldout), heldout))
        other = self.heldout_fraction if heldout is None else sha256(Path(heldout))
        self.sign(self.kind, [sha256(Path(self.path)), other])


def _check_files(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    """Files that are not there."""
    for key in ("path", "heldout_path"):
        if params[key] is not None and (problem := no_file(params[key])):
            yield Finding((key,), problem, NO_FILE_FIX, exit_code=DataError.exit_code)


@task("jsonl", when=_FILE, check_files=_check_files)
class Jsonl(FileTask):
    """One JSON object per line, UTF-8, at most 1,000,000 bytes; blank lines are ignored."""

    kind = "jsonl"
    rows = staticmethod(records.jsonl_rows)


@task("parquet", extra=("pyarrow", "parquet"), when=_FILE, check_files=_check_files)
class Parquet(FileTask):
    """Rows of a parquet file (extra `parquet`); places count rows from 1."""

    kind = "parquet"
    rows = staticmethod(records.parquet_rows)


@task("hub", extra=("datasets", "hub"), when={**_BAD_ROWS, "heldout_fraction": ("heldout_split", (None,))})
@dataclass
class Hub(RowTask):
    """Rows of a data set (extra `hub`); what is in the local cache needs no network.

    Args:
        seed: of the order of every epoch.
        name: of the data set, or a local directory.
        split: to train on; heldout_split: to evaluate on; a training row with one of its prompts is bad.
        config: which of its configurations; revision: commit, tag or branch; pin a commit to stay reproducible.
        heldout_fraction: share of `split` to hold out where there is no `heldout_split`.
        shuffle: a new order for every epoch.
    """

    _: KW_ONLY
    name: str
    split: str = "train"
    config: str | None = None
    revision: str | None = None
    heldout_split: str | None = None

    def __post_init__(self) -> None:
        contents = [self.name, self.config, self.revision, self.split]
        data = self._load(self.split)
        contents += [data._fingerprint, self.heldout_split, self.heldout_fraction]
        heldout = None
        if self.heldout_split is not None:
            other = self._load(self.heldout_split)
            contents.append(other._fingerprint)
            heldout = self._rows(other, self.heldout_split), self.name
        self.divide(self._rows(data, self.split), self.name, heldout)
        self.sign("hub", contents)

    def _load(self, split: str) -> Any:
        datasets = library("datasets", "hub")
        try:
            return datasets.load_dataset(self.name, self.config, split=split, revision=self.revision)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            raise DataError(
                f"data set {self.name}, split {split}: {reason}; check [hub] name, config, split and revision, "
                "and without a network that the data set is in the cache"
            ) from error

    def _rows(self, data: Any, split: str) -> records.Rows:
        return ((f"{self.name}/{split}:{number}", row) for number, row in enumerate(data, start=1))


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, count: int) -> list[int]:
    """The numbers below `count`, shuffled anew for every epoch."""
    order = list(range(count))
    Random(derive_seed(seed, "epoch", epoch)).shuffle(order)
    return order


def read_problems(
    rows: records.Rows, name: str, reading: Reading, forbidden: frozenset[str] = frozenset()
) -> list[Problem]:
    """The problems in `rows`.

    Args:
        name: of the source, for errors.
        forbidden: hashes of prompts (`prompt_hash`) that must not occur: the held-out ones.

    Raises:
        DataError: no rows, or more bad ones than `reading` allows; it lists the first of them together.
    """
    places: dict[str, str] = {}

    def parse(place: str, row: Any) -> Problem:
        problem = _problem(row, place, reading)
        if problem.id in places:
            raise records.BadRow(f'{reading.id_field} "{problem.id}" is taken by {places[problem.id]}')
        if prompt_hash(problem) in forbidden:
            raise records.BadRow("this prompt is held out")
        places[problem.id] = place
        return problem

    problems, bad = records.parsed_rows(rows, parse)
    total = len(problems) + len(bad)
    if not total:
        raise DataError(f"{name}: no rows; it needs at least one")
    allowed = reading.max_bad_fraction * total if reading.on_bad_row == "skip" else 0
    if len(bad) > allowed or not problems:
        limit = f"more than max_bad_fraction = {reading.max_bad_fraction:g} of {total:,} rows; mend them or raise it"
        fix = limit if reading.on_bad_row == "skip" else reading.fix
        raise records.refusal(bad, f"{name}: {len(bad):,} bad rows: {fix}")
    if bad:
        _logger.warning("%s: %d of %d rows skipped, the first: %s", name, len(bad), total, bad[0])
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
    """Sorted by a hash of the prompt: the first few are a fair sample of all, and the same in every run."""
    return sorted(problems, key=prompt_hash)


def prompt_hash(problem: Problem) -> str:
    """sha256 of the prompt, in hex."""
    return digest_of(problem.prompt)


def digest_of(*parts: Any) -> str:
    """sha256 of JSON values, in hex."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _problem(row: Any, place: str, reading: Reading) -> Problem:
    prompt = reading.prompt_field
    if isinstance(row, dict) and prompt == "prompt" and "prompt" not in row and "messages" in row:
        prompt = "messages"
    found = records.checked(_schema(prompt, reading.answer_field, reading.solution_field, reading.id_field), row)
    id_ = place if found.id is None else str(found.id)
    return Problem(id_, found.prompt, found.answer, found.solution, extra=found.model_extra)


@lru_cache(maxsize=16)
def _schema(prompt: str, answer: str, solution: str, id_: str) -> TypeAdapter[Any]:
    """A row with columns of these names; it keeps whatever else it holds."""
    row: Any = create_model(
        "Row",
        __config__=ConfigDict(strict=True, extra="allow"),
        prompt=(Annotated[records.Prompt, AfterValidator(_answerable)], Field(alias=prompt)),
        answer=(str, Field(alias=answer)),
        solution=(str | None, Field(None, alias=solution)),
        id=(str | int | None, Field(None, alias=id_)),
    )
    return TypeAdapter(row)


def _answerable(prompt: str | list[records.Message]) -> str | list[records.Message]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError("empty")
    elif not prompt or prompt[-1]["role"] == "assistant":
        raise ValueError("messages must end with something to answer")
    return prompt
