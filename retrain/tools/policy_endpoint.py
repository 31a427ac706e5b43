"""A policy behind an OpenAI-compatible address: programs talk to it, and their conversations become episodes."""

from __future__ import annotations

import json
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple
from urllib.parse import unquote

from retrain.engines.capability import positions
from retrain.errors import DataError, EngineError
from retrain.functional.seeds import derive_seed
from retrain.run.collect import train_sampling
from retrain.run.run_parts import Parts
from retrain.system.files import writing
from retrain.system.http_client import address
from retrain.tools.harness_sessions import Asked, Sessions, plain_messages
from retrain.types import Request, Rollout, fits_float32

SESSION = "X-Session-ID"
"""Header that names a session."""

_POLL_S, _LINGER_S, _SILENCE_S, _LONGEST = 0.2, 0.005, 30.0, 1 << 26
"""Seconds between looks at whether the run ends, to wait for requests that come together, and without a request before
a training run says so; bytes of a request."""

_FIELDS = dict(model=str, messages=list, tools=list, stream=bool, n=int, max_completion_tokens=int, max_tokens=int)
_CALLED = {str: "a string", list: "a list", bool: "true or false", int: "a whole number"}
"""Types of the fields of a request that are read, unless they are null, and what the types are called."""

_Answer = tuple[int, dict[str, Any]]


class _Request(NamedTuple):
    path: str
    session: str
    body: Mapping[str, Any]
    answer: Future[_Answer]
    awaited: Callable[[], bool]


