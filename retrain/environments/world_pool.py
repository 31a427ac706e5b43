"""Live episodes in killable processes: a hang, crash or exception costs one episode, and the others are replayed."""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from retrain.environments.contract import Answer
from retrain.environments.world_worker import Hello, Worlds, shown
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
        threads: steps of different episodes that a worker does at the same time.
    """

    hellos: Mapping[str, Hello]
    containment: Containment
    variables: Sequence[str] = ()
    python: str | None = None
    apart: bool = True
    threads: int = 1


class _Task(NamedTuple):
    """A step to be done; `expected` is the digest of the answer that it had before, if it is replayed."""

    key: int
    body: Body
    expected: bytes | None = None


class WorldPool:
    """Holds live episodes, each step under a deadline in a process that may be killed.

    An episode is a problem, a seed and the replies so far. When the process is lost, the episode that it was busy
    with has failed; the others are played again in a new one, up to where they were. One that is answered differently
    the second time is not deterministic, and has failed. If the process was busy with several, these are played again
    first, one at a time, so that it shows which of them is at fault.

    Attributes:
        threads: see `Launch`.
        traits: of the environments by label. `replay`: an episode can be played again. `rewards`: an episode that a
            limit ends has earned 0 at its end; otherwise [[rewards]] score it.
    Raises:
        ComponentError: the environment reads something that does not exist, or its table does not fit.
        UserCodeError: its module breaks or hangs the worker that loads it.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch, self.threads = launch, launch.threads
        self._answers: dict[int, Answer] = {}  # which nobody has taken yet
        self._live: dict[int, list[_Task]] = {}  # the steps that were answered, with the answers' digests
        self._spent, self._began, self._steps, self._replayed = 0.0, 0.0, 0, 0
        self._local = None if launch.apart else Worlds(launch.hellos)
        self._worker: _Worker | None = None
        known = self._local or self._ready()
        self.traits: Mapping[str, Mapping[str, bool]] = known.traits
        self._reads: Mapping[str, Sequence[str]] = known.reads

    def step(self, calls: Mapping[int, Body]) -> dict[int, Answer]:
        """Do one step of each of these episodes, by their numbers; one that fails changes none of the others."""
        self.give(calls)
        answers = self.look()
        while self.busy:
            wait([self.fileno()], max(0.0, self.deadline - time.monotonic()))
            answers |= self.look()
        return answers

    def give(self, calls: Mapping[int, Body]) -> None:
        """Begin a step of each of these episodes; `look` has the answers."""
        self._began, self._steps = self._began or time.perf_counter(), self._steps + len(calls)
        calls = {key: self._shown(body) if body[0] == "open" else body for key, body in calls.items()}
        with self._whole():
            if self._local is not None:
                self._answers |= {key: _answer(self._local.call(body)) for key, body in calls.items()}
                return
            worker = self._ready()
            for key, body in calls.items():
                if body[0] == "open":
                    self._live[key] = []
                if key in self._live:  # else it has failed while nothing was asked
                    worker.queue.append(_Task(key, body))
            worker.feed()

    def look(self) -> dict[int, Answer]:
        """The answers that have come since the last call, by episode, without waiting for any.

        A step whose deadline has passed has failed.
        """
        with self._whole():
            while self._worker is not None and self._act(self._worker):
                pass
        if self._began and not self.busy:
            self._spent, self._began = self._spent + time.perf_counter() - self._began, 0.0
        answers, self._answers = self._answers, {}
        return answers

    def _shown(self, opening: Body) -> Body:
        """An opening with what the environment reads of the problem, and nothing else."""
        kind, key, problem, seed = opening
        return kind, key, shown(problem, self._reads[problem.get("environment", "")]), seed

    @property
    def busy(self) -> bool:
        """Whether answers are to come."""
        return self._worker is not None and bool(self._worker.queue or self._worker.pending)

    @property
    def deadline(self) -> float:
        """When to `look`, if not before."""
        return self._worker.deadline if self._worker is not None else float("inf")

    def fileno(self) -> int:
        """For `multiprocessing.connection.wait` while it is busy: ready when there is something to `look` at."""
        assert self._worker is not None
        return self._worker.fileno()

    def finish(self) -> None:
        """End all episodes."""
        self._live.clear()
        if self._local is not None:
            self._local.call(("finish",))
        if self._worker is not None:
            self._worker.queue.append(_Task(-1, ("finish",)))
            self.step({})

    def close(self) -> None:
        """Kill the worker. A later `step` starts a new one."""
        if self._worker is not None:
            self._worker.kill()
        self._live.clear()
        self._answers.clear()
        self._worker = None

    def metrics(self) -> tuple[float, int, int]:
        """Seconds, steps, and episodes that were replayed, since the last call."""
        found = self._spent, self._steps, self._replayed
        self._spent, self._steps, self._replayed = 0.0, 0, 0
        return found

    @contextmanager
    def _whole(self) -> Generator[None]:
        """What breaks off in this block ends the worker: answers under way must not be taken for others."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _ready(self) -> _Worker:
        """A worker that has loaded the environment; one that has ended meanwhile is replaced."""
        if self._worker is not None and not self.busy and self._worker.gone():
            self._replace(self._worker)
        self._worker = self._worker or _Worker(self._launch)
        with self._whole():
            while not self._worker.ready:
                wait([self.fileno()], max(0.0, self.deadline - time.monotonic()))
                self._act(self._worker)
        return self._worker

    def _act(self, worker: _Worker) -> bool:
        """Take what it has said, or lose it after its deadline; whether there was anything."""
        worker.feed()
        if worker.has_answered():
            self._hear(worker)
        elif time.monotonic() >= worker.deadline:
            detail = f"{worker.overdue()} for a step"
            self._lose(worker, Answer("timeout", detail=detail), [task.key for task in worker.late()])
        else:
            return False
        return True

    def _hear(self, worker: _Worker) -> None:
        try:
            for raw in worker.receive():
                if not worker.ready:
                    worker.started(raw)
                    continue
                answer, several = _answer(raw), worker.running()
                full = "MemoryError" in answer.detail  # what fills its memory may be another's, or its own garbage
                if full and len(several) > 1:
                    return self._replace(worker, several)
                self._take(worker.answered(), answer, raw)
                if full:
                    return self._replace(worker)
        except WorkerLost as lost:
            failure, several = Answer("error", detail=worker.ended(lost)), worker.running()
            if lost.answered:  # the line came from an earlier step, not from one under way
                several = [worker.last, *several] if self.threads > 1 and several else [worker.last]
            self._lose(worker, failure, several)

    def _take(self, task: _Task, answer: Answer, raw: Any) -> None:
        history, digest = self._live.get(task.key), _digest(raw)
        if history is None:  # it failed before this answer came
            return
        if task.expected not in (None, digest):
            detail = "is not deterministic: replayed from the same seed, it answered differently"
            answer = Answer("error", detail=detail)
        elif task.expected is not None:
            return
        self._answers[task.key] = answer
        if answer.kind == "say":
            history.append(task._replace(expected=digest))
        else:
            del self._live[task.key]

    def _lose(self, worker: _Worker, failure: Answer, suspects: Sequence[int]) -> None:
        """Replace the worker. Of its steps that came too late all have failed, of others one, if it is known."""
        if failure.kind == "timeout" or len(suspects) == 1:
            for guilty in self._live.keys() & suspects:
                self._answers[guilty] = failure
                del self._live[guilty]
            suspects = ()
        self._replace(worker, suspects)

    def _replace(self, lost: _Worker, suspects: Sequence[int] = ()) -> None:
        """A new worker that has the episodes where they were, and what was still to do; suspects come first, alone."""
        lost.kill()
        asked = {task.key: task for task in (*lost.pending, *lost.queue) if task.expected is None}
        self._worker = worker = _Worker(self._launch)
        worker.suspects = set(suspects)
        for key in sorted(self._live, key=lambda key: key not in worker.suspects):
            history = self._live[key]
            if history and not self.traits[history[0].body[2].get("environment", "")]["replay"]:
                self._answers[key] = Answer("error", detail="was lost with its process, and cannot be replayed")
                del self._live[key]
                continue
            self._replayed += bool(history)
            worker.queue += [*history, *([asked[key]] if key in asked else [])]


class _Worker(TimedWorker):
    """One worker; its calls are named by their tasks.

    Attributes:
        queue: steps to send.
        suspects: episodes whose steps are done alone.
        last: the episode of the last answer.
        traits, reads: see `Worlds`.
    """

    def __init__(self, launch: Launch) -> None:
        # What the environment imports of this package must be readable wherever the package is.
        readable = (*launch.containment.readable, str(Path(__file__).parents[1]))
        containment = launch.containment._replace(readable=readable)
        hellos = {label: tuple(hello) for label, hello in launch.hellos.items()}
        module, seconds = "retrain.environments.world_worker", next(iter(launch.hellos.values())).timeout_s
        self.at_once = launch.threads
        super().__init__("the environment", module, hellos, containment, launch.variables, seconds, launch.python)
        self.last, self.traits, self.reads = -1, dict[str, dict[str, bool]](), dict[str, list[str]]()
        self.queue: deque[_Task] = deque()
        self.suspects: set[int] = set()

    def running(self) -> list[int]:
        """The episodes that it may be busy with."""
        return [task.key for task in islice(self.pending, self.at_once)]

    def feed(self) -> None:
        """Send it more: once it has answered everything, or, if it has threads, for each that has nothing to do.

        An episode's steps are done one after another.
        """
        if not self.ready:
            return
        if self.at_once > 1:
            return self._feed_threads()
        if self.pending:
            return
        tasks, size = list[_Task](), 0
        while self.queue and size < _CHUNK:
            tasks.append(self.queue.popleft())
            size += sum(len(str(part)) for part in tasks[-1].body)
        if tasks:
            self.give([(task, task.body) for task in tasks])

    def _feed_threads(self) -> None:
        self.suspects &= {task.key for task in (*self.queue, *self.pending)}
        busy, most = {task.key for task in self.pending}, 1 if self.suspects else self.at_once
        for task in [*self.queue] if len(busy) < most else ():
            if task.key not in busy and len(busy) < most:
                self.queue.remove(task)
                self.give([(task, task.body)])
            busy.add(task.key)

    def answered(self) -> _Task:
        """The step that an answer has come to."""
        task: _Task = super().answered()
        self.last = task.key
        return task

    def started(self, answer: Any, hint: str = "") -> None:
        """Take the answer to the first call."""
        super().started(answer, hint)
        self.traits, self.reads = answer[1:]


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
