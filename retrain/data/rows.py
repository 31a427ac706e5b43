"""Tasks whose problems are the rows of a file or data set, validated, split, and returned in a seeded order."""

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
from retrain.functional.templates import PLACEHOLDER, as_text, column
from retrain.protocols import Task
from retrain.registry import Finding, task
from retrain.system import records
from retrain.system.extras import library
from retrain.system.files import NO_FILE_FIX, no_file, sha256
from retrain.types import Problem, messages_of

ProperFraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
_SKIP_CONDITION = {"max_bad_fraction": ("on_bad_row", ("skip",))}
_FILE_CONDITIONS = {**_SKIP_CONDITION, "heldout_fraction": ("heldout_path", (None,))}
"""Trait `when` of a task that reads a file."""

_CHECKED_ROWS = 20
"""Number of rows at the start of a file that `retrain validate` reads."""

_UNREAD = frozenset({
    *("chosen", "rejected", "label", "labels", "input_ids", "attention_mask", "position_ids", "seq_lengths"),
    *("completion_mask", "assistant_masks", "agent_name", "environment"),
})  # fmt: skip
"""Columns that other trainers read and this one does not; rewards receive them like every column."""
_IMAGES = ("image", "images", "video", "videos")

_logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RowFormat:
    """Columns of the rows, and treatment of bad rows. A dot names a nested column: `reward_model.ground_truth`.

    Args:
        prompt_field: column with the prompt, a text or a list of chat messages (role, content). If rows have no
            `prompt` column, `messages` is read instead; its last turn, if it is the assistant's, becomes the solution.
        answer_field: column with the reference answer. Values other than text are encoded as JSON. If rows have no
            `answer` column, verl's `reward_model.ground_truth` is read. Set it to "" if rewards need no answer.
        solution_field: optional column with a worked solution; `completion` is used if it is missing.
        id_field: optional column with a unique text or integer; a row without it gets its place as id.
        prompt_template: text with placeholders for columns, as in "{question} Put the answer in \\boxed{}."; if unset,
            the prompt is the prompt column.
        system_prompt: system message to add; a text prompt becomes a chat. Prompts with a system message keep theirs.
        on_bad_row: "error" rejects the whole file or data set; "skip" skips bad rows, up to max_bad_fraction.
        max_bad_fraction: maximum share of bad rows that "skip" accepts.
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

    def with_system_prompt(self, prompt: str | list[Any]) -> str | list[Any]:
        """Return the prompt with `system_prompt` before it, unless the prompt has a system message."""
        if not self.system_prompt or (isinstance(prompt, list) and prompt[0]["role"] == "system"):
            return prompt
        return [{"role": "system", "content": self.system_prompt}, *messages_of(prompt)]

    def pose(self, text: str) -> str | list[Any]:
        """Return the prompt for a question. The question replaces every placeholder of the template."""
        prompt = PLACEHOLDER.sub(lambda _: text, self.prompt_template) if self.prompt_template else text
        return self.with_system_prompt(prompt)


@dataclass
class RowTask(RowFormat, Task):
    """Base class of tasks whose problems are in memory.

    Training problems repeat without end, with a new order for every epoch. Held-out problems are fixed. A subclass adds
    keyword-only fields with the location of the rows. All fields together are the keys of its TOML table.

    Args:
        seed: seed of the order of every epoch.
        heldout_fraction: share of the training rows to hold out if no held-out rows are given.
        shuffle: use a new order for every epoch; false keeps the order of the rows.
    Attributes:
        train: the training problems.
        held: the held-out problems, in the order of a hash of their prompts.
        digest: hash of the settings and contents that determine the problems.
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
        """Read the rows, and set `train` and `held`.

        Args:
            rows: the training rows.
            name: name of their file or data set, for errors.
            heldout: held-out rows and the name of their file or data set; a training row with one of their prompts is
                a bad row. None holds out a fraction of `rows`.
        Raises:
            DataError: there are no rows, or more bad rows than allowed, or all rows are held out.
        """
        if heldout is None:
            problems = read_problems(rows, name, self)
            self.train, held = problems.split(self.heldout_fraction)
            # 1 holds out everything on purpose, for a run that only evaluates.
            if not len(self.train) and self.heldout_fraction < 1:
                fix = f"lower heldout_fraction = {self.heldout_fraction:g}"
                raise DataError(f"{name}: all {len(problems)} rows are held out; {fix}")
        else:
            # Held-out rows first: training rows with their prompts are refused.
            held = read_problems(*heldout, self)
            self.train = read_problems(rows, name, self, frozenset(held.hashes))
        # A file may be sorted, and an evaluation takes the first N.
        self.held = held.in_hash_order()

    def sign(self, kind: str, contents: Sequence[Any]) -> None:
        """Set `digest` to a hash of the settings and contents.

        Args:
            kind: name of the task.
            contents: JSON values that identify the rows, such as hashes of files.
        """
        # Unset keys are omitted, so that adding a key to RowFormat does not change the digests of old runs.
        reading = {key.name: value for key in fields(RowFormat) if (value := getattr(self, key.name)) not in (None, "")}
        self.digest = digest_of(kind, reading, self.shuffle, contents)

    def problem(self, index: int) -> Problem:
        """Return training problem number `index`; after the last problem the next epoch begins."""
        if not self.train:
            raise DataError("heldout_fraction = 1 holds out every row and leaves none to train on; lower it")
        epoch, position = divmod(index, len(self.train))
        return self.train[epoch_order(self.seed, epoch, len(self.train))[position] if self.shuffle else position]

    def heldout(self, count: int) -> list[Problem]:
        """Return the first `count` held-out problems, in the order of a hash of their prompts."""
        return list(self.held[:count])

    def finite(self) -> Iterator[Problem]:
        """Iterate over all problems, the training problems first."""
        return chain(self.train, self.held)

    def fingerprint(self) -> str:
        """Return a hash of everything that determines the problems, except the seed."""
        return self.digest