class PolicyEndpoint:
    """Serves `/v1/models`, `/v1/chat/completions` and `/v1/sessions/NAME/reward`.

    Requests wait in a queue, from which the thread that calls `work` takes them: all that wait are sampled in one
    call, and none while that thread is busy with an update.

    Args:
        parts: of a run, whose sampler has its weights.
        port: 0 takes a free one.
        episodes: a file to append every episode to, as a JSON row.
        patience_s: without a request, after which a training run ends.

    Attributes:
        url: its address.
    Raises:
        EngineError: the port cannot be had.
        StorageError: the file of episodes cannot be written.
    """

    def __init__(
        self, parts: Parts, host: str, port: int, episodes: Path | None = None, patience_s: float = math.inf
    ) -> None:
        self._parts, self._episodes, self._patience_s = parts, episodes, patience_s
        self._sessions, self._calls = Sessions(parts.chat), SimpleQueue[_Request]()
        self._record([])
        self._sampling = train_sampling(parts, derive_seed(parts.config.training.seed, "endpoint"))
        self._over = threading.Event()
        handler = type("Handler", (_Handler,), {"endpoint": self})
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            raise EngineError(f"port {port} of {host} cannot be had ({error}); name another one with --port") from error
        self.url = address(host, self._server.server_port)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def work(self, count: float = math.inf) -> None:
        """Answer requests until `count` sessions have a reward.

        Raises:
            EngineError: the run is to stop, or nobody has asked anything for too long.
        """
        heard, warned = time.monotonic(), False
        while len(self._sessions.done) < count:
            if self._over.is_set():
                raise EngineError("no more episodes are waited for")
            if calls := self._waiting():
                self._answer(calls)
                heard, warned = time.monotonic(), False
                continue
            silent = time.monotonic() - heard
            if silent > self._patience_s:
                raise EngineError(f"{self._silence(count, silent)}; --patience sets how long a run waits")
            if not warned and silent > min(_SILENCE_S, self._patience_s / 2) and count < math.inf:
                self._parts.observe("message", {"text": f"{self._silence(count, silent)} (Ctrl-C ends the run)"})
                warned = True

    def _waiting(self) -> list[_Request]:
        """The requests that wait, after a moment for those that come together."""
        try:
            calls = [self._calls.get(timeout=_POLL_S)]
        except Empty:
            return []
        time.sleep(_LINGER_S)
        while not self._calls.empty():
            calls.append(self._calls.get())
        return calls

    def _silence(self, count: float, seconds: float) -> str:
        done, live = len(self._sessions.done), self._sessions.live
        return (
            f"no program has asked {self.url}/v1 anything for {seconds:.3g} s: {done} of the {count:g} sessions of "
            f"this step have a reward, and {live} have none yet"
        )

    def rollouts(self) -> list[Rollout]:
        """The episodes of a step: as many sessions as it has rows, once all of them have a reward."""
        count = self._parts.prompts * self._parts.config.training.group_size
        self.work(count)
        return self._sessions.take(count)

    def submit(self, path: str, session: str, body: Mapping[str, Any], awaited: Callable[[], bool]) -> _Answer:
        """Have a request answered, from another thread: HTTP status and JSON.

        What its program does not wait for any more (`awaited`) is no turn: the program will ask again.
        """
        call = _Request(path, session, body, Future(), awaited)
        self._calls.put(call)
        if self._over.is_set():
            self._refuse_all()
        return call.answer.result()

    def hurry(self) -> None:
        """Wait for no more requests. From a signal handler."""
        self._over.set()

    def close(self) -> None:
        """Take no more requests, and refuse those that wait."""
        self._over.set()
        self._refuse_all()
        self._server.shutdown()
        self._server.server_close()

    def _refuse_all(self) -> None:
        with suppress(Empty):
            while True:
                self._calls.get_nowait().answer.set_result(_refusal(503, "the run has ended"))

    def _answer(self, calls: Sequence[_Request]) -> None:
        try:
            self._answered(calls)
        except BaseException as error:
            for call in calls:
                if not call.answer.done():
                    call.answer.set_result(_refusal(500, f"the run has failed: {type(error).__name__}: {error}"))
            raise

    def _answered(self, calls: Sequence[_Request]) -> None:
        waiting: list[tuple[_Request, Asked, Request]] = []
        for call in calls:
            try:
                if call.path == "/v1/chat/completions":
                    if not _given_up(call):
                        waiting.append((call, *self._asked(call)))
                else:
                    call.answer.set_result((200, self._rewarded(call)))
            except (DataError, ValueError, TypeError) as error:
                call.answer.set_result(_refusal(400, str(error)))
            except KeyError as error:
                call.answer.set_result(_refusal(404, f"there is no session {error}"))
        if waiting:
            self._sample(waiting)

    def _sample(self, waiting: Sequence[tuple[_Request, Asked, Request]]) -> None:
        said = self._parts.sampler.sample([request for _, _, request in waiting], self._sampling)
        for (call, asked, request), [completion] in zip(waiting, said, strict=True):
            if _given_up(call):
                self._sessions.forget(asked)
                continue
            message = {"role": "assistant", "content": self._sessions.say(asked, completion)}
            sizes = {"prompt_tokens": len(request.ids), "completion_tokens": len(completion.ids)}
            shown = {
                "id": f"chatcmpl-{asked.session}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": call.body.get("model") or "policy",
                "choices": [{"index": 0, "message": message, "finish_reason": completion.finish_reason}],
                "usage": sizes | {"total_tokens": sum(sizes.values())},
                "session": asked.session,
            }
            call.answer.set_result((200, shown))

    def _asked(self, call: _Request) -> tuple[Asked, Request]:
        """A request for a turn; ValueError if it wants what there is not, or no token is left."""
        body, training = call.body, self._parts.config.training
        wanted = _tokens(body) or training.max_tokens
        asked = self._sessions.ask(call.session, plain_messages(body.get("messages") or ()), body.get("tools") or ())
        context = asked.context
        if not context:
            raise ValueError("the messages have no tokens")
        room = min(positions(self._parts.loaded.model), self._parts.sampler.room) - len(context)
        most = int(min(wanted, training.max_tokens - asked.sampled, room))
        if most < 1:
            raise ValueError(
                f"context_length_exceeded: the episode has sampled {asked.sampled} of [training] max_tokens = "
                f"{training.max_tokens}, and the model has room for {room:g} more tokens"
            )
        self._sessions.begin(asked)
        return asked, Request(context, 1, most, asked.stream)

    def _rewarded(self, call: _Request) -> dict[str, Any]:
        value = call.body.get("reward")
        if isinstance(value, bool) or not isinstance(value, int | float) or not fits_float32(value):
            raise ValueError("reward must be a finite number that fits float32")
        name = unquote(call.path.removeprefix("/v1/sessions/").removesuffix("/reward"))
        rows = self._sessions.reward(name, float(value))
        if self._episodes is not None:
            self._record(self._sessions.take(1))
        return {"session": name, "rows": rows}

    def _record(self, rollouts: Sequence[Rollout]) -> None:
        if self._episodes is not None:
            with writing(self._episodes), self._episodes.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(one.row()) + "\n" for one in rollouts)


