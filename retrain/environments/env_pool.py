"""Pool of worker processes that run the episodes of environments.

A hang, a crash or an exception costs one episode; the worker's other episodes are replayed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Any, Protocol

from retrain.environments.contract import Answer, Limits
from retrain.environments.env_process import Hello, LiveEpisodes, readable_fields
from retrain.errors import UserCodeError
from retrain.system import event_loop
from retrain.system.worker_pool import CallLost, WorkerConnection, WorkerPool
from retrain.system.worker_process import WorkerSpec
from retrain.types import Metrics

_logger = logging.getLogger(__name__)

_Body = tuple[Any, ...]
"""The argument of `LiveEpisodes.call`."""


@dataclass(frozen=True)
class Launch:
    """Settings of the workers.

    Attributes:
        hellos: environments by the labels of `[[environments]]`; a single one has the label "".
        memory_mb, variables: see `WorkerSpec`.
        python: path of the workers' interpreter; None for the interpreter of this process.
        in_processes: run episodes in worker processes; if False, in this process without protection.
        threads: number of episodes that a worker steps concurrently.
        log: file for what the workers print.
    """

    hellos: Mapping[str, Hello]
    memory_mb: int
    variables: Sequence[str] = ()
    python: str | None = None
    in_processes: bool = True
    threads: int = 1
    log: str = ""

    def spec(self) -> WorkerSpec:
        """Return the workers' specification."""
        return WorkerSpec(
            what="the environment",
            module="retrain.environments.env_process",
            hello={label: tuple(hello) for label, hello in self.hellos.items()},
            memory_mb=self.memory_mb,
            seconds=next(iter(self.hellos.values())).timeout_s,
            variables=self.variables,
            python=self.python,
            at_once=self.threads,
            log=self.log,
        )


class Env(Protocol):
    """The environment of one episode. At most one call may be running at a time."""

    _key: int
    _reads: Sequence[str]

    async def reset(self, problem: Mapping[str, Any], seed: int) -> Answer:
        """Start the episode and return the first observation.

        Args:
            problem: fields of the problem by name.
            seed: random seed, the same for all episodes of the group.
        """
        return await self._step(("open", self._key, readable_fields(problem, self._reads), seed))

    async def step(self, action: str, finish_reason: str, turn: int, tokens_left: int) -> Answer:
        """Return the result of the model's action; for the arguments see `Action`."""
        return await self._step(("reply", self._key, action, finish_reason, turn, tokens_left))

    async def close(self) -> None:
        """End the episode, unless the environment has already ended it."""
        ...

    async def _step(self, body: _Body) -> Answer:
        """Make a call and return its answer."""
        ...