@dataclass
class FileTask(RowTask):
    """Base class of tasks whose problems are the rows of a file. All bad rows are reported together.

    Args:
        seed: seed of the order of every epoch.
        path: file with the training problems.
        heldout_path: file with the held-out problems. A training row with one of their prompts is a bad row.
        heldout_fraction: share of `path` to hold out if `heldout_path` is unset.
        shuffle: use a new order for every epoch; false keeps the order of the file.
    """

    rows: ClassVar[Callable[[str], records.Rows]]
    """Function that reads the rows of a file with their places."""
    _: KW_ONLY
    path: str
    heldout_path: str | None = None

    def __post_init__(self) -> None:
        rows = type(self).rows
        heldout = self.heldout_path
        self.divide(rows(self.path), self.path, None if heldout is None else (rows(heldout), heldout))
        division = self.heldout_fraction if heldout is None else sha256(Path(heldout))
        self.sign(type(self).__name__.lower(), [sha256(Path(self.path)), division])


def _file_check(rows: Callable[[str], records.Rows]) -> Callable[[Mapping[str, Any], Any], Iterator[Finding]]:
    """Return a check for missing files and for bad rows at the start of a file.

    Args:
        rows: function that reads the rows of a file.
    """

    def check(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
        reading = RowFormat(**{key.name: params[key.name] for key in fields(RowFormat)})
        for key in (key for key in ("path", "heldout_path") if params[key] is not None):
            problem, fix = no_file(params[key]), NO_FILE_FIX
            if not problem:
                first = islice(rows(params[key]), _CHECKED_ROWS)
                problems, bad = records.parsed_rows(first, lambda line, row: _problem(row, line, reading))
                # The share of bad rows is known only after the whole file, which a check does not read.
                tolerated = reading.on_bad_row == "skip" and problems
                problem, fix = "" if tolerated or not bad else _listed(bad), RowTask.fix
                # The same mistake in every row is a mistake of the settings; twenty lines would hide that.
                if len(bad) == _CHECKED_ROWS and len(records.by_reason(bad)) == 1:
                    problem = f"all of the first {len(bad)} rows: {bad[0].partition(': ')[2]}"
                if not problems and re.search("not JSON|expected an object", problem):
                    problem = f"bad row {bad[0]}"
                    fix = "each line must be one JSON object: convert a JSON array, indented JSON or CSV first"
            if problem:
                yield Finding((key,), problem, fix, exit_code=DataError.exit_code)

    return check


def _listed(bad: Sequence[str]) -> str:
    """Return the bad rows among the first rows of a file as one line."""
    return f"bad row {bad[0]}" if len(bad) == 1 else f"{len(bad)} bad rows: {'; '.join(records.by_reason(bad))}"


@task("jsonl", when=_FILE_CONDITIONS, check_files=_file_check(records.jsonl_rows))
class Jsonl(FileTask):
    """Read a JSON Lines file: one JSON object per line, UTF-8, at most 1,000,000 bytes. Blank lines are ignored."""

    rows = staticmethod(records.jsonl_rows)


@task("parquet", extra=("pyarrow", "parquet"), when=_FILE_CONDITIONS, check_files=_file_check(records.parquet_rows))
class Parquet(FileTask):
    """Read a parquet file (extra `parquet`). Errors count rows from 1."""

    rows = staticmethod(records.parquet_rows)


@task(
    "hub",
    remote=True,
    extra=("datasets", "hub"),
    when={**_SKIP_CONDITION, "heldout_fraction": ("heldout_split", (None,))},
)
@dataclass
class Hub(RowTask):
    """Read a data set of the Hugging Face Hub (extra `hub`). A data set in the local cache needs no network.

    Args:
        seed: seed of the order of every epoch.
        name: name of the data set, or a local directory.
        split: split with the training problems.
        config: configuration of the data set.
        revision: commit, tag or branch; set a commit for reproducible runs.
        heldout_split: split with the held-out problems. A training row with one of their prompts is a bad row.
        heldout_fraction: share of `split` to hold out if `heldout_split` is unset.
        shuffle: use a new order for every epoch; false keeps the order of the data set.
    """

    _: KW_ONLY
    name: str
    split: str = "train"
    config: str | None = None
    revision: str | None = None
    heldout_split: str | None = None

    def __post_init__(self) -> None:
        contents = [self.name, self.config, self.revision, self.split]
        data = hub_split(self.name, self.split, self.config, self.revision)
        # `datasets` hashes the data and everything done to it, so the rows need not be read again.
        contents += [data._fingerprint, self.heldout_split, self.heldout_fraction]
        heldout = None
        if self.heldout_split is not None:
            heldout_data = hub_split(self.name, self.heldout_split, self.config, self.revision)
            contents.append(heldout_data._fingerprint)
            heldout = self._rows(heldout_data, self.heldout_split), self.name
        self.divide(self._rows(data, self.split), self.name, heldout)
        self.sign("hub", contents)

    def _rows(self, data: Any, split: str) -> records.Rows:
        return ((f"{self.name}/{split}:{number}", records.arrow_row(row)) for number, row in enumerate(data, start=1))


def hub_split(name: str, split: str, config: str | None = None, revision: str | None = None) -> Any:
    """Load one split of a data set of the Hugging Face Hub, or of a local directory in the same layout.

    Args:
        name: name of the data set, or the directory.
        split: name of the split.
        config: configuration of the data set.
        revision: commit, tag or branch.
    Raises:
        MissingExtraError: the extra `hub` is not installed.
        DataError: the data set cannot be loaded.
    """
    datasets = library("datasets", "hub")
    try:
        return datasets.load_dataset(name, config, split=split, revision=revision)
    except Exception as error:
        # The library raises many kinds, with messages of several lines.
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise DataError(
            f"data set {name}, split {split}: {reason}; check name, config, split and revision; "
            "without a network, the data set must be in the cache"
        ) from error


def read_problems(
    rows: records.Rows, name: str, reading: RowFormat, forbidden: frozenset[int] = frozenset()
) -> ProblemStore:
    """Parse rows into problems.

    Args:
        rows: the rows with their places.
        name: name of their file or data set, for errors.
        reading: columns of the rows, and treatment of bad rows.
        forbidden: `hash_key` of the held-out problems; a row with one of their prompts is a bad row.

    Raises:
        DataError: there are no rows, or more bad rows than `reading` allows; the first 20 of them are listed.
    """
    problems = ProblemStore()
    ids = dict[int, int]()
    lines = array("Q")
    unread: set[str] = set()
    empty_answers = array("Q")

    def take(where: str, row: Any) -> None:
        problem, (source, _, line) = _problem(row, where, reading), where.rpartition(":")
        unread.update(_UNREAD & problem.extra.keys() - {reading.answer_field, reading.solution_field, reading.id_field})
        if (key := hash_key(problem)) in forbidden:
            raise records.BadRow("this prompt is held out")
        # Hashes of a million ids take less than half of the memory of the ids.
        first = ids.setdefault(hash(problem.id), len(problems))
        if first < len(problems) and problems[first].id == problem.id:
            raise records.BadRow(f'{reading.id_field} "{problem.id}" is taken by {source}:{lines[first]}')
        problems.append(problem, key)
        lines.append(int(line))
        if reading.answer_field and not problem.answer.strip():
            empty_answers.append(int(line))

    # All rows are read before an error, so that a file is fixed once.
    bad = records.bad_rows(rows, take)
    total = len(problems) + len(bad)
    if not total:
        raise DataError(f"{name}: no rows; it needs at least one")
    allowed = reading.max_bad_fraction * total if reading.on_bad_row == "skip" else 0
    if len(bad) > allowed or not problems:
        limit = f"more than max_bad_fraction = {reading.max_bad_fraction:g} of {total:,} rows; fix them or raise it"
        fix = limit if reading.on_bad_row == "skip" else reading.fix
        raise records.refusal(bad, name, f": {fix}")
    if empty_answers:  # every text contains "", so that a reward may pay each completion
        count, first = len(empty_answers), empty_answers[0]
        _logger.warning("%s: %d of %d answers are empty, the first in row %d", name, count, total, first)
    if unread:
        _logger.warning("%s: only rewards read the columns %s", name, ", ".join(sorted(unread)))
    if bad:
        _logger.warning("%s: %d of %d rows skipped, the first: %s", name, len(bad), total, bad[0])
    return problems


def _problem(row: Any, line: str, reading: RowFormat) -> Problem:
    """Parse a row; raise BadRow if it is invalid."""
    names = {"answer": reading.answer_field, "solution": reading.solution_field, "id": reading.id_field}
    # A chat: other trainers' rows have `messages` in place of a prompt.
    is_chat = isinstance(row, dict) and reading.prompt_field == "prompt" and "prompt" not in row and "messages" in row
    names["prompt"] = "messages" if is_chat else reading.prompt_field
    full = _add_columns(cast("dict[str, Any]", row), names, reading) if isinstance(row, dict) else row
    try:
        read = records.checked(_schema(**names), full)
    except records.BadRow as reason:
        # The commonest mistake, for which the schema's own message has no fix.
        if str(reason).startswith(f'no field "{reading.answer_field}"'):
            hint = 'set answer_field to another column, or to "" if rewards need no answer'
            raise records.BadRow(f"{reason} ({hint})") from None
        raise
    id_ = line if read.id is None else str(read.id)
    # The prompt is not repeated, because it may be most of a row's memory.
    columns = {name: value for name, value in row.items() if name != names["prompt"]}
    prompt = reading.with_system_prompt(read.prompt)
    template = _template_variables(row)
    return Problem(id_, prompt, read.answer, read.solution, extra=columns, place=line, template=template)


def _template_variables(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what TRL's columns `tools` and `chat_template_kwargs` give to the chat template."""
    if pictures := [name for name in _IMAGES if row.get(name)]:
        raise records.BadRow(f'column "{pictures[0]}": only text is trained on; remove the column')
    tools, variables = (_parsed_text(row.get(name)) for name in ("tools", "chat_template_kwargs"))
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in cast("list[Any]", tools))):
        raise records.BadRow("tools: expected JSON schemas of functions; rename the column if it is something else")
    if variables and not isinstance(variables, dict):
        raise records.BadRow("chat_template_kwargs: expected an object with variables of the chat template")
    return {**(cast("dict[str, Any]", variables or {})), **({"tools": tools} if tools else {})}


