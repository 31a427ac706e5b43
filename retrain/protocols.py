"""Protocols of engines, policies, tasks, trackers, executors and stateful components.

A class must define the abstract methods. A class that is registered or named by a dotted path need not inherit from
its protocol: `Component.build` adds the default of every method that it does not define.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from retrain.errors import ComponentError, EngineError
from retrain.types import State

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, device

    from retrain.types import Batch, Completion, Metrics, Observer, Problem, Request, Rollout, Sampling

T = TypeVar("T")


class Sampler(Protocol):
    """An engine: samples completions.

    Attributes:
        tolerance: mean difference per token, in nats, between the engine's log-probs and the trainer's
            that rounding explains; stale or wrong weights differ by more.
        room: longest context with its completion, in tokens, if that is less than the model's own limit.
        takes_adapters: with LoRA the engine receives the frozen base once through `load_weights`, then adapters
            through `load_adapter`. Otherwise it receives full weights, as `LazyWeights`.
    """

    tolerance: float = 0.0
    room: float = inf
    takes_adapters: bool = False

    def __init__(self) -> None:
        """Take no parameters, unless the class defines its own `__init__`."""

    @abstractmethod
    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return the completions of every request, in the order of the requests.

        The random numbers of a request depend on the seed in `sampling` and on the request's stream, not on the other
        requests. An engine may also define `async def generate(request, sampling)`, which returns the completions of
        one request. Episodes then send their requests independently, and no episode waits for another.
        """

    @abstractmethod
    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Use these weights from now on: a full `state_dict()`, tied entries included; see `LazyWeights`."""

    def run_on_rank0(self, play: Callable[[Sampler], T]) -> T:
        """Call `play` with this sampler on rank 0 only, and return its result on every rank."""
        return play(self)

    def load_adapter(self, folder: Path, version: int) -> None:
        """Use the adapter in this folder (peft's format) on top of the base, instead of the previous adapter.

        The folder does not change until the next call.
        """
        raise EngineError(f"{type(self).__name__} takes no adapters")

    def describe(self) -> str:
        """Describe the implementation in a few words, for the log."""
        return type(self).__name__

    def metrics(self) -> Metrics:
        """Return what the engine counted since the last call."""
        return {}

    def request_stop(self) -> None:
        """Stop waiting for anything external, such as a server that restarts: the run ends after this step.

        Called in a signal handler.
        """

    def close(self) -> None:
        """Release resources at the end of the run."""


class CheckpointRows:
    """A tensor of `count` rows that are spread over the files of a checkpoint and read on use."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts, self.count = parts, sum(map(len, parts))

    def between(self, first: int, end: int) -> Tensor:
        """Return a copy of the rows `first` to `end` (exclusive)."""
        import torch

        starts = accumulate(map(len, self.parts), initial=0)
        return torch.cat(
            [part[max(0, first - s) : max(0, end - s)] for s, part in zip(starts, self.parts, strict=False)]
        )


def tolerance_of(dtype: Any) -> float:
    """Return the mean log-prob difference per token, in nats, that rounding in this torch dtype explains."""
    return 1e-3 if "32" in str(dtype) else 0.15


class Ranks:
    """The processes (ranks) that train one model together. This base class is a single process.

    Attributes:
        rank: index of this process, from 0.
        size: number of processes (world size).
        mesh: torch's device mesh over which weights are sharded; None for a single process.
        rollouts: the same ranks with a communication group of their own, for the thread that samples and scores.
    """

    rank, size = 0, 1
    mesh: Any = None

    @property
    def rollouts(self) -> Ranks:
        return self

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        return value

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of the ranks."""
        return [value]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place."""
        return tensor

    def on_rank0(self, compute: Callable[[], T]) -> T:
        """Call `compute` on rank 0 only; return its result, or raise its error, on every rank."""
        return compute()

    def only_on_rank0(self, build: Callable[[], T]) -> T | None:
        """Call `build` on rank 0 only; return its result there, None elsewhere, and raise its error on every rank."""
        built: list[T] = []

        def keep() -> None:
            built.append(build())

        self.on_rank0(keep)
        return built[0] if built else None

    def on_each_rank(self, compute: Callable[[], T]) -> list[T]:
        """Call `compute` on every rank; return all results in the order of the ranks, or raise an error on all."""
        return [compute()]

    @contextmanager
    def during(self, phase: str) -> Generator[None]:
        """Name the work inside this block, for the error message if a rank is lost."""
        yield

    def leave(self) -> None:
        """Leave the process group."""


ALONE = Ranks()


class Shards:
    """The sharding of a model's weights over ranks. This base class is a whole model in a single process.

    Attributes:
        ranks: the processes that hold the model.
        casts: gathered weights already have the dtype of the matrix products, so autocast must not cast them.
        device: device of the computation, if weights may be offloaded to another one.
    """

    ranks: Ranks = ALONE
    casts = False
    device: device | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that runs the model's modules."""
        return function(*args)

    def recover(self) -> None:
        """Restore a consistent state after a function called by `run` raised and training continues."""

    def copied(self, model: Any) -> tuple[Any, Any]:
        """Return a copy of the model, and the `Source` of its parameters if the copy has no values yet."""
        return copy.deepcopy(model), None

    def sum_gradients(self, parameters: list[Tensor]) -> None:
        """Sum over the ranks the gradients that backward did not reduce."""

    def spread(self, head: Any, settings: Any) -> Any:
        """Return a small extra module, such as a value head, sharded like the model's trained weights."""
        return head

    def full(self, tensor: Tensor) -> Tensor:
        """Gather the whole tensor on every rank; all ranks must call it."""
        return tensor

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return detached tensors by name, gathered on every rank; views where nothing is sharded."""
        return {name: value.detach() for name, value in tensors.items()}


WHOLE = Shards()


class Policy(Protocol):
    """The trainable model.

    Attributes:
        settings: see `PolicySettings`.
        model: the transformers model that is trained. adapter: peft's wrapper of it with LoRA, else None.
        step: number of optimizer steps taken.
        ranks: the processes that train it together.
    """

    settings: Any
    model: Any
    adapter: Any
    step: int
    ranks: Ranks

    @property
    def device(self) -> device:
        """Device of the weights and of the batches."""
        ...

    def logprobs(self, batch: Batch, columns: Sequence[str] = ("old_logprobs",)) -> dict[str, Tensor]:
        """Compute the requested POLICY_COLUMNS, each [N, T] float32, without gradient, 0 outside response_mask."""
        ...

    def update(self, batch: Batch, objective: Any, recredit: Callable[[], Tensor] | None = None) -> Metrics:
        """Take the optimizer steps of one training step, and return metrics.

        Args:
            objective: loss over the whole batch.
            recredit: called before each epoch after the first; returns its advantages [N, T]. None: every epoch uses
                those of the batch.
        """
        ...

    def gradient(self, batch: Batch, weights: Tensor) -> Tensor:
        """Return the gradient [D] of sum_{n,t} weights[n, t] * logprobs[n, t] over all D trained parameters."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Full weights by the base model's names, tied entries included; with LoRA, `LazyWeights`."""
        ...

    def save_adapter(self, folder: Path, base: str = "", card: str = "") -> None:
        """Write the LoRA adapter in peft's format; `base` names the base model, `card` is the README.md."""
        ...

    def load_adapter(self, folder: Path) -> None:
        """Load an adapter written by `save_adapter`."""
        ...

    def sibling(self, name: str, settings: Any, *, has_values: bool = False) -> Policy:
        """Create a second trainable model from the initial weights; `has_values` adds a value head."""
        ...

    def values(self, batch: Batch) -> Tensor:
        """Return the values [N, T] of a model with a value head, without gradient, 0 outside response_mask."""
        ...

    def reference(self) -> Callable[[Batch], Tensor]:
        """Return a function that computes log-probs [N, T] with the weights at the time of its first call."""
        ...

    def reference_weights(self) -> Mapping[str, Tensor]:
        """Return the reference's full weights by the base model's names; with LoRA, the frozen base."""
        ...

    def in_float32(self) -> AbstractContextManager[bool]:
        """Compute matrix products in float32 inside this block; yields False if that is not possible."""
        ...

    def remember(self) -> None:
        """Remember the current weights for `earlier_logprobs`."""
        ...

    def earlier_logprobs(self, batch: Batch) -> Tensor | None:
        """Return log-probs [N, T] under the weights of the last `remember`, or LoRA's base; None before the first."""
        ...

    def state_dict(self) -> State:
        """Return weights, optimizer state and schedule."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Restore the state that `state_dict` returned."""
        ...


class Task(Protocol):
    """A source of problems. Training and held-out problems never overlap, for any seed."""

    def __init__(self) -> None:
        """Take no parameters, unless the class defines its own `__init__`."""

    @abstractmethod
    def problem(self, index: int) -> Problem:
        """Return training problem `index` (0, 1, ..., without end) in the order of this seed.

        The order may change only in `learn`.
        """

    @abstractmethod
    def heldout(self, count: int) -> list[Problem]:
        """Return the first `count` held-out problems, the same for every seed; fewer if the data has fewer."""

    def finite(self) -> Iterable[Problem]:
        """Return all problems of a task that holds them in memory; () for a task that generates them without end."""
        return ()

    def pose(self, text: str) -> Any:
        """Turn a question that a user types into a prompt: text, or chat messages."""
        return text

    def fingerprint(self) -> str | None:
        """Return a hash of the data and its settings, so that a run is not resumed on other data. None: unknown."""
        return None

    def figures(self, problems: Sequence[Problem], answers: Sequence[Sequence[Rollout]]) -> Metrics:
        """Return extra metrics of an evaluation, reported as `task/NAME`, from the answers sampled for each problem."""
        return {}

    def spans(self, problem: Problem, text: str) -> Mapping[str, Sequence[tuple[int, int]]]:
        """Return named character ranges of a completion's text that have a meaning in this task, such as a plan."""
        return {}

    def learn(self, rates: Mapping[str, float]) -> Metrics:
        """Update the order of problems from each one's share of correct answers, by id; return metrics."""
        return {}

    def state_dict(self) -> State:
        """Return the state for checkpoints: nested dicts of JSON values."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restore the state that `state_dict` returned."""


class RowSource(Protocol):
    """Chooses the rows that a step trains on: its rollouts, and rows beside them or in their place.

    Several sources are asked in the order of the configuration. Each gets the rollouts that the one before it left.
    """

    def __init__(self) -> None:
        """Without parameters, unless the class has its own."""

    @abstractmethod
    def take(self, step: int, rollouts: Sequence[Rollout]) -> Any:
        """Return the rows of a step as a list, or that list and a dict of metrics.

        A row is a rollout or an `ExpertRow`. Rollouts come in whole groups: those of the step are the objects that
        were given, and a source's own have any number as `group`, one for each prompt. Credit is computed again from
        their rewards. With several ranks only that of rank 0 is asked, and all train on what it returns.

        Args:
            step: the training step, from 0.
            rollouts: all that were sampled for it. Those without a reward, and groups that the filter dropped, are not
                trained on whether they are returned or not.
        """

    def after(self, batch: Batch) -> Metrics:
        """The update is done; `batch` has the columns that credit computed."""
        return {}

    def fingerprint(self) -> str | None:
        """Hash of the data that it reads: a run is not resumed on other data. None: it reads none."""
        return None

    def state_dict(self) -> State:
        """Return the state for checkpoints, such as a position: nested dicts of JSON values."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restore what `state_dict` gave."""


class Tracker(Protocol):
    """A destination of metrics. `where` is a URL or command that shows them, or ""."""

    where: str = ""

    def __init__(self) -> None:
        """Take no parameters, unless the class defines its own `__init__`."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step, or of the evaluation after that many steps."""

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record completions of a step whose rollouts are stored: prompt, text, answer, reward and its parts."""

    def close(self) -> None:
        """Write everything and finish."""


class Executor(Protocol):
    """Executes the runs of a campaign. Its constructor may take `campaign`."""

    def __init__(self) -> None:
        """Take no parameters, unless the class defines its own `__init__`."""

    @abstractmethod
    def run(self, jobs: Sequence[Any], observe: Observer) -> None:
        """Execute the jobs and return when all of them have ended."""


class StatefulComponent(Protocol):
    """A component of credit assignment with state: built once per run and saved in checkpoints.

    Attributes:
        stateful: the class defines `state_dict` and `load_state_dict` (both or neither).
        every_epoch: `after` and `before` are also called, and credit computed again, between the epochs of an update.
    """

    stateful: bool = False
    every_epoch: bool = False

    def __init__(self) -> None:
        """Take no parameters, unless the class defines its own `__init__`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.stateful = cls.state_dict is not StatefulComponent.state_dict
        if cls.stateful is (cls.load_state_dict is StatefulComponent.load_state_dict):
            problem = f"{cls.__name__} has only one of state_dict and load_state_dict"
            raise ComponentError(problem, "write both, or neither if there is nothing to save")

    def before(self, batch: Batch) -> Metrics:
        """Called when a step begins; `batch` has its rollouts, without credit."""
        return {}

    def after(self, batch: Batch) -> Metrics:
        """Called after the update; `batch` has the columns that credit computed."""
        return {}

    def holds_policy(self, step: int) -> bool:
        """Return whether this step trains the component only and leaves the policy unchanged."""
        return False

    def state_dict(self) -> State:
        """Return the state for checkpoints: nested dicts of JSON values and tensors."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restore the state that `state_dict` returned."""

    def export(self, folder: Path) -> None:
        """Write the trained component into a folder of the exported model, for other tools."""
