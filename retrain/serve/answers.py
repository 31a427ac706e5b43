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
        self.loop, self.given_up = asyncio.get_running_loop(), False

    def put(self, part: AnswerPart | RefusedError) -> None:
        """Add a part, in the thread that samples."""
        with suppress(RuntimeError):  # the server's loop is closed
            self.loop.call_soon_threadsafe(self.parts.put_nowait, part)


class Answers:
    """Answers in the OpenAI format, whole or streamed.

    Args:
        given: the request.
        prompt_tokens: number of tokens of its prompts.
        count: number of its choices.
    """

    def __init__(self, given: ChatFields | TextFields, prompt_tokens: int, count: int) -> None:
        self._given, self.count = given, count
        self._chat = isinstance(given, ChatFields)
        self._sizes = {"prompt_tokens": prompt_tokens, "completion_tokens": 0}
        prefix, kind = ("chatcmpl", "chat.completion") if self._chat else ("cmpl", "text_completion")
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": MODEL["id"]}
        self._kind = kind

    async def collect(self, running: AnswerParts) -> JsonObject:
        """Wait for all choices, and return the whole answer."""
        parts: list[list[AnswerPart]] = [[] for _ in range(self.count)]
        async for part in self.parts(running):
            parts[part.index].append(part)
        choices = [self._choice(some) for some in parts]
        return {**self._head, "object": self._kind, "choices": choices, "usage": self.usage}

    async def parts(self, running: AnswerParts) -> AsyncGenerator[AnswerPart]:
        """Yield parts until every choice has ended; raise the error that ended the request."""
        left = self.count
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
        scores = [one for part in parts for one in part.scores]
        found: JsonObject = {"index": parts[0].index, "finish_reason": parts[-1].ended, "logprobs": None}
        if self._chat:
            found["delta" if streamed else "message"] = {"role": "assistant", "content": text}
            content = [_score(*one) for one in scores]
            return found | ({"logprobs": {"content": content, "refusal": None}} if self._given.scored else {})
        tokens, logprobs = [token for token, _ in scores], [score for _, score in scores]
        listed = {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None}
        return found | {"text": text} | ({"logprobs": listed} if self._given.scored else {})

    def chunk(self, *parts: AnswerPart) -> JsonObject:
        """Return a part of a choice as an event; without one, the event with the numbers of tokens."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        found: JsonObject = {
            **self._head,
            "object": kind,
            "choices": [self._choice([part], streamed=True) for part in parts],
        }
        if self._given.stream_options.include_usage:
            found["usage"] = None if parts else self.usage
        return found

    @property
    def with_usage(self) -> bool:
        """True if the stream ends with the numbers of tokens."""
        return self._given.stream_options.include_usage


def _score(token: str, logprob: float) -> JsonObject:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}


async def events(running: AnswerParts, answers: Answers) -> AsyncGenerator[str]:
    """Yield server-sent events. The request ends if the client closes its connection."""
    try:
        async for part in answers.parts(running):
            yield _event(answers.chunk(part))
        if answers.with_usage:
            yield _event(answers.chunk())
        yield "data: [DONE]\n\n"
    except RefusedError as error:
        yield _event(error.json())
    finally:
        running.given_up = True


def _event(found: JsonObject) -> str:
    return f"data: {json.dumps(found)}\n\n"
