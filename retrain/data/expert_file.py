"""Worked answers of an expert from a file, and the order in which training takes them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

from retrain.data.files import Jsonl, Parquet
from retrain.data.rows import BadRow, digest_of, epoch_order, read_message, read_text
from retrain.errors import DataError
from retrain.functional.seeds import derive_seed
from retrain.types import Problem, State

Row = TypeVar("Row")

_SHOWN = 20


def read_experts(path: str) -> list[Problem]:
    """The rows of a jsonl or parquet file (by its suffix) as prompt and solution; `id` is the row's `file:line`.

    A row is `{"messages": [...]}` that ends with the assistant's turn, or `{"prompt": text or messages,
    "completion": text}`; further fields are ignored.

    Raises:
        DataError: the file cannot be read, has no rows or bad ones; it names the first of them, each with its line.
    """
    problems: list[Problem] = []
    bad: list[str] = []
    source = Parquet if path.endswith(".parquet") else Jsonl
    for place, row in source.rows(path):
        try:
            problems.append(_problem(row, place))
        except BadRow as reason:
            bad.append(f"{place}: {reason}")
    if bad:
        more = [f"... and {len(bad) - _SHOWN:,} more"] if len(bad) > _SHOWN else []
        raise DataError("\n".join([*bad[:_SHOWN], *more, f"{path}: {len(bad):,} bad rows of expert data: mend them"]))
    if not problems:
        raise DataError(f"{path}:1: no rows; expert data needs at least one")
    return problems


def fingerprint(problems: Sequence[Problem]) -> str:
    """Hash of what the expert says, and of the order of the rows."""
    return digest_of([[problem.prompt, problem.solution] for problem in problems])


def _problem(row: Any, place: str) -> Problem:
    if isinstance(row, BadRow):
        raise row
    if not isinstance(row, Mapping):
        raise BadRow(f"expected an object with named fields, got {type(row).__name__}")
    values = cast("Mapping[str, Any]", row)
    if "messages" in values:
        prompt, solution = _conversation(values["messages"])
    elif "prompt" in values and "completion" in values:
        value, solution = values["prompt"], read_text(values["completion"], "completion")
        prompt = _messages(value, "prompt") if isinstance(value, list) else read_text(value, "prompt")
    else:
        raise BadRow(f'no field "messages", and not "prompt" and "completion"; it has {", ".join(values) or "none"}')
    if not prompt or not solution.strip():
        raise BadRow("there is no prompt" if not prompt else "the expert says nothing")
    return Problem(id=place, prompt=prompt, answer="", solution=solution)


def _conversation(value: Any) -> tuple[list[dict[str, str]], str]:
    """(what comes before, content) of the assistant's last turn."""
    if not isinstance(value, list):
        raise BadRow(f"messages: expected a list, got {type(value).__name__}")
    messages = _messages(cast("list[Any]", value), "messages")
    if not messages or messages[-1]["role"] != "assistant":
        raise BadRow("messages: the last one must be the assistant's")
    return messages[:-1], messages[-1]["content"]


def _messages(value: list[Any], name: str) -> list[dict[str, str]]:
    return [read_message(message, name) for message in value]


class ExpertBuffer(Generic[Row]):
    """Rows in a seeded order, a new one for every pass; it wraps, and a checkpoint says where it is.

    Args:
        rows: at least one.
        seed: of the run.
        keys: what each row answers; rows with a wanted key come first (see `take`).

    Attributes:
        epoch: passes that are complete. offset: rows taken since.
    """

    def __init__(self, rows: Sequence[Row], seed: int, keys: Sequence[Hashable] = ()) -> None:
        self._rows, self._seed = rows, derive_seed(seed, "expert")
        self._by_key: dict[Hashable, list[int]] = {}
        for index, key in enumerate(keys):
            self._by_key.setdefault(key, []).append(index)
        self.epoch = self.offset = 0

    def take(self, count: int, wanted: Iterable[Hashable] = ()) -> list[Row]:
        """The next `count` rows; first those with wanted keys, one of each key in turn, which are not used up by it."""
        matches = [self._by_key.get(key, []) for key in dict.fromkeys(wanted)]
        most = max(map(len, matches), default=0)
        found = [rows[turn] for turn in range(most) for rows in matches if turn < len(rows)][:count]
        while len(found) < count:
            order = epoch_order(self._seed, self.epoch, len(self._rows))
            part = order[self.offset : self.offset + count - len(found)]
            found += part
            self.offset += len(part)
            if self.offset == len(order):
                self.epoch, self.offset = self.epoch + 1, 0
        return [self._rows[index] for index in found]

    def state_dict(self) -> State:
        """Where it is; the order itself derives from the seed and the epoch."""
        return {"epoch": self.epoch, "offset": self.offset}

    def load_state_dict(self, state: State) -> None:
        """Go on from `state_dict`."""
        self.epoch, self.offset = int(state["epoch"]), int(state["offset"])
