"""The tokens between a sampled reply and the next one. No history is ever rendered a second time."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from retrain.errors import DataError
from retrain.training.chat import OWN, Chat, Messages, TokenizedPrompt
from retrain.types import Completion, Turn

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of functions that the model may call."""

Said = Sequence[tuple[str, str]]
"""(role, text) of messages."""

CUT = "\n[... {} tokens left out ...]\n"
"""Stands for the middle of a long observation."""

_logger = logging.getLogger(__name__)

_MARK, _PROBE = f"{OWN}reply{OWN}", f"{OWN}seen{OWN}"


@dataclass(eq=False)
class Transcript:
    """A conversation as tokens. What was sampled is known by its turns and is never tokenized again.

    Attributes:
        ids, logprobs: of everything after the prompt, 0 for what was not sampled.
    """

    prompt: TokenizedPrompt
    ids: list[int] = field(default_factory=list[int], kw_only=True)
    logprobs: list[float] = field(default_factory=list[float], kw_only=True)
    turns: list[Turn] = field(default_factory=list[Turn], kw_only=True)

    @property
    def context(self) -> tuple[int, ...]:
        """Token ids of the whole."""
        return (*self.prompt.ids, *self.ids)

    @property
    def end(self) -> int | None:
        """The token with which the last reply ended; None if it was cut."""
        return self.ids[-1] if self.turns[-1].finish_reason == "stop" else None

    def add_turn(self, completion: Completion, state: str = "") -> None:
        """Append a turn as it was sampled, in this state of an environment."""
        start = len(self.ids)
        self.ids += completion.ids
        self.logprobs += completion.logprobs
        how = completion.finish_reason, completion.weights_version
        self.turns.append(Turn(start, len(self.ids), *how, state=state))

    def observe(self, ids: Sequence[int]) -> None:
        """Append what was said to the model."""
        self.ids += ids
        self.logprobs += [0.0] * len(ids)


class ChatStitcher:
    """What stands between two replies of a conversation, as token ids.

    With a chat template, `[user, assistant MARK, new messages]` is rendered once, and what follows MARK is the bridge.
    Where the model has sampled the token that ends its reply, the bridge begins behind that token; where its reply
    was cut, the token is part of the bridge, which the policy did not choose. Without a template the bridge is the
    text of the messages.

    A role that the template does not show (some have no "tool") is rendered as "user", and messages of one role in a
    row are one where the template refuses several. Special tokens that a message writes are words: they end no turn.

    Raises:
        DataError: the template does not show a reply as it is, or not the message after it.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._roles: dict[str, str] = {}
        if problem := self._hidden("user"):
            raise DataError(
                f"the chat template cannot continue a conversation after a sampled reply: {problem}; "
                'use a model with another template, or [model] chat = "off"'
            )

    def opening(self, prompt: str | Messages, said: Said, tools: Tools = (), tools_text: str = "") -> TokenizedPrompt:
        """The prompt with what the environment says before the first reply: in the last message, if it is the user's.

        Args:
            prompt: the problem's.
            said: messages.
            tools: shown by a chat template that can; by others `tools_text` is.
        """
        joined = self._joined(prompt, [(role, self._chat.quoted(text)) for role, text in said])
        if tools and self._chat.templated:
            wrapped = [{"type": "function", "function": dict(tool)} for tool in tools]
            with suppress(Exception):  # a template may raise anything
                shown = self._chat.prompt(joined, wrapped)
                if all(str(tool["name"]) in shown.text for tool in tools):
                    return shown
        return self._chat.prompt(self._joined(joined, [("user", tools_text)] if tools_text else ()))

    def _joined(self, prompt: str | Messages, said: Said) -> str | Messages:
        if isinstance(prompt, str) and (not self._chat.templated or {role for role, _ in said} <= {"user"}):
            return prompt + "".join(text for _, text in said)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        for role, text in said:
            if messages and messages[-1]["role"] == role == "user":
                messages[-1] = {"role": role, "content": messages[-1]["content"] + text}
            else:
                messages.append({"role": role, "content": text})
        return messages

    def ids(self, said: Said, last: int | None) -> list[int]:
        """The bridge over messages; `last` is the end token of the reply before, None if the reply was cut."""
        if not self._chat.templated:
            return self._chat.encode("".join(text for _, text in said))
        shown = [(self._role(role), self._chat.quoted(text)) for role, text in said]
        try:
            tail = self._tail(shown)
        except DataError:  # many templates refuse two messages of one role in a row
            several = groupby(shown, lambda one: one[0])
            tail = self._tail([(role, "\n".join(text for _, text in ones)) for role, ones in several])
        ids = self._chat.encode(tail)
        place = ids.index(last) if last in ids else -1
        return ids[place + 1 :] if not self._chat.decode(ids[: max(place, 0)]).strip() else ids

    def short(self, said: Said, most: int) -> Said:
        """Messages of at most so many tokens each; a longer one is cut in its middle."""
        short: list[tuple[str, str]] = []
        for role, text in said:
            # A token is at least one character.
            ids = self._chat.encode(self._chat.quoted(text)) if len(text) > most else []
            if len(ids) > most:
                note = CUT.format(len(ids) - most)
                text = self._chat.decode(ids[: -(-most // 2)]) + note + self._chat.decode(ids[len(ids) - most // 2 :])
            short.append((role, text))
        return short

    def _role(self, role: str) -> str:
        if role not in self._roles:
            why = self._hidden(role)
            self._roles[role] = "user" if why else role
            if why:
                _logger.warning('the chat template has no place for the role "%s" (%s): the user says it', role, why)
        return self._roles[role]

    def _hidden(self, role: str) -> str:
        """Why a message of this role after a reply would not be seen; empty if it would."""
        try:
            seen = not self._chat.templated or _PROBE in self._tail([(role, _PROBE)])
        except Exception as error:  # a template may raise anything
            return f"{type(error).__name__}: {error}"
        return "" if seen else f"it does not show what the {role} says next"

    def _tail(self, said: Said) -> str:
        """What the template puts behind a reply that these messages follow."""
        new: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in said]
        for message in new:
            message |= {"name": "tool", "tool_call_id": "000000000"} if message["role"] == "tool" else {}
        before = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
        text = self._chat.render([*before, *new], add_generation_prompt=True)
        _, found, tail = text.rpartition(_MARK)
        if not found:
            raise DataError("it does not show the reply as it is")
        return tail
