"""Ranks of a run of several processes, and their communication. Importing this does not import torch.

Every rank runs the same program on the same batch, and runs the model on its share of the rows. Work that must happen
once, such as computing a reward or writing a file, happens on rank 0, and the other ranks receive the result.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Timer
from typing import TYPE_CHECKING, Any, TypeVar

from retrain.errors import DataError, DivergedError, EngineError, Preempted, RetrainError, StorageError, UserCodeError
from retrain.protocols import ALONE, Ranks
from retrain.system.process import launched
from retrain.system.terminal import say

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
_Report = tuple[str, str, int] | None
"""An error that can be sent as JSON: name of its class, text, exit code. None: no error."""

RENDEZVOUS = "RETRAIN_RENDEZVOUS"
"""Environment variable with the rendezvous address of the ranks. Without it torchrun's variables are used."""
ROLLOUT_PATIENCE = 10
"""Factor of `timeout_s` while ranks sample and score, which takes longer than an update."""
_ANSWER_S = 3.0
"""Seconds that a rank waits after a timeout to find out which other ranks are alive."""
_LEAVE_S = 2.0
"""Seconds that a rank has for an orderly end after it lost another. Then it exits at once, because a thread may still
wait for the lost rank."""
_LOST = re.compile(r"timed? ?out|connection (reset|closed|refused)|gloo|nccl|socket|broken pipe", re.IGNORECASE)
"""Matches the messages of torch's communication errors, which have no class of their own but RuntimeError."""
_SHARED = (DataError, DivergedError, EngineError, Preempted, StorageError, UserCodeError)
"""Errors that keep their class when another rank raises them again; all others become a RetrainError."""


