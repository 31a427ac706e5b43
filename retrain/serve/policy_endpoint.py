"""A policy behind an OpenAI-compatible address: programs talk to it, and their conversations become episodes."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from retrain.errors import DataError, EngineError, RetrainError
from retrain.functional.seeds import derive_seed
from retrain.run.collect import train_sampling
from retrain.run.run_context import RunContext
from retrain.serve.chat_sessions import ChatMessage, SessionConflictError, Sessions, TurnRequest, plain_messages
from retrain.serve.http_app import Access, HttpApp, HttpCall, JsonObject, RefusedError
from retrain.system.extras import library
from retrain.system.files import writing
from retrain.system.masking import masked
from retrain.system.model_paths import positions
from retrain.types import Completion, Request, Rollout, fits_float32

_POLL_S, _LINGER_S, _SILENCE_S = 0.2, 0.005, 30.0
"""Seconds between looks at whether the run ends, to wait for requests that come together, and without a request before
a training run says so."""
_OVERHEAD, _LONGEST = 1 << 20, 1 << 25
"""Bytes of a request besides its text, and of the longest text that any model has room for."""
_CHAT, _MODELS = "/v1/chat/completions", "/v1/models"
_SESSIONS, _REWARD = "/v1/sessions/", "/reward"

_FIELDS = dict(model=str, messages=list, tools=list, stream=bool, n=int, max_completion_tokens=int, max_tokens=int)
_CALLED = {str: "a string", list: "a list", bool: "true or false", int: "a whole number"}
"""Types of the fields of a request that are read, unless they are null, and what the types are called."""

_T = TypeVar("_T")


class _Turn(NamedTuple):
    """A request that has been tokenized. Its completion is cancelled if nobody waits for it."""

    origin: TurnRequest
    request: Request
    completion: Future[Completion]


class PolicyEndpoint:
    """Serves `/v1/models`, `/v1/chat/completions` and `/v1/sessions/NAME/reward`.

    Requests are read in the thread of the server and tokenized in another. They wait in a queue, from which the thread
    that calls `work` takes them: all that wait are sampled in one call, and none while that thread makes an update.

    Args:
        context: of a run, whose sampler has its weights.
        access: where it listens, and whom it answers.
        episodes: a file to append every episode to, as a JSON row.
        patience_s: without a request, after which a training run ends.

    Attributes:
        url: its address.
    Raises:
        EngineError: the port cannot be had.
        MissingExtraError: uvicorn is not installed.
        StorageError: the file of episodes cannot be written.
    """

    def __init__(
        self, context: RunContext, access: Access, episodes: Path | None = None, patience_s: float = math.inf
    ) -> None:
        library("uvicorn", "serve")
        from retrain.serve.http_server import HttpServer

        self._context, self._episodes, self._patience_s = context, episodes, patience_s
        # A tokenizer is not for two threads.
        self._sessions = Sessions(replace(context.chat, tokenizer=copy.deepcopy(context.chat.tokenizer)))
        self._token_chars = max(map(len, context.chat.tokenizer.get_vocab()), default=1)
        self._turns, self._sessions_thread = SimpleQueue[_Turn | None](), ThreadPoolExecutor(1, "sessions")
        self._record([])
        self._sampling = train_sampling(
            context.config, context.loaded.stop_ids, derive_seed(context.config.training.seed, "endpoint")
        )
        self._over, self._failure, self._received = threading.Event(), list[RetrainError](), time.monotonic()
        max_bytes = int(min(_LONGEST, self._max_chars)) + _OVERHEAD
        self._server = HttpServer(HttpApp(self._answer, _method, access, max_bytes), access)
        self.url = self._server.url

    @property
    def _room(self) -> float:
        """Tokens of a conversation with its reply."""
        return min(positions(self._context.loaded.model), self._context.sampler.room)

    @property
    def _max_chars(self) -> float:
        """Characters of a conversation that may have so few tokens."""
        return self._room * self._token_chars

    def work(self, count: float = math.inf) -> None:
        """Sample for programs until `count` sessions have a reward.

        Raises:
            EngineError: the run is to stop, or nobody has asked anything for too long.
            StorageError: an episode cannot be written.
        """
        began, warned = time.monotonic(), False
        while len(self._sessions.done) < count:
            if self._failure:
                raise self._failure[0]
            if self._over.is_set():
                raise EngineError("no more episodes are waited for")
            if turns := self._waiting():
                self._sample(turns)
            silent = time.monotonic() - max(began, self._received)
            if silent > self._patience_s:
                raise EngineError(f"{self._silence(count, silent)}; --patience sets how long a run waits")
            late = silent > min(_SILENCE_S, self._patience_s / 2) and count < math.inf
            if late and not warned:
                self._context.observe("message", {"text": f"{self._silence(count, silent)} (Ctrl-C ends the run)"})
            warned = late

    def _waiting(self) -> list[_Turn]:
        """Return the turns that wait, after a moment for those that come together; none from behind a reward.

        A reward may be the last one of a step, and what is asked after it is for the next weights.
        """
        found: list[_Turn | None] = []
        with suppress(Empty):
            found.append(self._turns.get(timeout=_POLL_S))
            time.sleep(_LINGER_S if found[-1] else 0)
            while found[-1] is not None:
                found.append(self._turns.get_nowait())
        return [turn for turn in found if turn is not None and turn.completion.set_running_or_notify_cancel()]

    def _sample(self, turns: Sequence[_Turn]) -> None:
        try:
            for turn, [completion] in zip(
                turns, self._context.sampler.sample([turn.request for turn in turns], self._sampling), strict=True
            ):
                turn.completion.set_result(completion)
        except BaseException as error:
            self._over.set()
            text = masked(f"the run has failed: {type(error).__name__}: {error}")
            for turn in turns:
                if not turn.completion.done():
                    turn.completion.set_exception(RefusedError(500, text))
            raise
        self._received = time.monotonic()

    def _silence(self, count: float, seconds: float) -> str:
        done, live = len(self._sessions.done), self._sessions.live
        return (
            f"no program has asked {self.url}/v1 anything for {seconds:.3g} s: {done} of the {count:g} sessions of "
            f"this step have a reward, and {live} have none yet"
        )

    def rollouts(self) -> list[Rollout]:
        """Return the episodes of a step: as many sessions as it has rows, once all of them have a reward."""
        count = self._context.prompts * self._context.config.training.group_size
        self.work(count)
        return self._sessions_thread.submit(self._sessions.take, count).result()

    def request_stop(self) -> None:
        """Wait for no more requests. From a signal handler."""
        self._over.set()

    def close(self) -> None:
        """Take no more requests, and refuse those that wait."""
        self._over.set()
        self._refuse_all()
        self._server.close()
        self._sessions_thread.shutdown()

    def _refuse_all(self) -> None:
        with suppress(Empty):
            while True:
                if (turn := self._turns.get_nowait()) and turn.completion.set_running_or_notify_cancel():
                    turn.completion.set_exception(_ended())

    async def _answer(self, call: HttpCall) -> JsonObject:
        """Return the answer to a request, in the thread of the server."""
        if self._over.is_set():
            raise _ended()
        self._received = time.monotonic()
        if call.path == _MODELS:
            known = {"id": "policy", "object": "model", "created": 0, "owned_by": "retrain"}
            return {"object": "list", "data": [known]}
        return await (self._completed(call) if call.path == _CHAT else self._rewarded(call))

    async def _completed(self, call: HttpCall) -> JsonObject:
        turn = await self._with_sessions(self._turn, call.session, call.body)
        self._turns.put(turn)
        if self._over.is_set():  # asked only now: `close` may have missed this turn
            self._refuse_all()
        completed = asyncio.wrap_future(turn.completion)
        await asyncio.wait([completed, call.gone], return_when=asyncio.FIRST_COMPLETED)
        try:
            if call.gone.done():
                turn.completion.cancel()
                raise RefusedError(499, "nobody waits for this answer")
            completion = completed.result()
        except RefusedError:
            await self._with_sessions(self._sessions.forget, turn.origin)
            raise
        text = await self._with_sessions(self._sessions.say, turn.origin, completion)
        sizes = {"prompt_tokens": len(turn.request.ids), "completion_tokens": len(completion.ids)}
        choice = {"index": 0, "message": {"role": "assistant", "content": text}}
        return {
            "id": f"chatcmpl-{turn.origin.session}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": call.body.get("model") or "policy",
            "choices": [{**choice, "finish_reason": completion.finish_reason}],
            "usage": {**sizes, "total_tokens": sum(sizes.values())},
            "session": turn.origin.session,
        }

    async def _rewarded(self, call: HttpCall) -> JsonObject:
        value, name = call.body.get("reward"), call.path.removeprefix(_SESSIONS).removesuffix(_REWARD)
        if isinstance(value, bool) or not isinstance(value, int | float) or not fits_float32(value):
            raise RefusedError(400, "reward must be a finite number that fits float32")
        rows = await self._with_sessions(self._reward, name, float(value))
        self._turns.put(None)
        return {"session": name, "rows": rows}

    async def _with_sessions(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Return the result of a function of sessions, which one thread has; `RefusedError` if it raises."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._sessions_thread, function, *arguments)
        except (DataError, ValueError, TypeError) as error:
            raise RefusedError(400, masked(str(error))) from None
        except KeyError as error:
            raise RefusedError(404, f"there is no session {error}") from None
        except SessionConflictError as error:
            raise RefusedError(409, str(error)) from None
        except RetrainError as error:
            self._failure.append(error)
            raise RefusedError(500, masked(f"the run has failed: {error}")) from None
        except Exception as error:  # a tokenizer may raise anything
            raise RefusedError(500, masked(f"{type(error).__name__}: {error}")) from None

    def _turn(self, session: str, body: Mapping[str, Any]) -> _Turn:
        """Return what a request asks for; ValueError if it wants what there is not, or no token is left."""
        training = self._context.config.training
        wanted = _tokens(body) or training.max_tokens
        messages, tools = plain_messages(body.get("messages") or ()), body.get("tools") or ()
        self._check_length(messages, tools)
        origin = self._sessions.request_turn(session, messages, tools)
        context = origin.context
        if not context:
            raise ValueError("the messages have no tokens")
        room = self._room - len(context)
        most = int(min(wanted, training.max_tokens - origin.sampled, room))
        if most < 1:
            raise ValueError(
                f"context_length_exceeded: the episode has sampled {origin.sampled} of [training] max_tokens = "
                f"{training.max_tokens}, and the model has room for {room:g} more tokens"
            )
        self._sessions.begin(origin)
        return _Turn(origin, Request(context, 1, most, origin.stream), Future())

    def _check_length(self, messages: Sequence[ChatMessage], tools: Sequence[Any]) -> None:
        """Refuse before it is tokenized what cannot fit however few tokens it has."""
        chars = sum(len(one["role"]) + len(one["content"]) for one in messages) + len(
            json.dumps(tools) if tools else ""
        )
        if chars > self._max_chars or len(messages) > self._room:
            raise ValueError(
                f"context_length_exceeded: {len(messages)} messages of {chars} characters do not fit into "
                f"{self._room:g} tokens, of which the longest has {self._token_chars} characters"
            )

    def _reward(self, name: str, value: float) -> int:
        rows = self._sessions.reward(name, value)
        if self._episodes is not None:
            self._record(self._sessions.take(1))
        return rows

    def _record(self, rollouts: Sequence[Rollout]) -> None:
        if self._episodes is not None:
            with writing(self._episodes), self._episodes.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(one.row()) + "\n" for one in rollouts)


def _method(path: str) -> str:
    """Return the method that a path takes, or ""."""
    if path == _CHAT or (path.startswith(_SESSIONS) and path.endswith(_REWARD)):
        return "POST"
    return "GET" if path.rstrip("/") == _MODELS else ""


def _ended() -> RefusedError:
    return RefusedError(503, "the run has ended")


def _tokens(body: Mapping[str, Any]) -> int | None:
    """Return how many tokens a request wants at most; ValueError if a field of it is not what it has to be."""
    for name, kind in _FIELDS.items():
        if body.get(name) is not None and type(body[name]) is not kind:
            raise ValueError(f"{name} is not {_CALLED[kind]}")
    if body.get("stream") or body.get("n") not in (1, None):
        raise ValueError("one completion is given, in one piece: leave out stream and n")
    given = [body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    if min(given, default=1) < 1:
        raise ValueError("max_tokens is below 1")
    return given[0] if given else None


@contextmanager
def source_of_episodes(context: RunContext, access: Access, patience_s: float = math.inf) -> Generator[None]:
    """Have the run train on the episodes of an endpoint while this lasts."""
    endpoint = context.source = PolicyEndpoint(context, access, None, patience_s)
    context.observe("message", {"text": f"the policy answers at {endpoint.url}/v1"})
    try:
        yield
    finally:
        endpoint.close()