class EnvPool:
    """The environments of a run, in worker processes with a timeout for each step.

    A problem, a seed and the actions so far determine an episode. When a worker is lost, the episode
    that caused it fails. The worker's other episodes are replayed in a new worker up to their last
    step. An episode whose replay gives different observations is not deterministic and fails.

    Args:
        launch: settings of the workers.
        size: number of workers.
        context: longest context of the model, in tokens.
        max_failed: largest share of failed episodes that `check` accepts.

    Attributes:
        limits: limits of each episode.
        lanes: number of independent sets of groups: a set does not wait for the environments of another.
            Group g belongs to set g % lanes.
        in_step: True if a lane samples only when all of its episodes wait for the model.
        traits: traits of the environments, by label. `replay`: episodes can be replayed. `rewards`: the
            environment gives rewards itself, so an episode that a limit ends gets 0; without this
            trait, [[rewards]] score it.
        reads: fields of a problem that the environment reads, by label.
        workers: the worker processes.
        steps, replayed: numbers of steps and of replayed episodes since the last call of `metrics`.
    """

    def __init__(self, launch: Launch, size: int = 1, *, context: float = inf, max_failed: float = 1.0) -> None:
        self.launch, self._size, self._max_failed = launch, size, max_failed
        self.context = context
        # All environments of a run have the same limits.
        self.limits = Limits(*next(iter(launch.hellos.values())).limits)
        self.in_step = launch.threads == 1
        self.lanes = size if self.in_step and launch.in_processes else 1
        self._local: LiveEpisodes | None = None
        self.workers = WorkerPool(launch.spec(), size)
        self.traits: Mapping[str, Mapping[str, bool]] = {}
        self.reads: Mapping[str, Sequence[str]] = {}
        self._keys, self._shown = count(), set[str]()
        self.steps = self.replayed = 0

    def start(self) -> EnvPool:
        """Start the workers.

        Raises:
            ComponentError: the environment reads an unknown field, or a key of its table is missing or unknown.
            UserCodeError: importing its module crashes the worker or takes too long.
        """
        if self.launch.in_processes:
            try:
                event_loop.run(self.workers.start())
            except BaseException:
                self.close()
                raise
            self.traits, self.reads = self.workers.hello
        else:
            self._local = LiveEpisodes(self.launch.hellos)
            self.traits, self.reads = self._local.traits, self._local.reads
        return self

    def __enter__(self) -> EnvPool:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers. A later episode starts new ones."""
        event_loop.run(self.workers.close())

    def env(self, label: str, group: int) -> Env:
        """Return a new environment for an episode of a group."""
        key = next(self._keys)
        if self._local is not None:
            return _LocalEnv(self._local, key, self.reads[label])
        # All episodes of a group share a worker, so that a lane waits for one worker only.
        return EnvWorker(self, key, label, group % self._size)

    def check(self, failures: Sequence[str], total: int) -> None:
        """Log each kind of failure once.

        Args:
            failures: reasons of the failed episodes.
            total: number of episodes.
        Raises:
            UserCodeError: the share of failed episodes exceeds `max_failed`.
        """
        for detail in failures:
            # Without what follows the colon, which differs from episode to episode.
            kind = detail.partition(":")[0]
            if kind not in self._shown:
                self._shown.add(kind)
                _logger.warning("environment: %s (shown once)", detail)
        if len(failures) > self._max_failed * total:
            raise UserCodeError(
                f"{len(failures)} of {total} episodes failed, more than [reward_pool] max_failed = "
                f"{self._max_failed:g} allows; the first: {failures[0]}; fix the environment"
            )

    def metrics(self) -> Metrics:
        """Return the mean time of a step in milliseconds, and the number of replayed episodes, since the last call.

        The time is 0 if the environments run in this process.
        """
        usage = self.workers.usage
        metrics = {"time/env_step_ms": 1000 * usage.seconds / max(1, self.steps), "env/replayed": float(self.replayed)}
        self.steps = self.replayed = 0
        usage.seconds = 0.0
        return metrics


class EnvWorker(Env):
    """The environment of one episode, in a worker that may run other episodes too.

    Args:
        pool: the pool of workers.
        key: number of the episode.
        label: label of the environment in `[[environments]]`.
        index: number of the worker in the pool.
    """

    def __init__(self, pool: EnvPool, key: int, label: str, index: int) -> None:
        self._pool, self._key, self._label = pool, key, label
        self._reads = pool.reads[label]
        self._worker_key: int | EnvWorker = index
        self._worker: WorkerConnection | None = None
        self._history: list[tuple[_Body, int]] = []
        """Calls so far, each with a hash of its answer, to check a replay."""

    async def close(self) -> None:
        if self._worker is not None and self._history:
            # A lost worker has no episode left to close.
            with suppress(CallLost):
                await self._worker.call(("close", self._key))
        if self._worker_key is self:
            self._pool.workers.release(self)
        self._history = []

    async def _step(self, body: _Body) -> Answer:
        """Make a call. Repeat it if the worker was lost and this episode is not known to be the cause."""
        self._pool.steps += 1
        while True:
            try:
                answer = await self._attempt(body)
            except CallLost as lost:
                if lost.guilty and lost.kind == "timeout":
                    return self._failed(f"{lost} for a step", "timeout")
                if lost.guilty:
                    return self._failed(str(lost))
                if lost.guilty is None:
                    # It is unknown which episode lost the worker. In a worker of its own only this one can.
                    self._worker_key = self
            else:
                if answer is not None:
                    return answer

    async def _attempt(self, body: _Body) -> Answer | None:
        """Return the answer to a call; None if the worker's memory was full and the call must be repeated.

        The repetition runs in a worker of its own, because other episodes may have filled the memory.
        """
        if (worker := self._worker) is None or worker.lost:
            worker = await self._pool.workers.worker(self._worker_key)
            if failure := await self._replay(worker):
                return self._failed(failure)
            self._worker = worker
        answer, digest = _hashed_answer(await worker.call(body))
        if "MemoryError" in answer.detail:  # perhaps of other episodes, or of garbage
            worker.retire()
            if self._pool.launch.threads > 1 and self._worker_key is not self:
                self._worker_key = self
                return None
        if answer.kind == "observation":
            self._history.append((body, digest))
        else:
            self._history = []
        return answer

    async def _replay(self, worker: WorkerConnection) -> str:
        """Replay the episode in another worker. Return "", or the reason why the replay failed."""
        if not self._history:
            return ""
        if not self._pool.traits[self._label]["replay"]:
            return "was lost with its process, and cannot be replayed"
        self._pool.replayed += 1
        for body, digest in self._history:
            if _hashed_answer(await worker.call(body))[1] != digest:
                return "is not deterministic: a replay with the same seed gave another observation"
        return ""

    def _failed(self, detail: str, kind: str = "error") -> Answer:
        self._history = []
        return Answer(kind, detail=detail)


class _LocalEnv(Env):
    """The environment of one episode, in this process, without protection."""

    def __init__(self, episodes: LiveEpisodes, key: int, reads: Sequence[str]) -> None:
        self._episodes, self._key, self._reads, self._live = episodes, key, reads, False

    async def close(self) -> None:
        if self._live:
            await self._step(("close", self._key))

    async def _step(self, body: _Body) -> Answer:
        answer = await event_loop.call_in_caller(lambda: _answer(self._episodes.call(body)))
        self._live = answer.kind == "observation"
        return answer


def _hashed_answer(raw: Any) -> tuple[Answer, int]:
    """Return a worker's answer and its hash, which a replay must reproduce."""
    # A hash, because the history of a long episode would otherwise hold all of its observations.
    return _answer(raw), hash(repr(raw))


def _answer(raw: Any) -> Answer:
    """Return an answer with the same types from a worker, where JSON makes lists of tuples, and from this process."""
    answer = Answer(*raw)
    return answer._replace(messages=[(role, text) for role, text in answer.messages], tools=list(answer.tools))
