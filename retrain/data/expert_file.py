"""Read expert demonstrations from a file, and iterate over them in a seeded order."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Annotated, Any, Generic, TypeVar

from pydantic import AfterValidator, ConfigDict, TypeAdapter
from typing_extensions import TypedDict

from retrain.functional.seeds import derive_seed, digest_of, epoch_order
from retrain.system.records import BadRow, Message, Prompt, checked, read_records
from retrain.types import Problem, State

RowT = TypeVar("RowT")


def _check_last_turn(messages: list[Message]) -> list[Message]:
    if not messages or messages[-1]["role"] != "assistant":
        raise ValueError("the last message must be the assistant's")
    return messages


class _Conversation(TypedDict):
    __pydantic_config__ = ConfigDict(strict=True)  # pyright: ignore[reportGeneralTypeIssues]
    messages: Annotated[list[Message], AfterValidator(_check_last_turn)]


class _Pair(TypedDict):
    __pydantic_config__ = ConfigDict(strict=True)  # pyright: ignore[reportGeneralTypeIssues]
    prompt: Prompt
    completion: str


_CONVERSATION, _PAIR = TypeAdapter(_Conversation), TypeAdapter(_Pair)


def read_experts(path: str) -> list[Problem]:
    """Read demonstrations from a .jsonl or .parquet file as problems with prompt and solution.

    A row is `{"messages": [...]}`, which ends with the assistant's turn, or `{"prompt": text or messages,
    "completion": text}`. Further fields are ignored. The `id` of a problem is the `file:line` of its row.

    Raises:
        DataError: the file cannot be read, has no rows, or has bad rows; the first 20 of them are listed with lines.
    """
    return read_records(path, _problem, " of expert data")


def fingerprint(problems: Sequence[Problem]) -> str:
    """Return a hash of the demonstrations and their order."""
    return digest_of([[problem.prompt, problem.solution] for problem in problems])


def _problem(line: str, row: Any) -> Problem:
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
        raise BadRow("there is no prompt" if not prompt else "the expert's answer is empty")
    return Problem(id=line, prompt=prompt, answer="", solution=solution)


class ExpertBuffer(Generic[RowT]):
    """Endless iterator over rows, in a new seeded order for every epoch.

    Args:
        rows: the rows, at least one.
        seed: seed of the run.
        keys: key of each row's prompt; `take` prefers rows with requested keys.
        name: name of the buffer; the order is derived from the seed and this name.

    Attributes:
        epoch: number of completed passes over the rows.
        offset: number of rows taken in the current pass.
    """

    def __init__(self, rows: Sequence[RowT], seed: int, keys: Sequence[Hashable] = (), name: str = "expert") -> None:
        self._rows, self._seed = rows, derive_seed(seed, name)
        self._by_key: dict[Hashable, list[int]] = {}
        for index, key in enumerate(keys):
            self._by_key.setdefault(key, []).append(index)
        self.epoch = self.offset = 0

    def take(self, count: int, wanted: Iterable[Hashable] = ()) -> list[RowT]:
        """Return `count` rows.

        Rows with a requested key come first: one row per key, then the second row of each key, and so on. They do not
        advance the position. The next rows of the seeded order follow, and do.

        Args:
            count: number of rows.
            wanted: the requested keys.
        """
        matches = [self._by_key.get(key, []) for key in dict.fromkeys(wanted)]
        # First the first row of every key, then the second of every key, so that no prompt takes all places.
        most = max(map(len, matches), default=0)
        chosen = [rows[turn] for turn in range(most) for rows in matches if turn < len(rows)][:count]
        while len(chosen) < count:
            order = epoch_order(self._seed, self.epoch, len(self._rows))
            taken = order[self.offset : self.offset + count - len(chosen)]
            chosen += taken
            self.offset += len(taken)
            if self.offset == len(order):
                self.epoch, self.offset = self.epoch + 1, 0
        return [self._rows[index] for index in chosen]

    def state_dict(self) -> State:
        """Return the position. The order is derived from the seed and the epoch."""
        return {"epoch": self.epoch, "offset": self.offset}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self.epoch, self.offset = int(state["epoch"]), int(state["offset"])
