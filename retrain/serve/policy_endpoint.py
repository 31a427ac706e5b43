"""An OpenAI-compatible API for a policy. The conversations of programs with the policy become episodes."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request as WebRequest
from starlette.responses import JSONResponse, Response

from retrain.errors import DataError, EngineError, RetrainError
from retrain.functional.seeds import derive_seed
from retrain.run.collectors.rollouts import train_sampling
from retrain.run.run_context import RunContext
from retrain.serve.chat_fields import MODELS, ContextLimits, TurnFields, fields
from retrain.serve.chat_sessions import SessionConflictError, Sessions, TurnRequest, plain_messages
from retrain.serve.http_app import Access, Endpoint, RefusedError, application, read_json, too_long, unless_gone
from retrain.serve.http_server import HttpServer
from retrain.system.files import writing
from retrain.system.masking import masked
from retrain.types import REWARD_RANGE, Completion, Request, Rollout, is_reward

_POLL_S, _LINGER_S, _SILENCE_S = 0.2, 0.005, 30.0
"""Seconds between checks for the end of the run; to wait for simultaneous requests, which are sampled together; and
without a request before a training run prints a message."""
_LONGEST_NAME = 256
"""Largest number of characters of a session's name."""

_T = TypeVar("_T")


class _QueuedTurn(NamedTuple):
    """A tokenized request. Its completion is cancelled if the client closes its connection."""

    turn: TurnRequest
    request: Request
    completion: Future[Completion]


