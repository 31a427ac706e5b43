"""`retrain serve RUN`: an OpenAI-compatible API of a trained model. Nothing is kept of a request."""

from __future__ import annotations

import asyncio
import copy
import secrets
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from starlette.requests import Request as WebRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from retrain.errors import DataError
from retrain.functional.seeds import derive_seed
from retrain.run.run_context import RunContext
from retrain.serve.answers import AnswerPart, AnswerParts, Answers, events
from retrain.serve.chat_fields import MODEL, MODELS, ChatFields, ContextLimits, TextFields, fields
from retrain.serve.chat_sessions import plain_messages, untemplated
from retrain.serve.http_app import (
    Access,
    BodyReader,
    Endpoint,
    RefusedError,
    application,
    too_long,
    unless_gone,
)
from retrain.serve.http_server import HttpServer
from retrain.system.masking import masked
from retrain.training.chat import Chat
from retrain.types import Completion, Request, Sampling

_POLL_S, _LINGER_S = 0.2, 0.002
"""Seconds between checks for the end; seconds to wait for simultaneous requests, which are sampled together."""
_SEGMENT = 32
"""Number of tokens after which new requests join, stop strings are looked for, and a stream gets its next text."""
_MOST_RUNNING = 512
"""Largest number of completions that are sampled at the same time."""
_LEAST_TEMPERATURE = 0.01
"""Least temperature above 0. Engines cannot divide by less; vLLM has the same limit."""


@dataclass(eq=False)
class ServedChoice:
    """A completion in progress.

    Attributes:
        call: the request that it belongs to.
        index: its index in the request.
        prompt: token ids of the prompt.
        given: fields of the request.
        limit: largest number of tokens.
        stream: its stream of random numbers.
        ids: the tokens sampled so far.
        sent: number of characters sent so far.
    """

    call: AnswerParts
    index: int
    prompt: tuple[int, ...]
    given: ChatFields | TextFields
    limit: int
    stream: int
    ids: tuple[int, ...] = ()
    sent: int = 0

    @property
    def setting(self) -> tuple[float, float]:
        """Temperature and top_p."""
        least = _LEAST_TEMPERATURE if self.given.temperature else 0.0
        return max(self.given.temperature, least), self.given.top_p

    @property
    def request(self) -> Request:
        """The request for the next tokens."""
        count = min(_SEGMENT, self.limit - len(self.ids))
        return Request((*self.prompt, *self.ids), 1, count, derive_seed(self.stream, len(self.ids)))


