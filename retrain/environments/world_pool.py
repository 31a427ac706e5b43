"""Live episodes in killable processes: a hang, crash or exception costs one episode, and the others are replayed."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from retrain.environments.contract import Answer
from retrain.environments.world_worker import Hello, load
from retrain.errors import ComponentError, UserCodeError
from retrain.system.worker_process import Containment, WorkerLost, WorkerProcess
from retrain.types import Metrics

_START_TIMEOUT_S = 120.0
_CHUNK = 1 << 15
"""Characters sent at once: more could fill the pipe while the worker fills it from its end."""

_logger = logging.getLogger(__name__)

Body = tuple[Any, ...]
"""What `Worlds.call` takes."""


@dataclass(frozen=True)
class Launch:
    """How the workers are started.

    Attributes:
        hello: the first call.
        containment, variables: see `WorkerProcess`.
        python: another interpreter than this one.
        workers: how many; 0 holds the episodes right here, unprotected.
    """

    hello: Hello
    containment: Containment
    variables: Sequence[str] = ()
    python: str | None = None
    workers: int = 1

    def process(self) -> WorkerProcess:
        """A new worker."""
        # What the environment imports of this package must be readable wherever the package is.
        readable = (*self.containment.readable, str(Path(__file__).parents[1]))
        containment, seconds = self.containment._replace(readable=readable), self.hello.timeout_s
        module = "retrain.environments.world_worker"
        return WorkerProcess(module, tuple(self.hello), containment, self.variables, seconds, self.python)


class _Task(NamedTuple):
    """A step to be done; `expected` is the digest of the answer that it had before, if it is replayed."""

    key: int
    body: Body
    expected: bytes | None = None


@dataclass
class _Episode:
    """A live episode: its worker, and the steps that were answered with the digests of the answers."""

    worker: int
    history: list[tuple[Body, bytes]] = field(default_factory=list[tuple[Body, bytes]])


class WorldPool:
    """Holds the live episodes of an environment, each step under a deadline in a process that may be killed.

    An episode is a problem, a seed and the replies so far. When a worker is lost, the episode that it was busy with
    has failed; the others are played again in a new one, up to where they were. One that is answered differently the
    second time is not deterministic, and has failed.

    Attributes:
        traits: `replay`: an episode can be played again. `rewards`: an episode that a limit ends has earned 0 at its
            end; otherwise [[rewards]] score it.
    Raises:
        ComponentError: the environment reads something that does not exist, or its table does not fit.
        UserCodeError: its module breaks or hangs the worker that loads it.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._live: dict[int, _Episode] = {}
        self._told: set[str] = set()
        self._spent, self._steps, self._replayed = 0.0, 0, 0
        self._local = load(launch.hello) if launch.workers == 0 else None
        self._workers = [_Worker(launch) for _ in range(launch.workers)]
        try:
            while not all(worker.ready for worker in self._workers):
                self._receive({})
        except BaseException:
            self.close()
            raise
        self.traits = self._local.traits if self._local else self._workers[0].traits

    def step(self, calls: Mapping[int, Body]) -> dict[int, Answer]:
        """Do one step of each of these episodes, by their numbers; one that fails changes none of the others."""
        began, answers = time.perf_counter(), dict[int, Answer]()
        try:
            self._do(calls, answers)
        except BaseException:
            self.close()  # answers under way must not be taken for others
            raise
        self._spent, self._steps = self._spent + time.perf_counter() - began, self._steps + len(calls)
        for answer in answers.values():
            kind = answer.detail.partition(":")[0]
            if kind not in self._told and answer.kind in ("error", "timeout"):
                self._told.add(kind)
                _logger.warning(
                    "environment %s: %s (shown once)\n%s", self._launch.hello.name, answer.detail, answer.trace
                )
        return answers

    def finish(self) -> None:
        """End all episodes."""
        self._live.clear()
        if self._local is not None:
            self._local.call(("finish",))
        for worker in self._workers:
            worker.queue.append(_Task(-1, ("finish",)))
        self._drain({})

    def close(self) -> None:
        """Kill the workers. A later `step` starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        self._live.clear()
        self._workers = []

    def metrics(self) -> Metrics:
        """Milliseconds for each step of an episode, and episodes that were replayed, since the last call."""
        found = {"env/step_ms": 1000 * self._spent / max(1, self._steps), "env/replayed": float(self._replayed)}
        self._spent, self._steps, self._replayed = 0.0, 0, 0
        return found

    def _do(self, calls: Mapping[int, Body], answers: dict[int, Answer]) -> None:
        if self._local is not None:
            answers |= {key: _answer(self._local.call(body)) for key, body in calls.items()}
            return
        self._workers += [_Worker(self._launch) for _ in range(self._launch.workers - len(self._workers))]
        for index, worker in enumerate(self._workers):
            if worker.gone():
                self._replace(index, answers)
        for key, body in calls.items():
            if body[0] == "open":
                self._live[key] = _Episode(key % len(self._workers))
            if key in self._live:  # else it failed while nothing was asked
                self._workers[self._live[key].worker].queue.append(_Task(key, body))
        self._drain(answers)

    def _drain(self, answers: dict[int, Answer]) -> None:
        while any(worker.queue or worker.pending for worker in self._workers):
            for worker in self._workers:
                worker.feed()
            self._receive(answers)

    def _receive(self, answers: dict[int, Answer]) -> None:
        """Wait for one message or deadline, and act on it."""
        soonest = min(worker.deadline for worker in self._workers)
        heard = wait([worker.process.fileno() for worker in self._workers], max(0.0, soonest - time.monotonic()))
        for index, worker in enumerate(self._workers):
            if worker.process.fileno() in heard:
                self._hear(index, answers)
            elif time.monotonic() >= worker.deadline and not worker.process.has_answered():
                self._lose(index, worker.overdue(), answers)

    def _hear(self, index: int, answers: dict[int, Answer]) -> None:
        worker = self._workers[index]
        try:
            for raw in worker.process.receive():
                if not worker.ready:
                    worker.started(raw)
                else:
                    answer = _answer(raw)
                    task = worker.answered()
                    self._take(task, answer, raw, answers)
                    if "MemoryError" in answer.detail:  # what fills its memory may be its own garbage
                        self._replace(index, answers)
                        return
        except WorkerLost as lost:
            if not worker.ready:
                raise UserCodeError(f"the environment ended the process that loaded it ({lost})") from None
            failure = Answer("error", detail=f"ended its process ({lost})")
            self._lose(index, failure, answers, worker.last if lost.answered else None)

    def _take(self, task: _Task, answer: Answer, raw: Any, answers: dict[int, Answer]) -> None:
        episode, digest = self._live.get(task.key), _digest(raw)
        if episode is None:  # it failed before this answer came
            return
        if task.expected not in (None, digest):
            answer = Answer(
                "error", detail="is not deterministic: replayed from the same seed, it answered differently"
            )
        elif task.expected is not None:
            return
        answers[task.key] = answer
        if answer.kind == "say":
            episode.history.append((task.body, digest))
        else:
            del self._live[task.key]

    def _lose(self, index: int, failure: Answer, answers: dict[int, Answer], guilty: int | None = None) -> None:
        """Blame the step that a worker was busy with, or the guilty episode, and replace the worker."""
        worker = self._workers[index]
        if guilty is None and worker.pending:
            guilty = worker.pending[0].key
        if guilty in self._live:
            answers[guilty] = failure
            del self._live[guilty]
        self._replace(index, answers)

    def _replace(self, index: int, answers: dict[int, Answer]) -> None:
        """A new worker that has its episodes where they were, and what it had still to do."""
        lost = self._workers[index]
        lost.process.kill()
        asked = {task.key: task for task in (*lost.pending, *lost.queue) if task.expected is None}
        worker = self._workers[index] = _Worker(self._launch)
        for key, episode in [(key, one) for key, one in self._live.items() if one.worker == index]:
            if episode.history and not self.traits["replay"]:
                answers[key] = Answer("error", detail="was lost with its process, and cannot be replayed")
                del self._live[key]
                continue
            self._replayed += bool(episode.history)
            worker.queue += [_Task(key, body, digest) for body, digest in episode.history]
            worker.queue += [asked[key]] if key in asked else []


class _Worker:
    """One worker and what it is doing.

    Attributes:
        ready: its environment is loaded.
        queue: steps to send; pending: steps sent and not answered, in order, the first being the one it is busy with.
        last: the episode of the last answer.
        traits: see `WorldPool`.
        deadline: when that step, or loading, has taken too long; infinite when it has nothing to do.
    """

    def __init__(self, launch: Launch) -> None:
        self.process, self._timeout_s = launch.process(), launch.hello.timeout_s
        self.ready, self.last, self.traits = False, -1, dict[str, bool]()
        self.queue: deque[_Task] = deque()
        self.pending: deque[_Task] = deque()
        self.deadline = time.monotonic() + _START_TIMEOUT_S

    def gone(self) -> bool:
        """Whether it has ended, or has something to say though nothing was asked."""
        return self.process.process.poll() is not None or (self.ready and self.process.has_answered())

    def feed(self) -> None:
        """Send it more once it has answered everything."""
        if not self.ready or self.pending:
            return
        size = 0
        while self.queue and size < _CHUNK:
            self.pending.append(self.queue.popleft())
            size += sum(len(str(part)) for part in self.pending[-1].body)
        if self.pending:
            self.deadline = time.monotonic() + self._timeout_s
            self.process.send(task.body for task in self.pending)

    def answered(self) -> _Task:
        """The step that an answer has come to."""
        task = self.pending.popleft()
        self.last = task.key
        self.deadline = time.monotonic() + self._timeout_s if self.pending else float("inf")
        return task

    def overdue(self) -> Answer:
        """The failure that passing its deadline means."""
        if not self.ready:
            raise UserCodeError(f"loading the environment took longer than {_START_TIMEOUT_S:g} s; look at its imports")
        return Answer("timeout", detail=f"took longer than {self._timeout_s:g} s for a step")

    def started(self, answer: Any) -> None:
        """Take the answer to the first call."""
        if answer[0] == "ready":
            self.ready, self.deadline, self.traits = True, float("inf"), answer[1]
            return
        how, problem, fix, trace = answer
        if how == "refused":
            raise ComponentError(problem, fix, trace)
        raise UserCodeError(f"loading the environment raised {problem}\n{trace}")


def _digest(raw: Any) -> bytes:
    return hashlib.sha256(json.dumps(raw).encode()).digest()


def _answer(raw: Any) -> Answer:
    """A worker's answer; WorkerLost if it is none. What runs in the worker may have written it."""
    try:
        kind, messages, reward, parts, metrics, detail, trace, tools = raw
        texts = [(str(role), str(text)) for role, text in messages]
        scores = None if parts is None else {str(name): float(value) for name, value in parts.items()}
        counts = {str(name): float(value) for name, value in metrics.items()}
        if kind in ("say", "end", "error"):
            return Answer(kind, texts, float(reward), scores, counts, str(detail), str(trace), list(tools))
    except (TypeError, ValueError, AttributeError):
        pass
    raise WorkerLost("it sent what is no answer")