class Group(Ranks):
    """One of several ranks that communicate by torch.distributed.

    Tensors are reduced with gloo on CPUs and NCCL on GPUs; Python objects are sent with gloo. If a rank dies or does
    not answer within the timeout, the others raise an EngineError that names it. A rank that ends with an error of its
    own reports it first, and the others raise that error. After a rank is lost, every method raises the same error,
    and the process exits after `_LEAVE_S` seconds even if a thread still waits.

    Args:
        rank: index of this process, from 0.
        size: world size.
        mesh: torch's device mesh of all ranks.
        control: gloo process group for Python objects.
        store: torch's key-value store, in which ranks report their errors.
        rollouts: the group for the thread that samples and scores; it has another `control` and the same `mesh`.
    """

    def __init__(self, rank: int, size: int, *, mesh: Any, control: Any, store: Any, rollouts: Group | None) -> None:
        self.rank, self.size, self.mesh = rank, size, mesh
        self._control, self._store, self._rollouts = control, store, rollouts
        self._phase = ""
        self._lost: _Report = None

    @property
    def rollouts(self) -> Ranks:
        return self._rollouts or self

    def broadcast(self, value: T) -> T:
        import torch.distributed as dist

        # torch's function fills a list in place.
        box: list[Any] = [value if self.rank == 0 else None]
        with self._explained_errors():
            dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def all_gather(self, value: T) -> list[T]:
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        with self._explained_errors():
            dist.all_gather_object(values, value, group=self._control)
        return values

    def all_reduce(self, tensor: Tensor) -> Tensor:
        import torch.distributed as dist

        with self._explained_errors():
            dist.all_reduce(tensor, group=self.mesh.get_group())
        return tensor

    def on_rank0(self, compute: Callable[[], T]) -> T:
        outcome, error = _attempt(compute) if self.rank == 0 else (None, None)
        answer: tuple[Any, _Report] = self.broadcast((outcome, _reported(error)))
        # Raised after the broadcast, so that no rank waits for a result that never comes.
        _raise(error, answer[1])
        return answer[0]

    def on_each_rank(self, compute: Callable[[], T]) -> list[T]:
        outcome, error = _attempt(compute)
        answers: list[tuple[Any, _Report]] = self.all_gather((outcome, _reported(error)))
        _raise(error, next((failure for _, failure in answers if failure), None))
        return [value for value, _ in answers]

    @contextmanager
    def during(self, phase: str) -> Generator[None]:
        before, self._phase = self._phase, phase
        try:
            with self._explained_errors():
                yield
        except Exception as error:
            if not before:  # the outermost phase: the error ends this rank, and the others will look for its reason
                self._report(error)
            raise
        self._phase = before

    @contextmanager
    def _explained_errors(self) -> Generator[None]:
        """Raise a communication error of torch as an error that names the lost ranks, and schedule the exit."""
        if self._lost:
            raise _error_of(self._lost)
        began = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            if not _LOST.search(str(error)):
                raise
            self._lost = self._explain(time.perf_counter() - began)
            # A daemon, so that the timer itself does not keep an orderly end waiting.
            last = Timer(_LEAVE_S, _say_and_leave, self._lost[1:])
            last.daemon = True
            last.start()
            raise _error_of(self._lost) from error

    def _report(self, error: Exception) -> None:
        if not self._lost and not (self._rollouts and self._rollouts._lost):
            with suppress(RuntimeError):
                # A file store whose folder went with its launcher would try for half an hour.
                self._store.set_timeout(timedelta(seconds=_ANSWER_S))
                self._store.set(f"failed/{self.rank}", json.dumps(_reported(error)))

    def _explain(self, waited_s: float) -> tuple[str, str, int]:
        """Return the error that another rank reported; if there is none, an error that names the silent ranks."""
        silent = [rank for rank in range(self.size) if rank != self.rank]
        until = time.monotonic() + _ANSWER_S
        with suppress(RuntimeError):  # the store may be gone with the rank that kept it
            self._store.set_timeout(timedelta(seconds=_ANSWER_S))
            self._store.set(f"alive/{self.rank}", "yes")
            while silent and time.monotonic() < until:
                for rank in silent:
                    if self._store.check([f"failed/{rank}"]):
                        return tuple(json.loads(self._store.get(f"failed/{rank}")))
                silent = [rank for rank in silent if not self._store.check([f"alive/{rank}"])]
                time.sleep(0.1)
        who = f"rank {', '.join(map(str, silent)) or 'connection'} does not answer"
        where = f" in {self._phase}" if self._phase else ""
        text = f"{who}: rank {self.rank} waited {waited_s:.0f} s{where}; continue with --resume auto"
        return EngineError.__name__, text, EngineError.exit_code

    def leave(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


def leave(code: int) -> None:
    """Exit this process at once, without cleaning up.

    On a busy machine Python and torch take seconds to clean up, and they wait for threads that may wait for lost ranks.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # the stream is closed, or None
            stream.flush()
    os._exit(code)


def _say_and_leave(text: str, code: int) -> None:
    with suppress(OSError):
        say(text, error=True)
    leave(code)


def join(device: str, timeout_s: float) -> Ranks:
    """Join the other ranks of this run; return `ALONE` if this process was not started as a rank.

    Args:
        device: "cuda" or "cpu", the device of the weights.
        timeout_s: seconds that a rank waits for the others in each communication.
    Raises:
        EngineError: the rendezvous with the other ranks failed.
    """
    if not launched():
        return ALONE
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.rendezvous import rendezvous

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    patience = timedelta(seconds=timeout_s)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    try:
        store = next(rendezvous(os.environ.get(RENDEZVOUS, "env://"), rank, size, timeout=timedelta(minutes=30)))[0]
    except (ValueError, RuntimeError) as error:
        raise EngineError(
            f"rank {rank} of {size} cannot find the others: {error}; start ranks with --ranks or torchrun, "
            "which set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or unset RANK"
        ) from error
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"  # gradients of offloaded weights are on the CPU
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    mesh = init_device_mesh(device, (size,), mesh_dim_names=("shard",))
    control = dist.new_group(backend="gloo", timeout=patience)
    # A group of its own, because two threads must not use one group at the same time.
    slow = dist.new_group(backend="gloo", timeout=patience * ROLLOUT_PATIENCE)
    rollouts = Group(rank, size, mesh=mesh, control=slow, store=store, rollouts=None)
    return Group(rank, size, mesh=mesh, control=control, store=store, rollouts=rollouts)


def _attempt(compute: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return compute(), None
    except Exception as error:
        return None, error


def _reported(error: Exception | None) -> _Report:
    if error is None:
        return None
    code = error.exit_code if isinstance(error, RetrainError) else 1
    text = "\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])
    return type(error).__name__, text, code


def _raise(error: Exception | None, failure: _Report) -> None:
    """Raise this rank's own error, else the one that another rank reported, if any."""
    if error is not None:
        raise error
    if failure is not None:
        raise _error_of(failure)


def _error_of(failure: tuple[str, str, int]) -> RetrainError:
    """Rebuild the error that another rank reported."""
    name, text, code = failure
    error = {kind.__name__: kind for kind in _SHARED}.get(name, RetrainError)(text)
    error.exit_code = code
    return error
