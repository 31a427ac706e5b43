"""Token ids of the messages between two sampled turns. The conversation so far is never rendered again."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from retrain.errors import DataError
from retrain.training.chat import SEPARATOR, Chat, Messages, TokenizedPrompt
from retrain.types import Problem, messages_of

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of functions that the model may call."""

RoleTexts = Sequence[tuple[str, str]]
"""Messages as (role, text)."""

CUT = "\n[... {} tokens left out ...]\n"
"""Text that replaces the middle of a long observation."""

_logger = logging.getLogger(__name__)

# No other text contains the separator, so that a template's own words cannot be taken for the marks.
_MARK, _PROBE = f"{SEPARATOR}reply{SEPARATOR}", f"{SEPARATOR}seen{SEPARATOR}"


class ChatStitcher:
    """Computes the bridge between two turns: the token ids that follow one reply and precede the next.

    With a chat template, `[user, assistant MARK, new messages]` is rendered once, and the text after MARK is the
    bridge. If the policy sampled the token that ends its turn, the bridge begins after that token. If the token limit
    cut the reply, the end token belongs to the bridge and is not trained on. Without a template the bridge is the text
    of the messages.

    A role that the template does not render (some lack "tool") becomes "user". Consecutive messages of one role are
    joined if the template refuses them. Special tokens written in a message are tokenized as plain text, so a message
    cannot end a turn.

    Raises:
        DataError: the template changes the text of a reply, or does not show the message after it.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._roles: dict[str, str] = {}
        if problem := self._problem_with("user"):
            raise DataError(
                f"the chat template cannot continue a conversation after a sampled reply: {problem}; "
                'use a model with another template, or [model] chat = "off"'
            )

    def of(self, problem: Problem) -> ChatStitcher:
        """Return the stitcher with the template variables of a problem's row."""
        if not problem.template:
            return self
        # A shallow copy shares what was found out about roles.
        other = copy.copy(self)
        other._chat = self._chat.of(problem)
        return other

    def opening(
        self, prompt: str | Messages, messages: RoleTexts, tools: Tools = (), tools_text: str = ""
    ) -> TokenizedPrompt:
        """Render the prompt with the environment's messages before the first turn.

        Two consecutive messages of the user become one message. Without a chat template, the texts of all
        messages are appended to the prompt.

        Args:
            prompt: the problem's prompt.
            messages: the environment's messages.
            tools: functions that the model may call, for a chat template that renders them.
            tools_text: description of the tools for other templates; it is appended as a message of the user.
        """
        joined = self._joined(prompt, [(role, self._chat.quoted(text)) for role, text in messages])
        if tools and self._chat.templated:
            # The form of OpenAI's API, which templates expect.
            wrapped = [{"type": "function", "function": dict(tool)} for tool in tools]
            with suppress(Exception):  # a template may raise anything
                shown = self._chat.prompt(joined, wrapped)
                # A template that ignores tools renders without an error.
                if all(str(tool["name"]) in shown.text for tool in tools):
                    return shown
        return self._chat.prompt(self._joined(joined, [("user", tools_text)] if tools_text else ()))

    def _joined(self, prompt: str | Messages, messages: RoleTexts) -> str | Messages:
        if isinstance(prompt, str) and (not self._chat.templated or {role for role, _ in messages} <= {"user"}):
            return prompt + "".join(text for _, text in messages)
        joined = list(messages_of(prompt))
        for role, text in messages:
            if joined and joined[-1]["role"] == role == "user":
                joined[-1] = {"role": role, "content": joined[-1]["content"] + text}
            else:
                joined.append({"role": role, "content": text})
        return joined

    def ids(self, messages: RoleTexts, last: int | None) -> list[int]:
        """Return the bridge for the messages of an observation.

        Args:
            messages: the messages.
            last: end token of the turn before; None if the token limit cut that turn.
        """
        if not self._chat.templated:
            return self._chat.encode("".join(text for _, text in messages))
        shown = [(self._role(role), self._chat.quoted(text)) for role, text in messages]
        try:
            tail = self._tail(shown)
        except DataError:  # many templates refuse consecutive messages of one role
            runs = groupby(shown, lambda pair: pair[0])
            tail = self._tail([(role, "\n".join(text for _, text in run)) for role, run in runs])
        ids = self._chat.encode(tail)
        index = ids.index(last) if last in ids else -1
        # The first end token of the tail ends the reply if only white space precedes it, else a later message.
        return ids[index + 1 :] if not self._chat.decode(ids[: max(index, 0)]).strip() else ids

    def short(self, messages: RoleTexts, limit: int) -> RoleTexts:
        """Cut the middle of every message that has more than `limit` tokens.

        The result has the first and the last limit / 2 tokens of the message. A note in between, which
        is not counted, has the number of removed tokens.
        """
        short: list[tuple[str, str]] = []
        for role, text in messages:
            quoted = self._chat.quoted(text)
            # A token has at least one byte, so a text of at most `limit` bytes is short enough without tokenization.
            ids = self._chat.encode(quoted) if len(quoted.encode(errors="replace")) > limit else []
            if len(ids) > limit:
                note = CUT.format(len(ids) - limit)
                text = self._chat.decode(ids[: -(-limit // 2)]) + note + self._chat.decode(ids[len(ids) - limit // 2 :])
            short.append((role, text))
        return short

    def _role(self, role: str) -> str:
        if role not in self._roles:
            problem = self._problem_with(role)
            self._roles[role] = "user" if problem else role
            if problem:
                text = 'the chat template does not render the role "%s" (%s); its messages are rendered as "user"'
                _logger.warning(text, role, problem)
        return self._roles[role]

    def _problem_with(self, role: str) -> str:
        """Return the reason why the template does not show a message of this role after a reply; "" if it does."""
        try:
            shown = not self._chat.templated or _PROBE in self._tail([(role, _PROBE)])
        except Exception as error:  # a template may raise anything
            return f"{type(error).__name__}: {error}"
        return "" if shown else f'it does not show a message of the role "{role}" after a reply'

    def _tail(self, messages: RoleTexts) -> str:
        """Render these messages after a reply, and return the text that follows the reply."""
        new: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in messages]
        for message in new:
            # Some templates require both, and Mistral's an id of nine characters.
            message |= {"name": "tool", "tool_call_id": "000000000"} if message["role"] == "tool" else {}
        before = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
        text = self._chat.render([*before, *new], add_generation_prompt=True)
        _, mark, tail = text.rpartition(_MARK)
        if not mark:
            raise DataError("it does not show a reply unchanged")
        return tail
