"""Conversations that a program has with a policy by chat requests, kept as episodes, token for token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from retrain.functional.seeds import derive_seed
from retrain.training.bridge import Bridge, Tools, Transcript
from retrain.training.chat import Chat
from retrain.types import Completion, Problem, Rollout

ChatMessage = dict[str, str]


@dataclass(eq=False)
class SessionRow(Transcript):
    """One conversation of a session; its prompt is what was rendered of its first request.

    Attributes:
        messages: all of it, as the program repeats them.
        busy: it waits for a reply.
    """

    messages: list[ChatMessage] = field(default_factory=list[ChatMessage])
    busy: bool = False


@dataclass(frozen=True)
class Asked:
    """A request for the next turn of a row.

    Attributes:
        session: its name.
        messages: the whole conversation.
        new: token ids of what was said since the last turn.
        stream: of what is drawn.
    """

    session: str
    row: SessionRow
    messages: list[ChatMessage]
    new: list[int]
    stream: int

    @property
    def context(self) -> tuple[int, ...]:
        """Token ids of the conversation."""
        return (*self.row.context, *self.new)

    @property
    def sampled(self) -> int:
        """Tokens that the row has sampled."""
        return sum(turn.end - turn.start for turn in self.row.turns)


class Sessions:
    """Sessions by name, each a list of rows that share one reward.

    A request extends the row whose messages, replies included, it begins with: only what is new is rendered. Any other
    request is a branch, a row of its own that begins with what the request shows.

    Attributes:
        done: (rows, reward) of the sessions that have one, in the order of their rewards.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat, self._bridge = chat, Bridge(chat)
        self._rows: dict[str, list[SessionRow]] = {}
        self._asked: Counter[str] = Counter()
        self.done: list[tuple[list[SessionRow], float]] = []

    @property
    def live(self) -> int:
        """How many sessions have no reward yet."""
        return len(self._rows)

    def ask(self, name: str, messages: list[ChatMessage], tools: Tools = ()) -> Asked:
        """What a request asks for. Nothing changes before `begin`, so that a request may still be refused.

        Args:
            name: of the session; empty: that of the row it extends, or one that nobody has used.
        Raises:
            DataError: the messages cannot be rendered.
        """
        for own in [name] if name else list(self._rows):
            for row in reversed(self._rows.get(own, [])):
                new = messages[len(row.messages) :]
                known = not row.busy and messages[: len(row.messages)] == row.messages
                if known and new and all(one["role"] != "assistant" for one in new):
                    ids = self._bridge.ids([(one["role"], one["content"]) for one in new], row.end)
                    return self._found(own, row, messages, ids)
        whole = messages if self._chat.templated else "".join(one["content"] for one in messages)
        row = SessionRow(self._chat.prompt(whole, list(tools) or None))
        unused = (one for n in count(len(self._asked)) if (one := f"session-{n}") not in self._asked)
        return self._found(name or next(unused), row, messages, [])

    def _found(self, name: str, row: SessionRow, messages: list[ChatMessage], new: list[int]) -> Asked:
        return Asked(name, row, messages, new, derive_seed(0, name, self._asked[name] + 1))

    def begin(self, asked: Asked) -> None:
        """Have the row wait for its reply: until then no other request extends it."""
        asked.row.busy = True
        self._asked[asked.session] += 1

    def forget(self, asked: Asked) -> None:
        """Have the row as it was before the request, whose program has gone away."""
        asked.row.busy = False

    def say(self, asked: Asked, completion: Completion) -> str:
        """Take the turn that was sampled; returns its text."""
        row, text = asked.row, self._chat.decode(completion.ids)
        row.observe(asked.new)
        row.hear(completion)
        row.messages, row.busy = [*asked.messages, {"role": "assistant", "content": text}], False
        rows = self._rows.setdefault(asked.session, [])
        if row not in rows:
            rows.append(row)
        return text

    def reward(self, name: str, value: float) -> int:
        """End a session; returns how many rows it has. KeyError if there is none of this name that has not ended."""
        rows = self._rows.pop(name)
        self.done.append((rows, value))
        return len(rows)

    def take(self, count: int) -> list[Rollout]:
        """The rows of the first `count` sessions that are done, as rollouts. The group is the first prompt's."""
        several, self.done = self.done[:count], self.done[count:]
        prompts = list(dict.fromkeys(rows[0].prompt.text for rows, _ in several))
        groups = [prompts.index(rows[0].prompt.text) for rows, _ in several]
        return [self._rollout(row, g, value) for g, (rows, value) in zip(groups, several, strict=True) for row in rows]

    def _rollout(self, row: SessionRow, group: int, value: float) -> Rollout:
        problem = Problem(str(derive_seed(0, row.prompt.text)), row.prompt.text, answer="")
        rollout = self._chat.rollout((problem, row.prompt), group, row.ids, row.logprobs, row.turns)
        return replace(rollout, ended="done").rewarded(value, {"env": value})


def plain_messages(given: Sequence[object]) -> list[ChatMessage]:
    """Messages of the OpenAI format as role and text; ValueError for what is no text."""
    found: list[ChatMessage] = []
    for one in given:
        match one:
            case {"role": str(role), "content": str(text)}:
                pass
            case {"role": str(role), "content": [*parts]}:
                texts = [part.get("text") if isinstance(part, dict) else None for part in parts]  # pyright: ignore
                if not all(isinstance(text, str) for text in texts):
                    raise ValueError("a message has a part that is no text")
                text = "".join(map(str, texts))
            case {"role": str(role), "content": None}:
                text = ""
            case _:
                raise ValueError('a message is not {"role": ..., "content": text}')
        found.append({"role": role, "content": text})
    if not found:
        raise ValueError("there are no messages")
    return found
