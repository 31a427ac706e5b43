"""`retrain serve RUN`: an OpenAI-compatible API of a trained model. Nothing is kept of a request."""

from __future__ import annotations

import asyncio
import copy
import secrets
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, zip_longest
from queue import Empty, SimpleQueue

from starlette.requests import Request as WebRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from retrain.errors import DataError
from retrain.functional.seeds import derive_seed
from retrain.run.run_context import RunContext
from retrain.serve.answers import AnswerPart, AnswerParts, Answers, events
from retrain.serve.chat_fields import MODEL, MODELS, ChatFields, ContextLimits, TextFields, fields
from retrain.serve.chat_sessions import plain_messages, untemplated
from retrain.serve.http_app import Access, Endpoint, RefusedError, application, read_json, too_long, unless_gone
from retrain.serve.http_server import HttpServer
from retrain.system.masking import masked
from retrain.training.chat import Chat
from retrain.types import Completion, Request, Sampling

_POLL_S = 0.2
"""Seconds between checks for the end."""
_LINGER_S = 0.002
"""Seconds to wait for simultaneous requests, which are sampled together."""
_SEGMENT = 32
"""Number of tokens after which new requests join, stop strings are looked for, and a stream gets its next text."""
_MOST_SAMPLED = 512
"""Largest number of completions that are sampled at the same time."""
_MOST_CHOICES = 2048
"""Largest number of choices of a request."""
_LEAST_TEMPERATURE = 0.01
"""Least temperature above 0. Engines cannot divide by less; vLLM has the same limit."""


