"""Tasks whose problems are rows of a file or data set: checked, split, and served in a seeded order."""

from __future__ import annotations

import json
import logging
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, create_model

from retrain.data.problem_store import ProblemStore, hash_key
from retrain.errors import DataError
from retrain.functional.seeds import digest_of, epoch_order
from retrain.functional.templates import PLACE, as_text, column
from retrain.protocols import Task
from retrain.registry import Finding, task
from retrain.system import records
from retrain.system.extras import library
from retrain.system.files import NO_FILE_FIX, no_file, sha256
from retrain.types import Problem

ProperFraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
_BAD_ROWS = {"max_bad_fraction": ("on_bad_row", ("skip",))}
_FILE = {**_BAD_ROWS, "heldout_fraction": ("heldout_path", (None,))}
"""Trait `when` of a task that reads a file."""

_TRIED = 20
"""Rows at the start of a file that `validate` reads."""

_logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RowFormat:
    """Columns and checks of rows. A dot names a nested column, as in `reward_model.ground_truth`.

    Args:
        prompt_field: column with the prompt, as text or as a list of chat messages (role, content); where rows
            have no `prompt`, `messages` is read instead, whose last turn may be the assistant's: a solution.
        answer_field: column with the answer: text, or a number or other value, which becomes its JSON; where rows
            have no `answer`, verl's `reward_model.ground_truth` is read. "" if rows have none and rewards need none.
        solution_field: column with a worked solution; a row may lack it. Without it a `completion` is one.
        id_field: column with a unique text or integer; a row that lacks it is named by its place.
        prompt_template: text with the columns of a row, as in "{question} Put the answer in \\boxed{}."; unset: the
            prompt column alone.
        system_prompt: message before the prompt, which becomes a chat; a prompt with its own keeps that.
        on_bad_row: "error" refuses the whole source; "skip" leaves bad rows out, up to max_bad_fraction.
        max_bad_fraction: largest share of bad rows that "skip" accepts.
    """

    prompt_field: str = "prompt"
    answer_field: str = "answer"
    solution_field: str = "solution"
    id_field: str = "id"
    prompt_template: str | None = None
    system_prompt: str = ""
    on_bad_row: Literal["error", "skip"] = "error"
    max_bad_fraction: ProperFraction = 0.01
    fix: ClassVar[str] = "fix or remove them"

    def posed(self, prompt: str | list[Any]) -> str | list[Any]:
        """The prompt with the system's message before it."""
        if not self.system_prompt or (isinstance(prompt, list) and prompt[0]["role"] == "system"):
            return prompt
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return [{"role": "system", "content": self.system_prompt}, *asked]

    def pose(self, text: str) -> str | list[Any]:
        """The prompt that a question becomes: it stands for every column of the template."""
        return self.posed(PLACE.sub(lambda _: text, self.prompt_template) if self.prompt_template else text)


@dataclass
class RowTask(RowFormat, Task):
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
    heldout_fraction: Share = 0.1
    shuffle: bool = True
    fix: ClassVar[str] = 'fix them, or leave them out with on_bad_row = "skip"'

    def divide(self, rows: records.Rows, name: str, heldout: tuple[records.Rows, str] | None) -> None:
        """Read the problems of both sides. Names are those of the sources, for errors.

        Args:
            heldout: None holds out a fraction of `rows`; otherwise a training row with one of its prompts is bad.
        """
        if heldout is None:
            problems = read_problems(rows, name, self)
            self.train, held = problems.split(self.heldout_fraction)
            if not len(self.train) and self.heldout_fraction < 1:
                fix = f"lower heldout_fraction = {self.heldout_fraction:g}"
                raise DataError(f"{name}: all {len(problems)} rows are held out; {fix}")
        else:
            held = read_problems(*heldout, self)
            self.train = read_problems(rows, name, self, frozenset(held.hashes))
        self.held = held.in_hash_order()

    def sign(self, kind: str, contents: Sequence[Any]) -> None:
        """Set the digest: of the task's kind, of how rows are read, and of what identifies their contents."""
        # Unset keys are left out, so that a new one does not make another data set of an old run's.
        reading = {one.name: value for one in fields(RowFormat) if (value := getattr(self, one.name)) not in (None, "")}
        self.digest = digest_of(kind, reading, self.shuffle, contents)

    def problem(self, index: int) -> Problem:
        """Training problem number `index`; after the last problem the next epoch begins."""
        if not self.train:
            raise DataError("heldout_fraction = 1 holds out every row, and none is left to train on; lower it")
        epoch, position = divmod(index, len(self.train))
        return self.train[epoch_order(self.seed, epoch, len(self.train))[position] if self.shuffle else position]

    def heldout(self, count: int) -> list[Problem]:
        """The first `count` held-out problems, in the order of a hash of their prompts."""
        return list(self.held[:count])

    def finite(self) -> Iterator[Problem]:
        """All problems, those for training first."""
        return chain(self.train, self.held)

    def fingerprint(self) -> str:
        """Hash of everything that determines the problems, except the seed."""
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


