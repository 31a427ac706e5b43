"""Rewards in killable processes: a hang, crash or exception costs one completion, never the run."""

from __future__ import annotations

import inspect
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal, cast

from retrain.errors import ComponentError, UserCodeError
from retrain.registry import Bound
from retrain.rewards.worker import Reply, Settings, evaluate, invalid, load
from retrain.system.sandbox import missing
from retrain.system.worker_process import Containment, TimedWorker, WorkerLost
from retrain.types import Score

FIELDS: tuple[str, ...] = ("completion", "answer", "prompt", "problem", "length", "max_tokens", "finish_reason")
"""What a reward may read by naming it: completion and answer are text; prompt is the rendered text; problem
is a dict with id, prompt, answer and extra; length and max_tokens are counts of tokens; finish_reason is
"stop" or "length"."""

_LOOSEN = "rewards run without network and home directory: [reward_pool] sandbox and readable change that"
_CHUNK = 32
_LONGEST = 4000
"""Characters of a worker's message."""

_logger = logging.getLogger(__name__)

Call = tuple[int, dict[str, Any]]
"""(number of the reward, its arguments)."""


class RewardPool:
    """Scores completions with weighted rewards, each call under a deadline in another process.

    A worker runs in a sandbox (`retrain.system.sandbox`), with bounded memory, few environment variables and
    nowhere to print to, and ends with the process that made the pool. Its functions are loaded before any clock
    runs. What a worker had still to do when it is killed goes to another.

    Args:
        rewards: bound rewards with their weights in the sum; weight 0 records a part only.
        workers: processes; 0 calls the rewards right here, unprotected.
        timeout_s: wall-clock seconds for one call.
        memory_mb: what a worker may allocate; 0 for no limit.
        max_failed: share of a `score` call's completions above which failing is an error.
        sandbox: "auto" takes the sandbox where this machine has one; "require" refuses where it has none.
        env: names of environment variables that the workers see as well, besides those that a parameter of a
            reward named `*_env` names.
        readable: paths that they can read in spite of the sandbox.
        search_paths: where dotted paths are looked up, after the current directory.

    Raises:
        ComponentError: a reward cannot be loaded, or reads something that does not exist; no sandbox.
        UserCodeError: a reward's module breaks or hangs the worker that loads it.
    """

    def __init__(  # noqa: PLR0913 - its keyword-only parameters are its table
        self,
        rewards: Sequence[tuple[Bound, float]],
        *,
        workers: int = 1,
        timeout_s: float = 10.0,
        memory_mb: int = 2048,
        max_failed: float = 0.5,
        sandbox: Literal["auto", "require", "off"] = "auto",
        env: Sequence[str] = (),
        readable: Sequence[str] = (),
        search_paths: Sequence[str | Path] = (),
    ) -> None:
        self._reads = [fields_read(bound) for bound, _ in rewards]
        self._weights = [weight for _, weight in rewards]
        self._judges = [bool(bound.component.traits.get("correctness", True)) for bound, _ in rewards]
        self.names = _unique([bound.name for bound, _ in rewards])
        targets = tuple(
            (name, _target(bound), bound.arguments) for name, (bound, _) in zip(self.names, rewards, strict=True)
        )
        self._settings = Settings(targets, tuple(str(path) for path in search_paths), timeout_s)
        shown = [*readable, *self._settings.search_paths, *_homes(rewards)]
        sandboxed = workers > 0 and _sandboxed(sandbox)
        self._containment = Containment(memory_mb, sandboxed, tuple(str(Path(path).expanduser()) for path in shown))
        self._env = [
            *env,
            *(str(bound.params[key]) for bound, _ in rewards for key in bound.params if key.endswith("_env")),
        ]
        self._size, self._max_failed = workers, max_failed
        self._told: set[str] = set()
        self._local = [(n, load(n, t, p, self._settings.search_paths)) for n, t, p in targets] if workers == 0 else []
        self._workers: list[_Worker] = []
        self._call_all([])  # what cannot be loaded is refused now, not at the first step

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
        """The replies of workers, which are all alive and have loaded the rewards before the first call."""
        if self._size == 0:
            return [evaluate(*self._local[index], arguments) for index, arguments in calls]
        try:
            for worker in [worker for worker in self._workers if worker.gone()]:
                worker.kill()
                self._workers.remove(worker)
            self._workers += [self._worker() for _ in range(self._size - len(self._workers))]
            while not all(worker.ready for worker in self._workers):
                self._receive([], [], deque())
            return self._dispatch(calls)
        except BaseException:
            self.close()  # replies under way must not reach the next call of `score`
            raise

    def _worker(self) -> _Worker:
        return _Worker(self._settings, self._containment, self._env)

    def _dispatch(self, calls: list[Call]) -> list[Reply]:
        replies: list[Reply | None] = [None] * len(calls)
        queue = deque(range(len(calls)))
        while queue or any(worker.pending for worker in self._workers):
            for worker in self._workers:
                if worker.ready and not worker.pending and queue:
                    count = max(1, min(_CHUNK, len(queue) // (2 * self._size)))
                    worker.give([(index, calls[index]) for index in (queue.popleft() for _ in range(count))])
            self._receive(calls, replies, queue)
        return cast("list[Reply]", replies)

    def _receive(self, calls: list[Call], replies: list[Reply | None], queue: deque[int]) -> None:
        """Wait for one message or deadline, and act on it."""
        soonest = min(worker.deadline for worker in self._workers)
        heard = wait([worker.fileno() for worker in self._workers], max(0.0, soonest - time.monotonic()))
        for position, worker in enumerate(self._workers):
            failure: Reply | None = None
            if worker.fileno() in heard:
                failure = worker.take(calls, replies, self.names)
            elif time.monotonic() >= worker.deadline and not worker.has_answered():  # it may just have done so
                failure = Reply("timeout", None, worker.overdue())
            if failure is None:
                continue
            worker.kill()
            if worker.pending and failure.status != "retired":
                index = worker.pending.popleft()
                replies[index] = failure._replace(detail=f"{self.names[calls[index][0]]} {failure.detail}")
            queue.extendleft(reversed(worker.pending))
            self._workers[position] = self._worker()

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
        hint = f" ({_LOOSEN})" if self._containment.sandboxed else ""
        sample = {name: str(items[first].get(name))[:500] for name in ("completion", "answer")}
        raise UserCodeError(
            f"{len(failed)} of {len(items)} completions could not be scored, more than [reward_pool] max_failed = "
            f"{self._max_failed:g} allows; the first: {scores[first].detail}; mend the reward, or raise the limit"
            f"{hint}\n"
            f"sample: completion {sample['completion']!r}, answer {sample['answer']!r}\n{trace}"
        )


class _Worker(TimedWorker):
    """One worker; its calls are named by their index."""

    def __init__(self, settings: Settings, containment: Containment, variables: Sequence[str]) -> None:
        seconds = settings.timeout_s
        super().__init__("a reward", "retrain.rewards.worker", tuple(settings), containment, variables, seconds)
        self._hint = f" ({_LOOSEN})" if containment.sandboxed else ""

    def take(self, calls: list[Call], replies: list[Reply | None], names: Sequence[str]) -> Reply | None:
        """Take its answers; a failure to pass on if it is gone or must go."""
        try:
            for answer in self.receive():
                if not self.ready:
                    self.started(answer, self._hint)
                    continue
                index: int = self.pending[0]
                reply = _reply(answer, names[calls[index][0]])
                replies[self.answered()] = reply
                if reply.status == "error" and "MemoryError" in reply.detail:
                    return Reply("retired")  # what fills its memory may be its own garbage
        except WorkerLost as lost:
            # A second answer is the fault of a call that has been answered, not of the one that it is busy with.
            return Reply("retired" if lost.answered else "crashed", None, self.ended(lost))
        return None


def _reply(answer: Any, name: str) -> Reply:
    """A worker's answer as a reply; WorkerLost if it is not one. What runs in the worker may have written it."""
    match answer:
        case ["ok", None | float() as value, "", ""]:
            return Reply("ok", value) if value is None or math.isfinite(value) else invalid(name, value)
        case [("error" | "invalid") as status, None, str(detail), str(trace)]:
            return Reply(status, None, detail[:_LONGEST], trace[-_LONGEST:])
        case _:
            raise WorkerLost("it sent what is no reply")


def _sandboxed(wanted: Literal["auto", "require", "off"]) -> bool:
    """Whether workers run in a sandbox; ComponentError if they must and cannot."""
    if wanted == "off" or not (reason := missing()):
        return wanted != "off"
    if wanted == "require":
        raise ComponentError(f"there is no sandbox for rewards on this machine: {reason}", 'use sandbox = "auto"')
    _warn_unprotected(reason)
    return False


@cache
def _warn_unprotected(reason: str) -> None:
    _logger.warning("rewards run without a sandbox, which this machine does not have: %s", reason)


def _homes(rewards: Sequence[tuple[Bound, float]]) -> list[str]:
    """The folders of the rewards' modules, which need not be on the search path."""
    modules = [sys.modules.get(bound.component.target.__module__.partition(".")[0]) for bound, _ in rewards]
    return [str(Path(file).parent) for module in modules if (file := getattr(module, "__file__", None))]


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
    if not names and any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        raise ComponentError(
            f'reward "{bound.name}" takes only **keywords, and would be called with nothing',
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
