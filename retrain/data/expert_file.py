"""Worked answers of an expert from a file, and the order in which training takes them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Annotated, Any, Generic, TypeVar

from pydantic import AfterValidator, ConfigDict, TypeAdapter
from typing_extensions import TypedDict

from retrain.functional.seeds import derive_seed, digest_of, epoch_order
from retrain.system.records import BadRow, Message, Prompt, checked, read_records
from retrain.types import Problem, State

RowT = TypeVar("RowT")


def _answered(messages: list[Message]) -> list[Message]:
    if not messages or messages[-1]["role"] != "assistant":
        raise ValueError("the last one must be the assistant's")
    return messages


class _Conversation(TypedDict):
    __pydantic_config__ = ConfigDict(strict=True)  # pyright: ignore[reportGeneralTypeIssues]
    messages: Annotated[list[Message], AfterValidator(_answered)]


class _Pair(TypedDict):
    __pydantic_config__ = ConfigDict(strict=True)  # pyright: ignore[reportGeneralTypeIssues]
    prompt: Prompt
    completion: str


_CONVERSATION, _PAIR = TypeAdapter(_Conversation), TypeAdapter(_Pair)


def read_experts(path: str) -> list[Problem]:
    """The rows of a jsonl or parquet file (by its suffix) as prompt and solution; `id` is the row's `file:line`.

    A row is `{"messages": [...]}` that ends with the assistant's turn, or `{"prompt": text or messages,
    "completion": text}`; further fields are ignored.

    Raises:
        DataError: the file cannot be read, has no rows or bad ones; it names the first of them, each with its line.
    """
    return read_records(path, _problem, " of expert data")


def fingerprint(problems: Sequence[Problem]) -> str:
    """Hash of the expert's rows and their order."""
    return digest_of([[problem.prompt, problem.solution] for problem in problems])


def _problem(place: str, row: Any) -> Problem:
    if isinstance(row, dict) and "messages" not in row and not {"prompt", "completion"} <= row.keys():
        has = ", ".join(map(str, row)) or "none"
        raise BadRow(f'no field "messages", and not "prompt" and "completion"; it has {has}')
    if isinstance(row, dict) and "messages" not in row:
        pair: Any = checked(_PAIR, row)
        prompt, solution = pair["prompt"], pair["completion"]
    else:
        conversation: Any = checked(_CONVERSATION, row)
        *prompt, last = conversation["messages"]
        solution = last["content"]
    if not prompt or not solution.strip():
        raise BadRow("there is no prompt" if not prompt else "the expert says nothing")
    return Problem(id=place, prompt=prompt, answer="", solution=solution)


class ExpertBuffer(Generic[RowT]):
    """Rows in a seeded order, a new one for every pass; it wraps, and a checkpoint holds the position.

    Args:
        rows: at least one.
        seed: of the run.
        keys: key of each row's prompt; rows with a wanted key come first (see `take`).
        name: of the buffer; the order derives from it and the seed.

    Attributes:
        epoch: passes that are complete. offset: rows taken since.
    """

    def __init__(self, rows: Sequence[RowT], seed: int, keys: Sequence[Hashable] = (), name: str = "expert") -> None:
        self._rows, self._seed = rows, derive_seed(seed, name)
        self._by_key: dict[Hashable, list[int]] = {}
        for index, key in enumerate(keys):
            self._by_key.setdefault(key, []).append(index)
        self.epoch = self.offset = 0

    def take(self, count: int, wanted: Iterable[Hashable] = ()) -> list[RowT]:
        """Return the next `count` rows; first, without using them up, rows with wanted keys, one per key in turn."""
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
        """Position; the order itself derives from the seed and the epoch."""
        return {"epoch": self.epoch, "offset": self.offset}

    def load_state_dict(self, state: State) -> None:
        """Restore `state_dict`."""
        self.epoch, self.offset = int(state["epoch"]), int(state["offset"])