class ServedModel:
    """Serves `/v1/models`, `/v1/chat/completions` and `/v1/completions` of a trained model.

    Requests are read in the server's thread and tokenized in another one. The thread that calls `work` samples all
    completions in progress, `_SEGMENT` tokens at a time, so that new requests need not wait for long ones. Completions
    of one temperature and top_p are sampled together.

    The tokens of a request with a seed depend on the request alone, except for rounding: a sum over more rows may
    round differently. Other requests have random seeds.

    Args:
        context: the run; its sampler must have weights.
        access: address to listen on, and access control.

    Attributes:
        url: address of the endpoint.

    Raises:
        EngineError: the port is in use, or cannot be opened.
    """

    def __init__(self, context: RunContext, access: Access) -> None:
        self._context, self._limits = context, ContextLimits.of(context)
        # A tokenizer is not thread-safe, so the thread that tokenizes has a copy.
        self._chat = replace(context.chat, tokenizer=copy.deepcopy(context.chat.tokenizer))
        self._tokenizing, self._over = ThreadPoolExecutor(1, "tokenize"), threading.Event()
        self._queue = SimpleQueue[ServedChoice]()
        self._bodies = BodyReader(self._limits.max_bytes)
        endpoints = [
            Endpoint("/v1/models", "GET", self._models),
            Endpoint("/v1/models/{name:path}", "GET", self._models),
            Endpoint("/v1/chat/completions", "POST", self._chat_completions),
            Endpoint("/v1/completions", "POST", self._completions),
        ]
        self._server = HttpServer(application(endpoints, access), access)
        self.url = self._server.url

    def work(self) -> None:
        """Sample until `request_stop` is called."""
        running: list[ServedChoice] = []
        try:
            while not self._over.is_set():
                running = [one for one in running + self._new(running) if not one.call.given_up]
                for setting in dict.fromkeys(one.setting for one in running):
                    some = [one for one in running if one.setting == setting]
                    requests, sampling = [one.request for one in some], self._sampling(setting)
                    for one, [completion] in zip(some, self._context.sampler.sample(requests, sampling), strict=True):
                        if self._extend(one, completion):
                            running.remove(one)
        except BaseException as error:
            self._over.set()
            for one in running:
                one.call.put(RefusedError(500, masked(f"the server has failed: {type(error).__name__}: {error}")))
            raise
        for one in running:
            one.call.put(RefusedError(503, "the server is ending"))

    def _new(self, running: Sequence[ServedChoice]) -> list[ServedChoice]:
        """Return choices from the queue; wait for the first one if none is running."""
        found: list[ServedChoice] = []
        with suppress(Empty):
            if not running:
                found.append(self._queue.get(timeout=_POLL_S))
                time.sleep(_LINGER_S)
            while len(running) + len(found) < _MOST_RUNNING:
                found.append(self._queue.get_nowait())
        return found

    def _sampling(self, setting: tuple[float, float]) -> Sampling:
        seed = derive_seed(self._context.config.training.seed, "served")
        return self._context.trained.loaded.sampling(seed, *setting)

    def _extend(self, one: ServedChoice, completion: Completion) -> bool:
        """Add tokens to a choice and send what is certain of its text; return True if the choice has ended."""
        chat, stops, before = self._context.chat, one.given.stops, len(one.ids)
        ids = (*one.ids, *completion.ids)
        end = _stopped(chat, ids, stops)
        one.ids = ids if end is None else ids[:end]
        text = chat.decode(one.ids)
        ended = None
        if end is not None:
            ended, text = "stop", text[: min(place for stop in stops if (place := text.find(stop)) >= 0)]
        elif completion.finish_reason == "stop":
            ended = "stop"
        elif len(one.ids) >= one.limit:
            ended = "length"
        else:  # the text may end within a character or a stop string
            text = text.rstrip("\ufffd")
            text = text[: max(one.sent, len(text) - max(map(len, stops), default=1) + 1)]
        new, scores = one.ids[before:], list[tuple[str, float]]()
        if one.given.scored:
            pieces = zip(chat.pieces(one.ids)[before:], new, completion.logprobs, strict=False)
            ends = self._context.trained.loaded.stop_ids
            scores = [(piece, score) for piece, token, score in pieces if token not in ends]
        one.call.put(AnswerPart(one.index, text[one.sent :], len(new), scores, ended))
        one.sent = max(one.sent, len(text))
        return ended is not None

    def request_stop(self) -> None:
        """End `work` soon. Safe to call from a signal handler."""
        self._over.set()

    def close(self) -> None:
        """Accept no more requests, and refuse those that wait."""
        self._over.set()
        with suppress(Empty):
            while True:
                self._queue.get_nowait().call.put(RefusedError(503, "the server is ending"))
        self._server.close()
        self._tokenizing.shutdown()

    async def _models(self, call: WebRequest) -> Response:
        name = call.path_params.get("name")
        self._check_model(name)
        return JSONResponse(MODEL if name else MODELS)

    async def _chat_completions(self, call: WebRequest) -> Response:
        return await self._answer(call, fields(ChatFields, await self._bodies.read(call)))

    async def _completions(self, call: WebRequest) -> Response:
        return await self._answer(call, fields(TextFields, await self._bodies.read(call)))

    async def _answer(self, call: WebRequest, given: ChatFields | TextFields) -> Response:
        self._check_model(given.model)
        prompts = await asyncio.get_running_loop().run_in_executor(self._tokenizing, self._prompts, given)
        seed, running = secrets.randbits(62) if given.seed is None else given.seed, AnswerParts()
        for index, (ids, limit) in enumerate(one for one in prompts for _ in range(given.n)):
            self._queue.put(ServedChoice(running, index, ids, given, limit, derive_seed(seed, index)))
        if self._over.is_set():
            raise RefusedError(503, "the server is ending")
        answers = Answers(given, sum(len(ids) for ids, _ in prompts), given.n * len(prompts))
        if given.stream:
            return StreamingResponse(events(running, answers), media_type="text/event-stream")
        collected = asyncio.ensure_future(answers.collect(running))
        try:
            return JSONResponse(await unless_gone(call, collected))
        finally:
            running.given_up = True

    def _check_model(self, name: str | None) -> None:
        if name not in (None, MODEL["id"]):
            text = f"there is no model {name!r}; the model is {MODEL['id']!r}"
            raise RefusedError(404, text, field="model", code="model_not_found")

    def _prompts(self, given: ChatFields | TextFields) -> list[tuple[tuple[int, ...], int]]:
        """Return the token ids of every prompt, and the largest number of tokens of its completions.

        Raises:
            RefusedError: a prompt is invalid, or leaves too few tokens.
        """
        try:
            if isinstance(given, ChatFields):
                return [self._limited(self._chat_ids(given), given)]
            if not given.prompts:
                raise ValueError("there is no prompt")
            return [self._limited(self._text_ids(one), given) for one in given.prompts]
        except (DataError, ValueError) as error:
            field = "messages" if isinstance(given, ChatFields) else "prompt"
            raise RefusedError(400, masked(str(error)), field=field) from None

    def _chat_ids(self, given: ChatFields) -> tuple[int, ...]:
        messages = plain_messages(given.messages)
        self._limits.check(messages, given.tools)
        whole = messages if self._chat.templated else untemplated(messages)
        return self._chat.prompt(whole, given.tools or None).ids

    def _text_ids(self, prompt: str | list[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            self._limits.check([{"role": "", "content": prompt}], ())
            return replace(self._chat, mode="off").prompt(prompt).ids
        if wrong := [one for one in prompt if not 0 <= one < self._context.trained.loaded.vocabulary]:
            raise ValueError(f"{wrong[0]} is not a token id of the model")
        return tuple(prompt)

    def _limited(self, ids: tuple[int, ...], given: ChatFields | TextFields) -> tuple[tuple[int, ...], int]:
        if not ids:
            raise ValueError("the prompt has no tokens")
        free, default = self._limits.tokens - len(ids), self._context.config.training.max_tokens
        if free < (given.limit or 1):
            raise too_long(
                f"the prompt has {len(ids)} tokens and the answer up to {given.limit or 1}; the context of the model "
                f"has {self._limits.tokens:g}"
            )
        return ids, given.limit or int(min(default, free))


def _stopped(chat: Chat, ids: Sequence[int], stops: Sequence[str]) -> int | None:
    """Return the number of tokens whose text is the first to contain one of the stop strings; None if none does."""

    def contained(count: int) -> bool:
        text = chat.decode(ids[:count])
        return any(stop in text for stop in stops)

    return bisect_left(range(len(ids)), True, key=contained) if contained(len(ids)) else None