@dataclass(eq=False)
class ServedChoice:
    """A completion in progress.

    Attributes:
        call: receives the parts of its text.
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
        # A temperature of exactly 0 means greedy decoding, which needs no division.
        least = _LEAST_TEMPERATURE if self.given.temperature else 0.0
        return max(self.given.temperature, least), self.given.top_p

    @property
    def request(self) -> Request:
        """The request for the next tokens."""
        count = min(_SEGMENT, self.limit - len(self.ids))
        # A stream for each segment: with one for all, every segment would begin with the same random numbers.
        return Request((*self.prompt, *self.ids), 1, count, derive_seed(self.stream, len(self.ids)))


@dataclass(eq=False)
class ServedRequest:
    """A request in progress.

    Attributes:
        call: receives the parts of its choices.
        unsampled: the choices that are not sampled yet. Each is made when its turn comes.
        left: number of choices that have not ended.
        begun: the choices that are sampled in part.
    """

    call: AnswerParts
    unsampled: Iterator[ServedChoice]
    left: int
    begun: list[ServedChoice] = field(default_factory=list[ServedChoice])

    def choices(self) -> Iterator[ServedChoice]:
        """Yield the choices in the order in which they are sampled."""
        yield from list(self.begun)
        for choice in self.unsampled:
            self.begun.append(choice)
            yield choice


class ServedModel:
    """Serves `/v1/models`, `/v1/chat/completions` and `/v1/completions` of a trained model.

    Requests are read in the server's thread and tokenized in another one. The thread that calls `work` samples all
    completions in progress, `_SEGMENT` tokens at a time, so that new requests need not wait for long ones. If there are
    more than `_MOST_SAMPLED` completions, requests take turns, so that a large request does not delay small ones.
    Completions of one temperature and top_p are sampled together.

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
        self._context = context
        self._limits = ContextLimits.of(context)
        # A tokenizer is not thread-safe, so the thread that tokenizes has a copy.
        self._chat = replace(context.chat, tokenizer=copy.deepcopy(context.chat.tokenizer))
        self._tokenizing = ThreadPoolExecutor(1, "tokenize")
        self._over = threading.Event()
        self._queue = SimpleQueue[ServedRequest]()
        endpoints = [
            Endpoint("/v1/models", "GET", self._models),
            Endpoint("/v1/models/{name:path}", "GET", self._models),
            Endpoint("/v1/chat/completions", "POST", partial(self._answer, ChatFields)),
            Endpoint("/v1/completions", "POST", partial(self._answer, TextFields)),
        ]
        self._server = HttpServer(application(endpoints, access), access)
        self.url = self._server.url

    def work(self) -> None:
        """Sample until `request_stop` is called."""
        requests: list[ServedRequest] = []
        try:
            while not self._over.is_set():
                requests += self._arrived(wait=not requests)
                requests = [request for request in requests if not request.call.given_up]
                self._sample(requests)
                requests = [request for request in requests if request.left]
                # With more requests than completions that are sampled, the others come first next time.
                requests = requests[_MOST_SAMPLED:] + requests[:_MOST_SAMPLED]
        except BaseException as error:
            self._over.set()
            for request in requests:
                request.call.put(RefusedError(500, masked(f"the server has failed: {type(error).__name__}: {error}")))
            raise
        for request in requests:
            request.call.put(RefusedError(503, "the server is ending"))

    def _arrived(self, wait: bool) -> list[ServedRequest]:
        """Return the requests in the queue; wait for the first one if `wait`."""
        requests: list[ServedRequest] = []
        with suppress(Empty):
            # With completions in progress, waiting would delay them.
            if wait:
                requests.append(self._queue.get(timeout=_POLL_S))
                time.sleep(_LINGER_S)
            while True:
                requests.append(self._queue.get_nowait())
        return requests

    def _sample(self, requests: Sequence[ServedRequest]) -> None:
        """Sample the next tokens of the next choice of each request, then of a further one of each, and so on."""
        # One choice of each request before a second of any: n = 128 must not hold up n = 1.
        turns = zip_longest(*[request.choices() for request in requests])
        in_turn = (
            (request, choice) for turn in turns for request, choice in zip(requests, turn, strict=True) if choice
        )
        sampled = list(islice(in_turn, _MOST_SAMPLED))
        # An engine samples a batch with one temperature and one top_p.
        for setting in dict.fromkeys(choice.setting for _, choice in sampled):
            together = [(request, choice) for request, choice in sampled if choice.setting == setting]
            completions = self._context.sampler.sample(
                [choice.request for _, choice in together], self._sampling(setting)
            )
            for (request, choice), [completion] in zip(together, completions, strict=True):
                if self._extend(choice, completion):
                    request.begun.remove(choice)
                    request.left -= 1

    def _sampling(self, setting: tuple[float, float]) -> Sampling:
        seed = derive_seed(self._context.config.training.seed, "served")
        return self._context.trained.loaded.sampling(seed, *setting)

    def _extend(self, choice: ServedChoice, completion: Completion) -> bool:
        """Add tokens to a choice and send what is certain of its text; return True if the choice has ended."""
        chat = self._context.chat
        stops = choice.given.stops
        before = len(choice.ids)
        ids = (*choice.ids, *completion.ids)
        end = _stopped(chat, ids, stops)
        choice.ids = ids if end is None else ids[:end]
        text = chat.decode(choice.ids)
        ended = None
        if end is not None:
            ended = "stop"
            text = text[: min(start for stop in stops if (start := text.find(stop)) >= 0)]
        elif completion.finish_reason == "stop":
            ended = "stop"
        elif len(choice.ids) >= choice.limit:
            ended = "length"
        else:  # the text may end within a character or a stop string
            text = text.rstrip("\ufffd")
            # Text that was sent cannot be taken back, hence the floor.
            text = text[: max(choice.sent, len(text) - max(map(len, stops), default=1) + 1)]
        new = choice.ids[before:]
        scores: list[tuple[str, float]] = []
        if choice.given.scored:
            pieces = zip(chat.pieces(choice.ids)[before:], new, completion.logprobs, strict=False)
            stop_ids = self._context.trained.loaded.stop_ids
            scores = [(piece, score) for piece, token, score in pieces if token not in stop_ids]
        choice.call.put(AnswerPart(choice.index, text[choice.sent :], len(new), scores, ended))
        choice.sent = max(choice.sent, len(text))
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

    async def _answer(self, kind: type[ChatFields | TextFields], request: WebRequest) -> Response:
        given = fields(kind, await read_json(request, self._limits.max_bytes))
        self._check_model(given.model)
        texts = 1 if isinstance(given, ChatFields) else len(given.prompts)
        if texts * given.n > _MOST_CHOICES:
            raise RefusedError(
                400, f"n: {texts} prompts with n = {given.n} are over {_MOST_CHOICES} choices", field="n"
            )
        prompts = await asyncio.get_running_loop().run_in_executor(self._tokenizing, self._prompts, given)
        call = AnswerParts()
        self._queue.put(ServedRequest(call, _choices(call, given, prompts), given.n * len(prompts)))
        # `work` may have emptied the queue just before this request entered it.
        if self._over.is_set():
            raise RefusedError(503, "the server is ending")
        answers = Answers(given, sum(len(ids) for ids, _ in prompts), given.n * len(prompts))
        if given.stream:
            return StreamingResponse(events(call, answers), media_type="text/event-stream")
        collected = asyncio.ensure_future(answers.collect(call))
        try:
            return JSONResponse(await unless_gone(request, collected))
        finally:
            call.given_up = True

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
            return [self._limited(self._text_ids(prompt), given) for prompt in given.prompts]
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
        vocabulary = self._context.trained.loaded.vocabulary
        if invalid := [token for token in prompt if not 0 <= token < vocabulary]:
            raise ValueError(f"{invalid[0]} is not a token id of the model")
        return tuple(prompt)

    def _limited(self, ids: tuple[int, ...], given: ChatFields | TextFields) -> tuple[tuple[int, ...], int]:
        if not ids:
            raise ValueError("the prompt has no tokens")
        free = self._limits.tokens - len(ids)
        default = self._context.config.training.max_tokens
        if free < (given.limit or 1):
            raise too_long(
                f"the prompt has {len(ids)} tokens and the answer up to {given.limit or 1}; the context of the model "
                f"has {self._limits.tokens:g}"
            )
        return ids, given.limit or int(min(default, free))


def _choices(
    call: AnswerParts, given: ChatFields | TextFields, prompts: Sequence[tuple[tuple[int, ...], int]]
) -> Iterator[ServedChoice]:
    """Yield the choices of a request, `given.n` of each prompt."""
    seed = secrets.randbits(62) if given.seed is None else given.seed
    for number, (ids, limit) in enumerate(prompts):
        for index in range(number * given.n, (number + 1) * given.n):
            yield ServedChoice(call, index, ids, given, limit, derive_seed(seed, index))


def _stopped(chat: Chat, ids: Sequence[int], stops: Sequence[str]) -> int | None:
    """Return the number of tokens whose text is the first to contain one of the stop strings; None if none does."""

    def contained(count: int) -> bool:
        text = chat.decode(ids[:count])
        return any(stop in text for stop in stops)

    # More tokens contain what fewer contained, so that bisection finds the first length with few decodings.
    return bisect_left(range(len(ids)), True, key=contained) if contained(len(ids)) else None