class _Server(ThreadingHTTPServer):
    """Threads that do not keep the process; a program that has gone away is no error."""

    daemon_threads = True
    request_queue_size = 1024

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """HTTP for an endpoint, which the class made of it names."""

    endpoint: PolicyEndpoint
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are no news."""

    def do_GET(self) -> None:
        known = self.path.partition("?")[0].rstrip("/") == "/v1/models"
        models = {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "retrain"}]}
        self._send(*((200, models) if known else _refusal(404, "there is no such page")))

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        known = path == "/v1/chat/completions" or (path.startswith("/v1/sessions/") and path.endswith("/reward"))
        keep, self.close_connection = not self.close_connection, True  # what was not read is no next request
        try:
            size = int(self.headers.get("Content-Length") or 0)
            if not known or not 0 < size <= _LONGEST:
                status, why = (413, "the request has no fit length") if known else (404, "there is no such page")
                self._send(*_refusal(status, why))
                return
            body = json.loads(self.rfile.read(size))
        except (ValueError, RecursionError):
            body = None
        if isinstance(body, dict):
            self.close_connection = not keep
            self._send(*self.endpoint.submit(path, self.headers.get(SESSION, ""), body, self._awaited))
        else:
            self._send(*_refusal(400, "the request is no JSON object, or its length no number"))

    def _awaited(self) -> bool:
        """Whether the program has not closed the connection."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _send(self, status: int, answer: Mapping[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close" if self.close_connection else "keep-alive")
        self.end_headers()
        self.wfile.write(content)


def _tokens(body: Mapping[str, Any]) -> int | None:
    """How many tokens a request wants at most; ValueError if a field of it is not what it has to be."""
    for name, kind in _FIELDS.items():
        if body.get(name) is not None and type(body[name]) is not kind:
            raise ValueError(f"{name} is not {_CALLED[kind]}")
    if body.get("stream") or body.get("n") not in (1, None):
        raise ValueError("one completion is given, in one piece: leave out stream and n")
    given = [body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    if min(given, default=1) < 1:
        raise ValueError("max_tokens is below 1")
    return given[0] if given else None


def _refusal(status: int, message: str) -> _Answer:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": message, "type": kind, "code": status}}


def _given_up(call: _Request) -> bool:
    """Whether nobody waits for the answer to a request, which has one then."""
    if gone := not call.awaited():
        call.answer.set_result(_refusal(499, "nobody waits for this answer"))
    return gone


@contextmanager
def source_of_episodes(parts: Parts, host: str, port: int, patience_s: float = math.inf) -> Generator[None]:
    """Have the run train on the episodes of an endpoint while this lasts."""
    endpoint = parts.source = PolicyEndpoint(parts, host, port, None, patience_s)
    parts.observe("message", {"text": f"the policy answers at {endpoint.url}/v1"})
    try:
        yield
    finally:
        endpoint.close()
