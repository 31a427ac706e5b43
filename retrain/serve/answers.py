"""Answers to completion requests in the OpenAI format, whole or streamed."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from retrain.serve.chat_fields import MODEL, ChatFields, TextFields
from retrain.serve.http_app import JsonObject, RefusedError


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """The next part of a choice: its text, its sampled tokens as (text, log-prob), and the reason of its end."""

    index: int
    text: str
    count: int = 0
    scores: Sequence[tuple[str, float]] = ()
    ended: str | None = None


class AnswerParts:
    """A request in progress. Parts of its choices arrive in `parts`, or the error that ended it."""

    def __init__(self) -> None:
        self.parts = asyncio.Queue[AnswerPart | RefusedError]()
        self.loop = asyncio.get_running_loop()
        self.given_up = False

    def put(self, part: AnswerPart | RefusedError) -> None:
        """Add a part, in the thread that samples."""
        # The loop is closed once the server ends, and then nobody waits for the part.
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.parts.put_nowait, part)


class Answers:
    """Answers in the OpenAI format, whole or streamed.

    Args:
        given: the request.
        prompt_tokens: number of tokens of its prompts.
        count: number of its choices.
    """

    def __init__(self, given: ChatFields | TextFields, prompt_tokens: int, count: int) -> None:
        self.given = given
        self._count = count
        self._chat = isinstance(given, ChatFields)
        self._sizes = {"prompt_tokens": prompt_tokens, "completion_tokens": 0}
        prefix = "chatcmpl" if self._chat else "cmpl"
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": MODEL["id"]}

    async def collect(self, running: AnswerParts) -> JsonObject:
        """Wait for all choices, and return the whole answer."""
        parts: list[list[AnswerPart]] = [[] for _ in range(self._count)]
        # Parts of all choices arrive interleaved, in the order in which they were sampled.
        async for part in self.parts(running):
            parts[part.index].append(part)
        choices = [self._choice(parts_of_choice) for parts_of_choice in parts]
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self.usage}

    async def parts(self, running: AnswerParts) -> AsyncGenerator[AnswerPart]:
        """Yield parts until every choice has ended; raise the error that ended the request."""
        left = self._count
        while left:
            part = await running.parts.get()
            if isinstance(part, RefusedError):
                raise part
            self._sizes["completion_tokens"] += part.count
            left -= part.ended is not None
            yield part

    @property
    def usage(self) -> JsonObject:
        """Numbers of tokens so far."""
        return {**self._sizes, "total_tokens": sum(self._sizes.values())}

    def _choice(self, parts: Sequence[AnswerPart], streamed: bool = False) -> JsonObject:
        """Return one choice, or the next part of one."""
        text = "".join(part.text for part in parts)
        scores = [score for part in parts for score in part.scores]
        choice: JsonObject = {"index": parts[0].index, "finish_reason": parts[-1].ended, "logprobs": None}
        if self._chat:
            choice["delta" if streamed else "message"] = {"role": "assistant", "content": text}
            if self.given.scored:
                choice["logprobs"] = {"content": [_score(*score) for score in scores], "refusal": None}
            return choice
        choice["text"] = text
        if self.given.scored:
            tokens = [token for token, _ in scores]
            choice["logprobs"] = {
                "tokens": tokens,
                "token_logprobs": [score for _, score in scores],
                "top_logprobs": None,
            }
        return choice

    def chunk(self, *parts: AnswerPart) -> JsonObject:
        """Return a part of a choice as an event; without one, the event with the numbers of tokens."""
        event: JsonObject = {
            **self._head,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "choices": [self._choice([part], streamed=True) for part in parts],
        }
        if self.given.stream_options.include_usage:
            event["usage"] = None if parts else self.usage
        return event


def _score(token: str, logprob: float) -> JsonObject:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}


async def events(running: AnswerParts, answers: Answers) -> AsyncGenerator[str]:
    """Yield server-sent events. The request ends if the client closes its connection."""
    try:
        async for part in answers.parts(running):
            yield _event(answers.chunk(part))
        if answers.given.stream_options.include_usage:
            yield _event(answers.chunk())
        # OpenAI's clients wait for this line, not for the end of the connection.
        yield "data: [DONE]\n\n"
    except RefusedError as error:
        yield _event(error.json())
    finally:
        # Also reached when the client goes: then the thread that samples drops the request.
        running.given_up = True


def _event(content: JsonObject) -> str:
    return f"data: {json.dumps(content)}\n\n"