def _files(rows: Callable[[str], records.Rows]) -> Callable[[Mapping[str, Any], Any], Iterator[Finding]]:
    """Check for missing files, and for named columns that the first rows lack."""

    def check(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
        reading = RowFormat(**{one.name: params[one.name] for one in fields(RowFormat)})
        for key in (key for key in ("path", "heldout_path") if params[key] is not None):
            problem, fix = no_file(params[key]), NO_FILE_FIX
            if not problem:
                first = islice(rows(params[key]), _TRIED)
                found, bad = records.parsed_rows(first, lambda place, row: _problem(row, place, reading))
                tolerated = reading.on_bad_row == "skip" and found
                problem, fix = "" if tolerated or not bad else _listed(bad), RowTask.fix
                if not found and re.search("not JSON|expected an object", problem):
                    problem = f"bad row {bad[0]}"
                    fix = "each line must be one JSON object: convert a JSON array, indented JSON or CSV first"
            if problem:
                yield Finding((key,), problem, fix, exit_code=DataError.exit_code)

    return check


def _listed(bad: Sequence[str]) -> str:
    """Bad rows among the first rows of a file, in one line."""
    return f"bad row {bad[0]}" if len(bad) == 1 else f"{len(bad)} bad rows: {'; '.join(bad)}"


@task("jsonl", when=_FILE, check_files=_files(records.jsonl_rows))
class Jsonl(FileTask):
    """One JSON object per line, UTF-8, at most 1,000,000 bytes; blank lines are ignored."""

    kind = "jsonl"
    rows = staticmethod(records.jsonl_rows)


@task("parquet", extra=("pyarrow", "parquet"), when=_FILE, check_files=_files(records.parquet_rows))
class Parquet(FileTask):
    """Rows of a parquet file (extra `parquet`); places count rows from 1."""

    kind = "parquet"
    rows = staticmethod(records.parquet_rows)


@task("hub", remote=True, extra=("datasets", "hub"), when={**_BAD_ROWS, "heldout_fraction": ("heldout_split", (None,))})
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
        return hub_split(self.name, split, self.config, self.revision)

    def _rows(self, data: Any, split: str) -> records.Rows:
        return ((f"{self.name}/{split}:{number}", row) for number, row in enumerate(data, start=1))


def hub_split(name: str, split: str, config: str | None = None, revision: str | None = None) -> Any:
    """Load one split of a data set of the hub, or of a directory in its layout.

    Raises:
        MissingExtraError: the extra `hub` is not installed. DataError: it cannot be loaded.
    """
    datasets = library("datasets", "hub")
    try:
        return datasets.load_dataset(name, config, split=split, revision=revision)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise DataError(
            f"data set {name}, split {split}: {reason}; check name, config, split and revision, "
            "and without a network that the data set is in the cache"
        ) from error


def read_problems(
    rows: records.Rows, name: str, reading: RowFormat, forbidden: frozenset[int] = frozenset()
) -> ProblemStore:
    """The problems in `rows`.

    Args:
        name: of the source, for errors.
        forbidden: hashes of prompts, see `ProblemStore`, that must not occur: the held-out ones.

    Raises:
        DataError: no rows, or more bad ones than `reading` allows; it lists the first of them together.
    """
    problems, known, lines = ProblemStore(), dict[int, int](), array("Q")

    def take(place: str, row: Any) -> None:
        problem, (source, _, line) = _problem(row, place, reading), place.rpartition(":")
        if (key := hash_key(problem)) in forbidden:
            raise records.BadRow("this prompt is held out")
        # A million names take less than half of the memory as hashes.
        first = known.setdefault(hash(problem.id), len(problems))
        if first < len(problems) and problems[first].id == problem.id:
            raise records.BadRow(f'{reading.id_field} "{problem.id}" is taken by {source}:{lines[first]}')
        problems.append(problem, key)
        lines.append(int(line))

    bad = records.bad_rows(rows, take)
    total = len(problems) + len(bad)
    if not total:
        raise DataError(f"{name}: no rows; it needs at least one")
    allowed = reading.max_bad_fraction * total if reading.on_bad_row == "skip" else 0
    if len(bad) > allowed or not problems:
        limit = f"more than max_bad_fraction = {reading.max_bad_fraction:g} of {total:,} rows; fix them or raise it"
        fix = limit if reading.on_bad_row == "skip" else reading.fix
        raise records.refusal(bad, f"{name}: {len(bad):,} bad rows: {fix}")
    if bad:
        _logger.warning("%s: %d of %d rows skipped, the first: %s", name, len(bad), total, bad[0])
    return problems


def _problem(row: Any, place: str, reading: RowFormat) -> Problem:
    names = {"answer": reading.answer_field, "solution": reading.solution_field, "id": reading.id_field}
    names["prompt"] = "messages" if _is_chat(row, reading) else reading.prompt_field
    full = _filled(cast("dict[str, Any]", row), names, reading) if isinstance(row, dict) else row
    try:
        found = records.checked(_schema(**names), full)
    except records.BadRow as reason:
        if str(reason).startswith(f'no field "{reading.answer_field}"'):
            raise records.BadRow(f'{reason} (answer_field names another; "" if rewards need none)') from None
        raise
    id_ = place if found.id is None else str(found.id)
    columns = {name: value for name, value in row.items() if name != names["prompt"]}
    return Problem(id_, reading.posed(found.prompt), found.answer, found.solution, extra=columns)


def _is_chat(row: Any, reading: RowFormat) -> bool:
    """Return whether the prompt is read from `messages`."""
    return isinstance(row, dict) and reading.prompt_field == "prompt" and "prompt" not in row and "messages" in row


def _filled(row: dict[str, Any], names: Mapping[str, str], reading: RowFormat) -> dict[str, Any]:
    """The row with the columns that its own ones hold or make: dotted names, a template, other trainers' names."""
    row = dict(row)
    if names["answer"] == "answer" and "answer" not in row and (truth := column(row, "reward_model.ground_truth")):
        row["answer"] = truth[0]
    messages: Any = row.get(names["prompt"])
    said: Any = _last(row.get("completion"))
    if names["prompt"] == "messages" and (answer := _last(messages, "assistant")) is not None:
        said, row["messages"] = answer, messages[:-1]
    if said and row.get(names["solution"]) is None:
        row[names["solution"]] = said
    for name in names.values():
        if name not in row and (value := column(row, name)):
            row[name] = value[0]
    if reading.prompt_template is not None:
        row[names["prompt"]] = PLACE.sub(lambda place: _shown(row, place[1]), reading.prompt_template)
    return row


def _last(said: Any, role: str = "") -> Any:
    """Return the text of the last message if it has this role; a plain text as it is."""
    if not isinstance(said, list):
        return None if role else said
    last: Any = cast("list[Any]", said)[-1] if said else None
    return last.get("content") if isinstance(last, dict) and role in ("", last.get("role")) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _shown(row: dict[str, Any], name: str) -> str:
    """A column as a template shows it."""
    if not (value := column(row, name)):
        raise records.BadRow(f'no field "{name}", which prompt_template shows; it has {", ".join(row)}')
    return as_text(value[0])


def _as_text(value: Any) -> Any:
    """Encode a number, list or object as JSON; return any other value unchanged."""
    if value is None or isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return value


@lru_cache(maxsize=16)
def _schema(prompt: str, answer: str, solution: str, id: str) -> TypeAdapter[Any]:
    """Schema of a row with columns of these names; other columns are kept."""
    text = Annotated[str, BeforeValidator(_as_text)]
    answers: Any = (text, Field(alias=answer)) if answer else (Literal[""], Field("", alias="\0"))
    row: Any = create_model(
        "Row",
        __config__=ConfigDict(strict=True, extra="allow"),
        prompt=(Annotated[records.Prompt, AfterValidator(_answerable)], Field(alias=prompt)),
        answer=answers,
        solution=(str | None, Field(None, alias=solution)),
        id=(str | int | None, Field(None, alias=id)),
    )
    return TypeAdapter(row)


def _answerable(prompt: str | list[records.Message]) -> str | list[records.Message]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError("empty")
    elif not prompt or prompt[-1]["role"] == "assistant":
        raise ValueError("messages must end with something to answer")
    return prompt
