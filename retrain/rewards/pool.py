"""Rewards in killable processes: a hang, crash or exception costs one completion, never the run."""

from __future__ import annotations

import inspect
import json
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

from retrain.errors import ComponentError, UserCodeError
from retrain.registry import Bound
from retrain.rewards.worker import Reply, Settings, evaluate, load
from retrain.types import Score

FIELDS: tuple[str, ...] = ("completion", "answer", "prompt", "problem", "length", "max_tokens", "finish_reason")
"""What a reward may read by naming it: completion and answer are text; prompt is the rendered text; problem
is a dict with id, prompt, answer and extra; length and max_tokens are counts of tokens; finish_reason is
"stop" or "length"."""

_SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_START_TIMEOUT_S = 120.0
_CHUNK = 32

_logger = logging.getLogger(__name__)

Call = tuple[int, dict[str, Any]]
"""(number of the reward, its arguments)."""


class RewardPool:
    """Scores completions with weighted rewards, each call under a deadline in a process of its own.

    A worker has a bounded memory, an environment without variables that look secret, nowhere to print to,
    and dies with the process that made the pool. Its functions are loaded before any clock runs. What a
    worker was still to do when it is killed goes to another.

    Args:
        rewards: bound rewards with their weights in the sum; weight 0 records a part only.
        workers: processes; 0 calls the rewards right here, unprotected.
        timeout_s: wall-clock seconds for one call.
        memory_mb: address space of a worker; 0 for no limit.
        max_failed: share of a `score` call's completions above which failing is an error.
        search_paths: where dotted paths are looked up, after the current directory.

    Raises:
        ComponentError: a reward cannot be loaded, or reads something that does not exist.
        UserCodeError: a reward's module breaks or hangs the worker that loads it.
    """

    def __init__(
        self,
        rewards: Sequence[tuple[Bound, float]],
        *,
        workers: int = 1,
        timeout_s: float = 10.0,
        memory_mb: int = 2048,
        max_failed: float = 0.5,
        search_paths: Sequence[str | Path] = (),
    ) -> None:
        self._reads = [fields_read(bound) for bound, _ in rewards]
        self._weights = [weight for _, weight in rewards]
        self._judges = [bool(bound.component.traits.get("correctness", True)) for bound, _ in rewards]
        self.names = _unique([bound.name for bound, _ in rewards])
        targets = tuple(
            (name, _target(bound), bound.arguments) for name, (bound, _) in zip(self.names, rewards, strict=True)
        )
        self._settings = Settings(targets, tuple(str(path) for path in search_paths), timeout_s, memory_mb)
        self._size, self._max_failed = workers, max_failed
        self._told: set[str] = set()
        self._local = [(n, load(n, t, p, self._settings.search_paths)) for n, t, p in targets] if workers == 0 else []
        self._workers: list[_Worker] = []
        self._start()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers. A later `score` starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def score(self, items: Sequence[Mapping[str, Any]]) -> list[Score]:
        """One score per item, in order. An item maps names of FIELDS to their values.

        Raises:
            UserCodeError: more than `max_failed` of the items could not be scored.
        """
        if not items:
            return []
        calls = [(k, {n: item[n] for n in reads}) for item in items for k, reads in enumerate(self._reads)]
        replies = self._call_all(calls)
        width = len(self.names)
        scores = [self._combine(replies[i : i + width]) for i in range(0, len(replies), width)]
        self._report(items, replies, scores)
        return scores

    def _call_all(self, calls: list[Call]) -> list[Reply]:
        if self._size == 0:
            return [evaluate(*self._local[index], arguments) for index, arguments in calls]
        try:
            self._start()
            return self._dispatch(calls)
        except BaseException:
            self.close()  # replies under way must not reach the next call of `score`
            raise

    def _start(self) -> None:
        """Have all workers alive and loaded, whatever became of them since."""
        for worker in [worker for worker in self._workers if worker.process.poll() is not None]:
            worker.kill()
            self._workers.remove(worker)
        self._workers += [_Worker(self._settings) for _ in range(self._size - len(self._workers))]
        try:
            while not all(worker.ready for worker in self._workers):
                self._receive([], [], deque())
        except BaseException:
            self.close()
            raise

    def _dispatch(self, calls: list[Call]) -> list[Reply]:
        replies: list[Reply | None] = [None] * len(calls)
        queue = deque(range(len(calls)))
        while queue or any(worker.pending for worker in self._workers):
            for worker in self._workers:
                if worker.ready and not worker.pending and queue:
                    count = max(1, min(_CHUNK, len(queue) // (2 * self._size)))
                    worker.send(calls, [queue.popleft() for _ in range(count)])
            self._receive(calls, replies, queue)
        return cast("list[Reply]", replies)

    def _receive(self, calls: list[Call], replies: list[Reply | None], queue: deque[int]) -> None:
        """Wait for one message or deadline, and act on it."""
        soonest = min(worker.deadline for worker in self._workers)
        heard = wait([worker.connection for worker in self._workers], max(0.0, soonest - time.monotonic()))
        for position, worker in enumerate(self._workers):
            failure: Reply | None = None
            if worker.connection in heard:
                failure = worker.receive(replies)
            elif time.monotonic() >= worker.deadline and not worker.connection.poll():  # it may just have answered
                failure = worker.overdue()
            if failure is None:
                continue
            worker.kill()
            if worker.pending and failure.status != "retired":
                index = worker.pending.popleft()
                replies[index] = failure._replace(detail=f"{self.names[calls[index][0]]} {failure.detail}")
            queue.extendleft(reversed(worker.pending))
            self._workers[position] = _Worker(self._settings)

    def _combine(self, replies: Sequence[Reply]) -> Score:
        parts = {name: reply.value for name, reply in zip(self.names, replies, strict=True)}
        failed = next((reply for reply in replies if reply.status != "ok"), None)
        if failed is not None:
            return Score(None, parts, None, cast("Any", failed.status), failed.detail)
        opinions = [(k, reply.value) for k, reply in enumerate(replies) if reply.value is not None]
        if not opinions:
            return Score(None, parts, None, "invalid", f"every reward ({', '.join(self.names)}) returned None")
        total = sum(self._weights[k] * value for k, value in opinions)
        verdict = next((value for k, value in opinions if self._judges[k]), opinions[0][1])
        return Score(total, parts, verdict > 0.5)

    def _report(self, items: Sequence[Mapping[str, Any]], replies: Sequence[Reply], scores: Sequence[Score]) -> None:
        """Log each kind of failure once; raise when too many failed."""
        for reply in replies:
            kind = reply.detail.partition(":")[0]
            if reply.status != "ok" and kind not in self._told:
                self._told.add(kind)
                _logger.warning("%s (told once)\n%s", reply.detail, reply.trace)
        failed = [index for index, score in enumerate(scores) if score.value is None]
        if len(failed) <= self._max_failed * len(items):
            return
        first = failed[0]
        width = len(self.names)
        trace = next((r.trace for r in replies[first * width : (first + 1) * width] if r.trace), "")
        sample = {name: str(items[first].get(name))[:500] for name in ("completion", "answer")}
        raise UserCodeError(
            f"{len(failed)} of {len(items)} completions could not be scored, more than [reward_pool] max_failed = "
            f"{self._max_failed:g} allows; the first: {scores[first].detail}; mend the reward, or raise the limit\n"
            f"sample: completion {sample['completion']!r}, answer {sample['answer']!r}\n{trace}"
        )


class _Worker:
    """The parent's end of one worker process.

    Attributes:
        ready: its rewards are loaded.
        pending: calls sent and not answered, in order; the first of them is the one it is busy with.
        deadline: when that call, or loading, has taken too long; infinite when it has nothing to do.
    """

    def __init__(self, settings: Settings) -> None:
        self.connection, theirs = Pipe()
        environment = {name: value for name, value in os.environ.items() if not _SECRET.search(name)}
        # One thread each; a stable hash; and the parent's own sys.path, however it came by it.
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self.process = (
            _starter(os.getpid())
            .submit(
                subprocess.Popen,
                [sys.executable, "-P", "-m", "retrain.rewards.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            .result()
        )
        theirs.close()
        self._timeout_s = settings.timeout_s
        self.ready = False
        self.pending: deque[int] = deque()
        self.deadline = time.monotonic() + _START_TIMEOUT_S
        with suppress(OSError):  # it died already: `receive` meets the end of the pipe
            self.connection.send_bytes(pickle.dumps(tuple(settings)))

    def send(self, calls: list[Call], indices: list[int]) -> None:
        """Give it these calls to do; the clock of the first runs from now."""
        self.pending.extend(indices)
        self.deadline = time.monotonic() + self._timeout_s
        with suppress(OSError):
            self.connection.send_bytes(pickle.dumps([calls[index] for index in indices]))

    def receive(self, replies: list[Reply | None]) -> Reply | None:
        """Take its messages; a failure to pass on if it is gone or must go."""
        try:
            while True:
                message = json.loads(self.connection.recv_bytes(1 << 20))
                if not self.ready:
                    self._started(message)
                else:
                    replies[self.pending.popleft()] = Reply(*message)
                    if message[0] == "error" and "MemoryError" in message[2]:
                        return Reply("retired")  # what fills its memory may be its own garbage
                self.deadline = time.monotonic() + self._timeout_s if self.pending else float("inf")
                if not self.connection.poll():
                    return None
        except (EOFError, OSError, ValueError):
            if not self.ready:
                raise UserCodeError(f"a reward ended the process that loaded it ({self._exit()})") from None
            return Reply("crashed", None, f"ended its process ({self._exit()})")

    def overdue(self) -> Reply:
        """The failure that passing its deadline means."""
        if not self.ready:
            raise UserCodeError(f"loading the rewards took longer than {_START_TIMEOUT_S:g} s; look at their imports")
        return Reply("timeout", None, f"took longer than {self._timeout_s:g} s")

    def kill(self) -> None:
        """End it and whatever it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()

    def _started(self, message: list[str]) -> None:
        if message[0] == "ready":
            self.ready = True
            return
        how, kind, problem, fix, trace = message
        if how == "refused":
            raise ComponentError(problem, fix, trace)
        raise UserCodeError(f"loading a reward raised {kind}: {problem}\n{trace}")

    def _exit(self) -> str:
        """How the process ended, in words."""
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


@cache
def _starter(pid: int) -> ThreadPoolExecutor:
    """The thread of this process that starts workers. The system ends a worker with the thread that started it,
    and those that ask for scores may come and go."""
    return ThreadPoolExecutor(1, f"reward workers of {pid}")


def fields_read(bound: Bound) -> tuple[str, ...]:
    """The FIELDS that a reward names; ComponentError if it wants something else."""
    target: Any = bound.component.target
    parameters = inspect.signature(target.__call__ if bound.component.stateful else target).parameters
    names = [name for name in bound.reads if name in FIELDS]
    unknown = [n for n in bound.reads if n not in FIELDS and parameters[n].default is inspect.Parameter.empty]
    if unknown:
        raise ComponentError(
            f'reward "{bound.name}" reads {", ".join(unknown)}, which no completion has',
            f"name its parameters among: {', '.join(FIELDS)}",
        )
    if any(parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY for name in names):
        raise ComponentError(f'reward "{bound.name}" takes positional-only parameters', "drop the / of its signature")
    return tuple(names)


def _target(bound: Bound) -> str:
    """The path by which a worker finds it."""
    if bound.component.source == "dotted path":
        return bound.name
    path = f"{bound.component.target.__module__}:{bound.component.target.__qualname__}"
    if "<" in path:
        raise ComponentError(f'reward "{bound.name}" is defined inside a function', "move it to the module's top level")
    return path


def _unique(names: list[str]) -> list[str]:
    """The names, a repeated one numbered: exact, exact_2."""
    return [n if names[:i].count(n) == 0 else f"{n}_{names[:i].count(n) + 1}" for i, n in enumerate(names)]
