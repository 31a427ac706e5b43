"""Conversations that a program has with a policy by chat requests, kept as episodes, token for token."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from retrain.functional.seeds import derive_seed
from retrain.training.bridge import ChatStitcher, Tools, Transcript
from retrain.training.chat import Chat
from retrain.types import Completion, Problem, Rollout

ChatMessage = dict[str, str]

_MOST_LIVE = 10_000
"""Sessions without a reward: a program that gives none must not fill the memory."""
_MOST_ENDED = 100_000
"""Names of sessions with a reward that are remembered."""


class SessionConflictError(Exception):
    """A request that a session cannot take now, or never again."""


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
class TurnRequest:
    """A request for the next turn of a row.

    Attributes:
        session: its name.
        messages: the whole conversation.
        new: token ids of what was said since the last turn.
        label: of the session, in place of a name that is random.
        stream: of what is drawn.
    """

    session: str
    row: SessionRow
    messages: list[ChatMessage]
    new: list[int]
    label: str
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
        self._chat, self._stitcher = chat, ChatStitcher(chat)
        self._rows: dict[str, list[SessionRow]] = {}
        self._asked, self._waiting = Counter[str](), Counter[str]()
        self._labels, self._opened = dict[str, str](), 0
        self._ended: dict[str, None] = {}
        self.done: list[tuple[list[SessionRow], float]] = []

    @property
    def live(self) -> int:
        """Number of sessions with a reply and without a reward."""
        return len(self._rows)

    def request_turn(self, name: str, messages: list[ChatMessage], tools: Tools = ()) -> TurnRequest:
        """Return what a request asks for. Nothing changes before `begin`, so that a request may still be refused.

        Args:
            name: of the session; empty: that of the row it extends, or a new one that nobody can guess.
        Raises:
            DataError: the messages cannot be rendered.
            SessionConflictError: the session has its reward, or there are too many without one.
        """
        if name in self._ended:
            raise SessionConflictError(f"the session {name} has its reward: name another one")
        if name not in self._rows and len(self._rows) >= _MOST_LIVE:
            raise SessionConflictError(f"{_MOST_LIVE} sessions have no reward yet")
        for own in [name] if name else list(self._rows):
            for row in reversed(self._rows.get(own, [])):
                new = messages[len(row.messages) :]
                known = not row.busy and messages[: len(row.messages)] == row.messages
                if known and new and all(one["role"] != "assistant" for one in new):
                    ids = self._stitcher.ids([(one["role"], one["content"]) for one in new], row.end)
                    return self._found(own, row, messages, ids)
        whole = messages if self._chat.templated else "".join(one["content"] for one in messages)
        row = SessionRow(self._chat.prompt(whole, list(tools) or None))
        return self._found(name or f"session-{secrets.token_urlsafe(16)}", row, messages, [], unnamed=not name)

    def _found(
        self, name: str, row: SessionRow, messages: list[ChatMessage], new: list[int], unnamed: bool = False
    ) -> TurnRequest:
        # What is drawn depends on the name that a program gives, but not on one that is random.
        label = f"unnamed {self._opened}" if unnamed else self._labels.get(name, name)
        return TurnRequest(name, row, messages, new, label, derive_seed(0, label, self._asked[name] + 1))

    def begin(self, turn: TurnRequest) -> None:
        """Have the row wait for its reply: until then no other request extends it."""
        turn.row.busy = True
        if turn.session not in self._labels:
            self._labels[turn.session] = turn.label
            self._opened += 1
        self._asked[turn.session] += 1
        self._waiting[turn.session] += 1

    def forget(self, turn: TurnRequest) -> None:
        """Have the row as it was before the request, whose program has gone away."""
        turn.row.busy = False
        self._waiting[turn.session] -= 1

    def say(self, turn: TurnRequest, completion: Completion) -> str:
        """Take the turn that was sampled; return its text."""
        row, text = turn.row, self._chat.decode(completion.ids)
        row.observe(turn.new)
        row.add_turn(completion)
        row.messages, row.busy = [*turn.messages, {"role": "assistant", "content": text}], False
        self._waiting[turn.session] -= 1
        rows = self._rows.setdefault(turn.session, [])
        if row not in rows:
            rows.append(row)
        return text

    def reward(self, name: str, value: float) -> int:
        """End a session; return how many rows it has.

        Raises:
            KeyError: there is no session of this name.
            SessionConflictError: it has its reward already, or one of its requests has no answer yet.
        """
        if name in self._ended:
            raise SessionConflictError(f"the session {name} has its reward already")
        if self._waiting[name]:
            raise SessionConflictError(f"a request of the session {name} has no answer yet: reward it afterwards")
        rows = self._rows.pop(name)
        for known in (self._asked, self._waiting, self._labels):
            known.pop(name, None)
        self._ended[name] = None
        if len(self._ended) > _MOST_ENDED:
            del self._ended[next(iter(self._ended))]
        self.done.append((rows, value))
        return len(rows)

    def take(self, count: int) -> list[Rollout]:
        """Return the rows of the first `count` sessions that are done, as rollouts. The group is the first prompt's."""
        several, self.done = self.done[:count], self.done[count:]
        prompts = list(dict.fromkeys(rows[0].prompt.text for rows, _ in several))
        groups = [prompts.index(rows[0].prompt.text) for rows, _ in several]
        return [self._rollout(row, g, value) for g, (rows, value) in zip(groups, several, strict=True) for row in rows]

    def _rollout(self, row: SessionRow, group: int, value: float) -> Rollout:
        problem = Problem(str(derive_seed(0, row.prompt.text)), row.prompt.text, answer="")
        rollout = self._chat.rollout((problem, row.prompt), group, row.ids, row.logprobs, row.turns)
        return replace(rollout, ended="done").rewarded(value, {"env": value})


def plain_messages(given: Sequence[object]) -> list[ChatMessage]:
    """Messages of the OpenAI format as role and text; ValueError for a part that is not text."""
    found: list[ChatMessage] = []
    for one in given:
        match one:
            case {"role": str(role), "content": str(text)}:
                pass
            case {"role": str(role), "content": [*parts]}:
                texts = [part.get("text") if isinstance(part, dict) else None for part in parts]  # pyright: ignore
                if not all(isinstance(text, str) for text in texts):
                    raise ValueError("a message has a part that is not text")
                text = "".join(map(str, texts))
            case {"role": str(role), "content": None}:
                text = ""
            case _:
                raise ValueError('a message is not {"role": ..., "content": text}')
        found.append({"role": role, "content": text})
    if not found:
        raise ValueError("there are no messages")
    return found
