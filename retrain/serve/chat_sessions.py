"""Conversations of programs with a policy through chat requests, stored token for token as episodes."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from retrain.functional.seeds import derive_seed
from retrain.training.chat import Chat, Transcript
from retrain.training.chat_stitcher import ChatStitcher, Tools
from retrain.types import Completion, Problem, Rollout

ChatMessage = dict[str, str]

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MOST_LIVE = 10_000
"""Largest number of sessions without a reward, so that programs that give no rewards do not fill the memory."""
_MOST_ENDED = 100_000
"""Number of newest sessions with a reward whose names are kept, to refuse further requests to them."""


class SessionConflictError(Exception):
    """A session cannot accept a request, either now or ever again."""


@dataclass(eq=False)
class SessionRow(Transcript):
    """One conversation of a session. Its prompt is the rendered first request.

    Attributes:
        messages: all messages so far, as the program repeats them in its next request.
        busy: True while a reply is being sampled.
    """

    messages: list[ChatMessage] = field(default_factory=list[ChatMessage])
    busy: bool = False


@dataclass(frozen=True)
class TurnRequest:
    """A request for the next turn of a row.

    Attributes:
        session: name of the session.
        row: the row that the turn extends.
        messages: all messages of the conversation.
        new: token ids of the messages since the last turn.
        label: the session's name, or a counter if the name is random, so that sampling is reproducible.
        stream: stream of random numbers to sample with.
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
        """Number of tokens sampled so far in the row."""
        return sum(turn.end - turn.start for turn in self.row.turns)