def _parsed_text(value: Any) -> Any:
    """Return the JSON value of a text. Columns whose objects have different keys are often stored as JSON."""
    if not isinstance(value, str) or not value:
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _add_columns(row: dict[str, Any], names: Mapping[str, str], reading: RowFormat) -> dict[str, Any]:
    """Return the row with the columns `names`, derived from nested columns, the template, or other trainers' formats.

    Args:
        row: the row as read.
        names: columns of prompt, answer, solution and id.
        reading: the format of the rows.
    """
    # A copy: the caller still needs the columns as they were.
    row = dict(row)
    if names["answer"] == "answer" and "answer" not in row and (truth := column(row, "reward_model.ground_truth")):
        row["answer"] = truth[0]
    completion: Any = row.get("completion")
    is_dialogue = isinstance(completion, list) and len(cast("list[Any]", completion)) > 1
    if is_dialogue and isinstance(row.get(names["prompt"]), (str, list)):
        # Calls of tools and their results come between the question and the answer.
        row[names["prompt"]] = [*messages_of(row[names["prompt"]]), *cast("list[Any]", completion)[:-1]]
        if _last_message(completion, "assistant") is None:
            raise records.BadRow("completion: the last message must be the assistant's")
    messages: Any = row.get(names["prompt"])
    solution: Any = _last_message(completion)
    if names["prompt"] == "messages" and (answer := _last_message(messages, "assistant")) is not None:
        solution, row["messages"] = answer, messages[:-1]
    if solution and row.get(names["solution"]) is None:
        row[names["solution"]] = solution
    for name in names.values():
        # A column whose name contains a dot goes before a nested one.
        if name not in row and (value := column(row, name)):
            row[name] = value[0]
    if reading.prompt_template is not None:
        row[names["prompt"]] = PLACEHOLDER.sub(lambda match: _column_text(row, match[1]), reading.prompt_template)
    return row