class PolicyEndpoint:
    """Serves `/v1/models`, `/v1/chat/completions` and `/v1/sessions/NAME/reward`.

    Requests are read in the server's thread and tokenized in another one. They wait in a queue until the thread that
    calls `work` samples all waiting requests in one call. While that thread updates the policy, requests wait.

    Args:
        context: the run; its sampler must have weights.
        access: address to listen on, and access control.
        episodes: file to which every episode is appended as a JSON row; None: episodes are kept for `rollouts`.
        patience_s: seconds without a request after which `work` raises EngineError.

    Attributes:
        url: address of the endpoint.

    Raises:
        EngineError: the port is in use, or cannot be opened.
        StorageError: the file of episodes cannot be written.
    """

    def __init__(
        self, context: RunContext, access: Access, episodes: Path | None = None, patience_s: float = math.inf
    ) -> None:
        self._context = context
        self._episodes = episodes
        self._patience_s = patience_s
        # A tokenizer is not thread-safe, so the sessions have a copy.
        self._sessions = Sessions(replace(context.chat, tokenizer=copy.deepcopy(context.chat.tokenizer)))
        self._limits = ContextLimits.of(context)
        # None in the queue marks a reward, behind which turns may belong to the next step.
        self._turns = SimpleQueue[_QueuedTurn | None]()
        self._sessions_thread = ThreadPoolExecutor(1, "sessions")
        # Writing nothing fails now, and not after the first episode, if the file cannot be written.
        self._record([])
        self._sampling = train_sampling(
            context.config, context.trained.loaded, derive_seed(context.config.training.seed, "endpoint")
        )
        self._over, self._failure, self._received = threading.Event(), list[RetrainError](), time.monotonic()
        endpoints = [
            Endpoint("/v1/models", "GET", self._models),
            Endpoint("/v1/chat/completions", "POST", self._completed),
            Endpoint("/v1/sessions/{name:path}/reward", "POST", self._rewarded),
        ]
        self._server = HttpServer(application(endpoints, access), access)
        self.url = self._server.url

    def work(self, count: float = math.inf) -> None:
        """Sample replies until `count` sessions have a reward.

        Raises:
            EngineError: `request_stop` was called, or no request arrived for `patience_s` seconds.
            StorageError: an episode cannot be written.
        """
        began = time.monotonic()
        warned = False
        while len(self._sessions.done) < count:
            if self._failure:
                raise self._failure[0]
            if self._over.is_set():
                raise EngineError("stopped while waiting for episodes")
            if turns := self._waiting():
                self._sample(turns)
            # Since `began`: before it the thread may have trained for minutes without answering anybody.
            silent = time.monotonic() - max(began, self._received)
            if silent > self._patience_s:
                raise EngineError(f"{self._silence(count, silent)}; --patience sets how long a run waits")
            late = silent > min(_SILENCE_S, self._patience_s / 2) and count < math.inf
            if late and not warned:
                self._context.observe("message", {"text": f"{self._silence(count, silent)} (Ctrl-C ends the run)"})
            warned = late

    def _waiting(self) -> list[_QueuedTurn]:
        """Wait for a turn and return it with those that arrive shortly after it; [] if none arrives in `_POLL_S`.

        Turns that arrived after a reward are left in the queue: the reward may be the last one of a step, and later
        turns must be sampled with the next weights.
        """
        turns: list[_QueuedTurn | None] = []
        with suppress(Empty):
            turns.append(self._turns.get(timeout=_POLL_S))
            time.sleep(_LINGER_S if turns[-1] else 0)
            while turns[-1] is not None:
                turns.append(self._turns.get_nowait())
        return [turn for turn in turns if turn is not None and turn.completion.set_running_or_notify_cancel()]

    def _sample(self, turns: Sequence[_QueuedTurn]) -> None:
        """Sample the replies of turns; if sampling fails, answer all of them with the error and raise it."""
        try:
            for turn, [completion] in zip(
                turns, self._context.sampler.sample([turn.request for turn in turns], self._sampling), strict=True
            ):
                turn.completion.set_result(completion)
        # BaseException: clients must also be answered when Ctrl-C ends the sampling.
        except BaseException as error:
            self._over.set()
            text = masked(f"the run has failed: {type(error).__name__}: {error}")
            for turn in turns:
                if not turn.completion.done():
                    turn.completion.set_exception(RefusedError(500, text))
            raise
        self._received = time.monotonic()

    def _silence(self, count: float, seconds: float) -> str:
        done = len(self._sessions.done)
        live = self._sessions.live
        return (
            f"{self.url}/v1 has received no request for {seconds:.3g} s: {done} of the {count:g} sessions of this step "
            f"have a reward, and {live} have none yet"
        )

    def rollouts(self) -> list[Rollout]:
        """Wait until as many sessions as a step has rows have a reward, and return their episodes."""
        count = self._context.prompts * self._context.config.training.group_size
        self.work(count)
        return self._sessions_thread.submit(self._sessions.take, count).result()

    def request_stop(self) -> None:
        """Make `work` raise EngineError soon. Safe to call from a signal handler."""
        self._over.set()

    def close(self) -> None:
        """Accept no more requests, and refuse those that wait."""
        self._over.set()
        self._refuse_all()
        self._server.close()
        self._sessions_thread.shutdown()

    def _refuse_all(self) -> None:
        with suppress(Empty):
            while True:
                if (turn := self._turns.get_nowait()) and turn.completion.set_running_or_notify_cancel():
                    turn.completion.set_exception(_ended())

    def _receive(self) -> None:
        """Note that a request has arrived; raise `RefusedError` if the run has ended."""
        if self._over.is_set():
            raise _ended()
        self._received = time.monotonic()

    async def _models(self, _: WebRequest) -> Response:
        self._receive()
        return JSONResponse(MODELS)

    async def _completed(self, call: WebRequest) -> Response:
        """Answer a chat request once its reply is sampled; cancel it if the client closes its connection."""
        body = await read_json(call, self._limits.max_bytes)
        self._receive()
        given = fields(TurnFields, body)
        queued = await self._with_sessions(self._turn, _session(call), given)
        self._turns.put(queued)
        if self._over.is_set():  # `close` may have refused waiting turns before this one was queued
            self._refuse_all()
        try:
            completion = await unless_gone(call, asyncio.wrap_future(queued.completion))
        except RefusedError:
            await self._with_sessions(self._sessions.cancel, queued.turn)
            raise
        text = await self._with_sessions(self._sessions.add_reply, queued.turn, completion)
        sizes = {"prompt_tokens": len(queued.request.ids), "completion_tokens": len(completion.ids)}
        choice = {"index": 0, "message": {"role": "assistant", "content": text}}
        answer = {
            "id": f"chatcmpl-{queued.turn.session}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": given.model or "policy",
            "choices": [{**choice, "finish_reason": completion.finish_reason}],
            "usage": {**sizes, "total_tokens": sum(sizes.values())},
            "session": queued.turn.session,
        }
        return JSONResponse(answer)

    async def _rewarded(self, call: WebRequest) -> Response:
        """Store the reward of a session, and return the number of its rows."""
        body = await read_json(call, self._limits.max_bytes)
        name = str(call.path_params["name"])
        self._receive()
        value = body.get("reward")
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_reward(value):
            raise RefusedError(400, f"reward must be a number {REWARD_RANGE}")
        rows = await self._with_sessions(self._reward, name, float(value))
        # Wakes `work`, which counts the rewards, and ends the present batch of turns.
        self._turns.put(None)
        return JSONResponse({"session": name, "rows": rows})

    async def _with_sessions(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function in the only thread that accesses sessions; its exceptions become `RefusedError`."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._sessions_thread, function, *arguments)
        except RefusedError:
            raise
        except (DataError, ValueError, TypeError) as error:
            raise RefusedError(400, masked(str(error))) from None
        except KeyError as error:
            raise RefusedError(404, f"there is no session {error}") from None
        except SessionConflictError as error:
            raise RefusedError(409, str(error)) from None
        except RetrainError as error:
            self._failure.append(error)
            raise RefusedError(500, masked(f"the run has failed: {error}")) from None
        except Exception as error:  # a tokenizer may raise any exception
            raise RefusedError(500, masked(f"{type(error).__name__}: {error}")) from None

    def _turn(self, session: str, given: TurnFields) -> _QueuedTurn:
        """Tokenize a request and begin its turn.

        Raises:
            RefusedError, ValueError: the request is invalid, or leaves no token for a reply.
            DataError, SessionConflictError: as for `Sessions.prepare`.
        """
        training = self._context.config.training
        messages = plain_messages(given.messages)
        tools = given.tools
        self._limits.check(messages, tools)
        turn = self._sessions.prepare(session, messages, tools)
        context = turn.context
        if not context:
            raise ValueError("the messages have no tokens")
        free = self._limits.tokens - len(context)
        # The run's limit is that of an episode, so that earlier turns have used a part of it.
        most = int(min(given.limit or training.max_tokens, training.max_tokens - turn.sampled, free))
        if most < 1:
            raise too_long(
                f"the episode has sampled {turn.sampled} of [training] max_tokens = {training.max_tokens}, and the "
                f"context of the model has {max(0, free):g} tokens left"
            )
        self._sessions.begin(turn)
        return _QueuedTurn(turn, Request(context, 1, most, turn.stream), Future())

    def _reward(self, name: str, value: float) -> int:
        rows = self._sessions.reward(name, value)
        if self._episodes is not None:
            self._record(self._sessions.take(1))
        return rows

    def _record(self, rollouts: Sequence[Rollout]) -> None:
        if self._episodes is not None:
            with writing(self._episodes), self._episodes.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(rollout.row()) + "\n" for rollout in rollouts)


def _session(call: WebRequest) -> str:
    """Return the name in the header X-Session-ID, or "" without one."""
    try:
        # HTTP headers are latin-1 by their standard, and clients put UTF-8 into them.
        name = call.headers.get("x-session-id", "").encode("latin-1").decode()
    except UnicodeDecodeError:
        raise RefusedError(400, "X-Session-ID is not UTF-8") from None
    if len(name) > _LONGEST_NAME:
        raise RefusedError(400, f"X-Session-ID is longer than {_LONGEST_NAME} characters")
    return name


def _ended() -> RefusedError:
    return RefusedError(503, "the run has ended")


@contextmanager
def source_of_episodes(context: RunContext, access: Access, patience_s: float = math.inf) -> Generator[None]:
    """Train the run on the episodes of an endpoint while the context is open."""
    endpoint = context.episode_source = PolicyEndpoint(context, access, None, patience_s)
    context.observe("message", {"text": f"the policy answers at {endpoint.url}/v1"})
    try:
        yield
    finally:
        endpoint.close()