class Sessions:
    """Sessions by name. The rows of a session share one reward.

    If a request begins with all messages of a row, including replies, it extends this row, and only the new messages
    are rendered. Any other request starts a new row of the session (a branch) whose prompt is the whole request.

    Args:
        chat: chat format of the model.

    Attributes:
        done: (rows, reward) of the rewarded sessions, in the order of the rewards.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._stitcher = ChatStitcher(chat)
        self._rows: dict[str, list[SessionRow]] = {}
        self._requests = Counter[str]()
        self._waiting = Counter[str]()
        self._labels: dict[str, str] = {}
        self._opened = 0
        self._ended: dict[str, None] = {}
        self.done: list[tuple[list[SessionRow], float]] = []

    @property
    def live(self) -> int:
        """Number of sessions that have a reply and no reward yet."""
        return len(self._rows)

    def prepare(self, name: str, messages: list[ChatMessage], tools: Tools = ()) -> TurnRequest:
        """Return the request for a turn. It changes no state, so the caller can still refuse it; `begin` starts it.

        Args:
            name: name of the session; "": that of the row that the request extends, or a new random name.
            messages: all messages of the conversation.
            tools: tools for the chat template.
        Raises:
            DataError: the messages cannot be rendered.
            SessionConflictError: the session has its reward, or there are too many without one.
        """
        if name in self._ended:
            raise SessionConflictError(f"the session {name} has its reward: name another one")
        if name not in self._rows and len(self._rows) >= _MOST_LIVE:
            raise SessionConflictError(f"{_MOST_LIVE} sessions have no reward yet")
        for session in [name] if name else list(self._rows):
            # The newest row first: of two rows with the same beginning the program most likely continues that one.
            for row in reversed(self._rows.get(session, [])):
                new = messages[len(row.messages) :]
                extends = not row.busy and messages[: len(row.messages)] == row.messages
                # A reply that the policy did not give is not its own, so the conversation starts a row as a prompt.
                if extends and new and all(message["role"] != "assistant" for message in new):
                    ids = self._stitcher.ids([(message["role"], message["content"]) for message in new], row.end)
                    return self._found(session, row, messages, ids)
        # A base model has no template, and reads the messages as plain text.
        whole = messages if self._chat.templated else untemplated(messages)
        row = SessionRow(self._chat.prompt(whole, list(tools) or None))
        return self._found(name or f"session-{secrets.token_urlsafe(16)}", row, messages, [], unnamed=not name)

    def _found(
        self, name: str, row: SessionRow, messages: list[ChatMessage], new: list[int], unnamed: bool = False
    ) -> TurnRequest:
        # The stream depends on names that programs choose, but not on random names.
        label = f"unnamed {self._opened}" if unnamed else self._labels.get(name, name)
        return TurnRequest(name, row, messages, new, label, derive_seed(0, label, self._requests[name] + 1))

    def begin(self, turn: TurnRequest) -> None:
        """Mark the row as busy. No other request extends it until `add_reply` or `cancel`."""
        turn.row.busy = True
        if turn.session not in self._labels:
            self._labels[turn.session] = turn.label
            self._opened += 1
        self._requests[turn.session] += 1
        self._waiting[turn.session] += 1

    def cancel(self, turn: TurnRequest) -> None:
        """Drop a request whose program has closed its connection. The row is as before the request."""
        turn.row.busy = False
        self._waiting[turn.session] -= 1

    def add_reply(self, turn: TurnRequest, completion: Completion) -> str:
        """Add the sampled reply to the row, and return its text."""
        row = turn.row
        text = self._chat.decode(completion.ids)
        row.observe(turn.new)
        row.add_turn(completion)
        row.messages = [*turn.messages, {"role": "assistant", "content": text}]
        row.busy = False
        self._waiting[turn.session] -= 1
        rows = self._rows.setdefault(turn.session, [])
        if row not in rows:
            rows.append(row)
        return text

    def reward(self, name: str, value: float) -> int:
        """Set the reward of a session, which ends it, and return the number of its rows.

        Raises:
            KeyError: there is no session of this name.
            SessionConflictError: the session has its reward already, or one of its requests has no answer yet.
        """
        if name in self._ended:
            raise SessionConflictError(f"the session {name} has its reward already")
        if self._waiting[name]:
            raise SessionConflictError(f"a request of the session {name} has no answer yet: reward it afterwards")
        rows = self._rows.pop(name)
        for by_session in (self._requests, self._waiting, self._labels):
            by_session.pop(name, None)
        self._ended[name] = None
        if len(self._ended) > _MOST_ENDED:
            # A dict keeps its order, so that the first name is the oldest.
            del self._ended[next(iter(self._ended))]
        self.done.append((rows, value))
        return len(rows)

    def take(self, count: int) -> list[Rollout]:
        """Remove the first `count` rewarded sessions and return their rows as rollouts.

        Sessions whose first rows have the same prompt form a group.
        """
        several, self.done = self.done[:count], self.done[count:]
        # Programs name no groups; attempts at one task begin with the same prompt.
        prompts = list(dict.fromkeys(rows[0].prompt.text for rows, _ in several))
        groups = [prompts.index(rows[0].prompt.text) for rows, _ in several]
        return [self._rollout(row, g, value) for g, (rows, value) in zip(groups, several, strict=True) for row in rows]

    def _rollout(self, row: SessionRow, group: int, value: float) -> Rollout:
        problem = Problem(str(derive_seed(0, row.prompt.text)), row.prompt.text, answer="")
        rollout = self._chat.rollout((problem, row.prompt), group, row.ids, row.logprobs, row.turns)
        return replace(rollout, ended="done").rewarded(value, {"env": value})


def untemplated(messages: Sequence[ChatMessage]) -> str:
    """Return the text of messages for a model without a chat template, which shows no roles.

    Raises:
        ValueError: a role is not one of OpenAI's.
    """
    if unknown := [message["role"] for message in messages if message["role"] not in _ROLES]:
        raise ValueError(f"there is no role {unknown[0]!r}; roles: {', '.join(_ROLES)}")
    return "".join(message["content"] for message in messages)


def plain_messages(given: Sequence[object]) -> list[ChatMessage]:
    """Convert messages of the OpenAI format to role and text.

    Raises:
        ValueError: there are no messages, or one has another form or a part that is not text.
    """
    plain: list[ChatMessage] = []
    for message in given:
        match message:
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
        plain.append({"role": role, "content": text})
    if not plain:
        raise ValueError("there are no messages")
    return plain
