"""Live episodes in killable processes: a hang, crash or exception costs one episode, and the others are replayed."""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from retrain.environments.contract import Answer
from retrain.environments.world_worker import Hello, Worlds
from retrain.system.worker_process import Containment, TimedWorker, WorkerLost

_CHUNK = 1 << 15
"""Characters sent at once: more could fill the pipe while the worker fills it from its end."""

Body = tuple[Any, ...]
"""What `Worlds.call` takes."""


@dataclass(frozen=True)
class Launch:
    """How the workers are started.

    Attributes:
        hellos: the environments, by the labels of `[[environments]]`; a single one has the label "".
        containment, variables: see `WorkerProcess`.
        python: another interpreter than this one.
        apart: in a process of their own; otherwise the episodes are held right here, unprotected.
    """

    hellos: Mapping[str, Hello]
    containment: Containment
    variables: Sequence[str] = ()
    python: str | None = None
    apart: bool = True


class _Task(NamedTuple):
    """A step to be done; `expected` is the digest of the answer that it had before, if it is replayed."""

    key: int
    body: Body
    expected: bytes | None = None


class WorldPool:
    """Holds live episodes, each step under a deadline in a process that may be killed.

    An episode is a problem, a seed and the replies so far. When the process is lost, the episode that it was busy
    with has failed; the others are played again in a new one, up to where they were. One that is answered differently
    the second time is not deterministic, and has failed.

    Attributes:
        traits: of the environments by label. `replay`: an episode can be played again. `rewards`: an episode that a
            limit ends has earned 0 at its end; otherwise [[rewards]] score it.
    Raises:
        ComponentError: the environment reads something that does not exist, or its table does not fit.
        UserCodeError: its module breaks or hangs the worker that loads it.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._live: dict[int, list[_Task]] = {}  # the steps that were answered, with the answers' digests
        self._spent, self._steps, self._replayed = 0.0, 0, 0
        self._local = None if launch.apart else Worlds(launch.hellos)
        self._worker: _Worker | None = None
        self.traits: Mapping[str, Mapping[str, bool]] = self._local.traits if self._local else self._ready({}).traits

    def step(self, calls: Mapping[int, Body]) -> dict[int, Answer]:
        """Do one step of each of these episodes, by their numbers; one that fails changes none of the others."""
        began, answers = time.perf_counter(), dict[int, Answer]()
        try:
            self._do(calls, answers)
        except BaseException:
            self.close()  # answers under way must not be taken for others
            raise
        self._spent, self._steps = self._spent + time.perf_counter() - began, self._steps + len(calls)
        return answers

    def finish(self) -> None:
        """End all episodes."""
        self._live.clear()
        if self._local is not None:
            self._local.call(("finish",))
        if self._worker is not None:
            self._worker.queue.append(_Task(-1, ("finish",)))
            self._drain(self._worker, {})

    def close(self) -> None:
        """Kill the worker. A later `step` starts a new one."""
        if self._worker is not None:
            self._worker.kill()
        self._live.clear()
        self._worker = None

    def metrics(self) -> tuple[float, int, int]:
        """Seconds, steps, and episodes that were replayed, since the last call."""
        found = self._spent, self._steps, self._replayed
        self._spent, self._steps, self._replayed = 0.0, 0, 0
        return found

    def _ready(self, answers: dict[int, Answer]) -> _Worker:
        """A worker that has loaded the environment; one that has ended meanwhile is replaced."""
        if self._worker is not None and self._worker.gone():
            self._replace(self._worker, answers)
        self._worker = worker = self._worker or _Worker(self._launch)
        try:
            while not worker.ready:
                self._receive(worker, answers)
        except BaseException:
            self.close()
            raise
        return worker

    def _do(self, calls: Mapping[int, Body], answers: dict[int, Answer]) -> None:
        if self._local is not None:
            answers |= {key: _answer(self._local.call(body)) for key, body in calls.items()}
            return
        worker = self._ready(answers)
        for key, body in calls.items():
            if body[0] == "open":
                self._live[key] = []
            if key in self._live:  # else it has failed while nothing was asked
                worker.queue.append(_Task(key, body))
        self._drain(worker, answers)

    def _drain(self, worker: _Worker, answers: dict[int, Answer]) -> None:
        """Have everything done that is in its queue, or in that of the worker that takes its place."""
        while worker.queue or worker.pending:
            worker.feed()
            self._receive(worker, answers)
            worker = self._worker or worker

    def _receive(self, worker: _Worker, answers: dict[int, Answer]) -> None:
        """Wait for a message or the deadline, and act on it."""
        if wait([worker.fileno()], max(0.0, worker.deadline - time.monotonic())) or worker.has_answered():
            self._hear(worker, answers)
        else:
            self._lose(worker, Answer("timeout", detail=f"{worker.overdue()} for a step"), answers)

    def _hear(self, worker: _Worker, answers: dict[int, Answer]) -> None:
        try:
            for raw in worker.receive():
                if not worker.ready:
                    worker.started(raw)
                    continue
                answer = _answer(raw)
                self._take(worker.answered(), answer, raw, answers)
                if "MemoryError" in answer.detail:  # what fills its memory may be its own garbage
                    return self._replace(worker, answers)
        except WorkerLost as lost:
            failure = Answer("error", detail=worker.ended(lost))
            self._lose(worker, failure, answers, worker.last if lost.answered else None)

    def _take(self, task: _Task, answer: Answer, raw: Any, answers: dict[int, Answer]) -> None:
        history, digest = self._live.get(task.key), _digest(raw)
        if history is None:  # it failed before this answer came
            return
        if task.expected not in (None, digest):
            detail = "is not deterministic: replayed from the same seed, it answered differently"
            answer = Answer("error", detail=detail)
        elif task.expected is not None:
            return
        answers[task.key] = answer
        if answer.kind == "say":
            history.append(task._replace(expected=digest))
        else:
            del self._live[task.key]

    def _lose(self, worker: _Worker, failure: Answer, answers: dict[int, Answer], guilty: int | None = None) -> None:
        """Blame the step that a worker was busy with, or the guilty episode, and replace the worker."""
        if guilty is None and worker.pending:
            guilty = worker.pending[0].key
        if guilty in self._live:
            answers[guilty] = failure
            del self._live[guilty]
        self._replace(worker, answers)

    def _replace(self, lost: _Worker, answers: dict[int, Answer]) -> None:
        """A new worker that has the episodes where they were, and what was still to do."""
        lost.kill()
        asked = {task.key: task for task in (*lost.pending, *lost.queue) if task.expected is None}
        self._worker = worker = _Worker(self._launch)
        for key, history in list(self._live.items()):
            if history and not self.traits[history[0].body[2].get("environment", "")]["replay"]:
                answers[key] = Answer("error", detail="was lost with its process, and cannot be replayed")
                del self._live[key]
                continue
            self._replayed += bool(history)
            worker.queue += [*history, *([asked[key]] if key in asked else [])]


class _Worker(TimedWorker):
    """One worker; its calls are named by their tasks.

    Attributes:
        queue: steps to send.
        last: the episode of the last answer.
        traits: see `WorldPool`.
    """

    def __init__(self, launch: Launch) -> None:
        # What the environment imports of this package must be readable wherever the package is.
        readable = (*launch.containment.readable, str(Path(__file__).parents[1]))
        containment = launch.containment._replace(readable=readable)
        hellos = {label: tuple(hello) for label, hello in launch.hellos.items()}
        module, seconds = "retrain.environments.world_worker", next(iter(launch.hellos.values())).timeout_s
        super().__init__("the environment", module, hellos, containment, launch.variables, seconds, launch.python)
        self.last, self.traits = -1, dict[str, dict[str, bool]]()
        self.queue: deque[_Task] = deque()

    def feed(self) -> None:
        """Send it more once it has answered everything."""
        if not self.ready or self.pending:
            return
        tasks, size = list[_Task](), 0
        while self.queue and size < _CHUNK:
            tasks.append(self.queue.popleft())
            size += sum(len(str(part)) for part in tasks[-1].body)
        if tasks:
            self.give([(task, task.body) for task in tasks])

    def answered(self) -> _Task:
        """The step that an answer has come to."""
        task: _Task = super().answered()
        self.last = task.key
        return task

    def started(self, answer: Any, hint: str = "") -> None:
        """Take the answer to the first call."""
        super().started(answer, hint)
        self.traits = answer[1]


def _digest(raw: Any) -> bytes:
    return hashlib.sha256(json.dumps(raw).encode()).digest()


def _answer(raw: Any) -> Answer:
    """A worker's answer; WorkerLost if it is none. What runs in the worker may have written it."""
    try:
        kind, messages, reward, parts, metrics, detail, trace, tools, tools_text = raw
        texts = [(str(role), str(text)) for role, text in messages]
        scores = None if parts is None else {str(name): float(value) for name, value in parts.items()}
        counts = {str(name): float(value) for name, value in metrics.items()}
        if kind in ("say", "end", "error"):
            told = str(detail), str(trace), list(tools), str(tools_text)
            return Answer(kind, texts, float(reward), scores, counts, *told)
    except (TypeError, ValueError, AttributeError):
        pass
    raise WorkerLost("it sent what is no answer")