def _last_message(value: Any, role: str = "") -> Any:
    """Return the content of the last message of a chat; None if it has another role.

    Args:
        value: a list of messages, or another value, which is returned unchanged if `role` is "".
        role: the required role; "" accepts any.
    """
    if not isinstance(value, list):
        return None if role else value
    last: Any = cast("list[Any]", value)[-1] if value else None
    return last.get("content") if isinstance(last, dict) and role in ("", last.get("role")) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _column_text(row: dict[str, Any], name: str) -> str:
    """Return the text that replaces the placeholder of a column; raise BadRow if the row has no such column."""
    if not (value := column(row, name)):
        raise records.BadRow(f'no field "{name}", which prompt_template uses; it has {", ".join(row)}')
    return as_text(value[0])


def _as_text(value: Any) -> Any:
    """Encode a number, list or object as JSON; return any other value unchanged."""
    if value is None or isinstance(value, str):
        return value
    try:
        # NaN would be written as NaN, which is not JSON; the schema then reports the value.
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return value


# Every row needs a schema, and building one costs far more than checking a row with it.
@lru_cache(maxsize=16)
def _schema(prompt: str, answer: str, solution: str, id: str) -> TypeAdapter[Any]:
    """Return the schema of a row whose columns have these names. It allows other columns."""
    text = Annotated[str, BeforeValidator(_as_text)]
    # No column is called "\0", so an answer that no reward needs is always "".
    answers: Any = (text, Field(alias=answer)) if answer else (Literal[""], Field("", alias="\0"))
    row: Any = create_model(
        "Row",
        __config__=ConfigDict(strict=True, extra="allow"),
        prompt=(Annotated[records.Prompt, AfterValidator(_check_prompt)], Field(alias=prompt)),
        answer=answers,
        solution=(str | None, Field(None, alias=solution)),
        id=(str | int | None, Field(None, alias=id)),
    )
    return TypeAdapter(row)


def _check_prompt(prompt: str | list[records.Message]) -> str | list[records.Message]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError("empty")
    elif not prompt or prompt[-1]["role"] == "assistant":
        raise ValueError("messages must end with a message to answer")
    return prompt
