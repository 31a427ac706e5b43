"""The ranks of several processes, and how they communicate; importing this does not import torch.

Every process runs the same program on the same batch, and forwards only its share of the rows. What happens once, such
as a reward or a file, happens on rank 0, and the others get its result.
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

from retrain.errors import (
    DataError,
    DivergedError,
    EngineError,
    Preempted,
    RetrainError,
    StorageError,
    UserCodeError,
)
from retrain.protocols import ALONE, Ranks
from retrain.system.terminal import say

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
_Report = tuple[str, str, int] | None
"""An error as plain values: name of its class, text, exit code."""

RENDEZVOUS = "RETRAIN_RENDEZVOUS"
"""Environment variable with the address where the ranks meet; without it, torchrun's own variables say where."""
ROLLOUT_PATIENCE = 10
"""Rollouts and rewards take longer than an update: there ranks wait this many times `timeout_s`."""
_ANSWER_S = 3.0
"""After a timeout, how long a rank waits to learn which others are alive."""
_LEAVE_S = 2.0
"""How long a rank that has lost another has to end in order: one of its threads may wait for the lost one too."""
_LOST = re.compile(r"timed? ?out|connection (reset|closed|refused)|gloo|nccl|socket|broken pipe", re.IGNORECASE)
"""How the messages of torch's communication errors, which are plain RuntimeErrors, differ from others."""
_SHARED = (DataError, DivergedError, EngineError, Preempted, StorageError, UserCodeError)
"""Errors that are raised on every rank as the class that one rank raised."""


class Group(Ranks):
    """One rank of several, over torch.distributed: gloo on CPUs, NCCL on GPUs, and gloo for everything but tensors.

    A rank that dies or does not answer within the timeout is an EngineError on the others, which names it; one that
    ends by an error of its own reports it first, and the others raise the same. After that every verb raises
    the same error, and the process ends soon, whatever it waits for.

    Args:
        control: gloo's group for messages. store: where ranks report their errors.
        rollouts: a group with messages of its own, which shares `all_reduce` and `mesh` with this one.
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

        box: list[Any] = [value if self.rank == 0 else None]
        with self._talking():
            dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def all_gather(self, value: T) -> list[T]:
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        with self._talking():
            dist.all_gather_object(found, value, group=self._control)
        return found

    def all_reduce(self, tensor: Tensor) -> Tensor:
        import torch.distributed as dist

        with self._talking():
            dist.all_reduce(tensor, group=self.mesh.get_group())
        return tensor

    def on_rank0(self, compute: Callable[[], T]) -> T:
        outcome, error = _attempt(compute) if self.rank == 0 else (None, None)
        found: tuple[Any, _Report] = self.broadcast((outcome, _reported(error)))
        _raise(error, found[1])
        return found[0]

    def on_each_rank(self, compute: Callable[[], T]) -> list[T]:
        outcome, error = _attempt(compute)
        found: list[tuple[Any, _Report]] = self.all_gather((outcome, _reported(error)))
        _raise(error, next((failure for _, failure in found if failure), None))
        return [value for value, _ in found]

    @contextmanager
    def during(self, phase: str) -> Generator[None]:
        before, self._phase = self._phase, phase
        try:
            with self._talking():
                yield
        except Exception as error:
            if not before:  # it ends this rank, and the others will look for the reason
                self._report(error)
            raise
        self._phase = before

    @contextmanager
    def _talking(self) -> Generator[None]:
        """Turn the errors of torch's communication into one that names the ranks that do not answer."""
        if self._lost:
            raise _error_of(self._lost)
        began = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            if not _LOST.search(str(error)):
                raise
            self._lost = self._explain(time.perf_counter() - began)
            last = Timer(_LEAVE_S, _say_and_leave, self._lost[1:])
            last.daemon = True
            last.start()
            raise _error_of(self._lost) from error

    def _report(self, error: Exception) -> None:
        if not self._lost and not (self._rollouts and self._rollouts._lost):
            with suppress(RuntimeError):
                self._store.set(f"failed/{self.rank}", json.dumps(_reported(error)))

    def _explain(self, waited_s: float) -> tuple[str, str, int]:
        """The error that another rank reported before it ended; else which ranks do not answer."""
        silent = [rank for rank in range(self.size) if rank != self.rank]
        until = time.monotonic() + _ANSWER_S
        with suppress(RuntimeError):  # the store may be gone with the rank that kept it
            self._store.set(f"alive/{self.rank}", "yes")
            while silent and time.monotonic() < until:
                for rank in silent:
                    if self._store.check([f"failed/{rank}"]):
                        return tuple(json.loads(self._store.get(f"failed/{rank}")))
                silent = [rank for rank in silent if not self._store.check([f"alive/{rank}"])]
                time.sleep(0.1)
        who = f"rank {', '.join(map(str, silent)) or 'connection'} does not answer"
        where = f" in {self._phase}" if self._phase else ""
        text = f"{who}: rank {self.rank} waited {waited_s:.0f} s{where}; --resume auto goes on from the last checkpoint"
        return EngineError.__name__, text, EngineError.exit_code

    def leave(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


def launched() -> bool:
    """Whether this process is one of several ranks: `--ranks` or torchrun started it."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def leave(code: int) -> None:
    """End this process at once.

    Python and torch take seconds to take themselves apart on a busy machine, and wait for threads that may wait for
    other ranks.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or never there
            stream.flush()
    os._exit(code)


def _say_and_leave(text: str, code: int) -> None:
    with suppress(OSError):
        say(text, error=True)
    leave(code)


def join(device: str, timeout_s: float) -> Ranks:
    """Meet the other ranks; a process that nobody launched as a rank is alone.

    Args:
        device: "cuda" or "cpu": where the weights are.
        timeout_s: how long a rank waits for the others.
    Raises:
        EngineError: the others cannot be found.
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
            f"rank {rank} of {size} does not find the others: {error}; start ranks with --ranks or torchrun, "
            "which set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or unset RANK"
        ) from error
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"  # what is offloaded is summed on the processor
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    mesh = init_device_mesh(device, (size,), mesh_dim_names=("shard",))
    control = dist.new_group(backend="gloo", timeout=patience)
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


def _raise(own: Exception | None, failure: _Report) -> None:
    """Raise this rank's own error, or what another rank reported."""
    if own is not None:
        raise own
    if failure is not None:
        raise _error_of(failure)


def _error_of(failure: tuple[str, str, int]) -> RetrainError:
    """The error that another rank reported."""
    name, text, code = failure
    error = {kind.__name__: kind for kind in _SHARED}.get(name, RetrainError)(text)
    error.exit_code = code
    return error
