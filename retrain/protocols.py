"""Protocols of engines, tasks, row sources, trackers, executors and stateful components.

A class must define the abstract methods. A class that is registered or given by a dotted path need not inherit from
its protocol, because `Component.whole` adds the defaults of the methods that it does not define.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
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
    """An engine, which samples completions.

    Attributes:
        tolerance: mean difference per token, in nats, between the log-probs of the engine and the trainer
            that rounding can cause; stale or wrong weights cause larger ones.
        max_model_len: maximum number of tokens of a context and its completion, if it is below the model's own limit.
        takes_adapters: with LoRA the engine receives the frozen base once through `load_weights`, then adapters
            through `load_adapter`. Otherwise it receives full weights, as `LazyWeights`.
        continuous: the run samples without pause, so requests may be in flight while weights are loaded.
    """

    tolerance: float = 0.0
    max_model_len: float = inf
    takes_adapters: bool = False
    continuous: bool = False

    # Without it, `typing.Protocol` gives classes an `__init__` of *args, which name no part of a run.
    def __init__(self) -> None:
        """Take no parameters, unless the class defines its own `__init__`."""

    @abstractmethod
    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return the completions of every request, in the order of the requests.

        The random numbers of a request depend on the seed in `sampling` and on the request's stream, not on the other
        requests. An engine can also define `async def generate(request, sampling)`, which returns the completions of
        one request. Episodes then send their requests independently, without waiting for each other.
        """

    @abstractmethod
    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Use these weights from now on.

        Args:
            weights: a full `state_dict()` with tied entries; see `LazyWeights`.
            version: number of optimizer steps of the weights.
        """

    def run_on_rank0(self, play: Callable[[Sampler], T]) -> T:
        """Call `play` with this sampler on rank 0 only, and return its result on every rank."""
        return play(self)

    def load_adapter(self, folder: Path, version: int) -> None:
        """Use an adapter with the base weights, in place of the previous adapter.

        Args:
            folder: the adapter in peft's format. It does not change until the next call.
            version: number of optimizer steps of the adapter.
        """
        raise EngineError(f"{type(self).__name__} does not support adapters")

    def describe(self) -> str:
        """Describe the implementation in a few words, for the log."""
        return type(self).__name__

    def metrics(self) -> Metrics:
        """Return the engine's metrics since the last call."""
        return {}

    def request_stop(self) -> None:
        """Stop waiting for external events, such as the restart of a server, because the run ends after this step.

        The method is called in a signal handler.
        """

    def close(self) -> None:
        """Release resources at the end of the run."""


class CheckpointRows:
    """A tensor whose rows are distributed over the files of a checkpoint.

    Args:
        parts: the tensors of the files, whose rows follow each other.
    Attributes:
        count: total number of rows.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = parts
        self.count = sum(map(len, parts))

    def between(self, first: int, end: int) -> Tensor:
        """Return the rows `first` to `end` (exclusive) as a new tensor."""
        import torch  # here, because a check of a configuration imports this module and not torch

        # One more start than parts, the total, which `zip` drops.
        starts = accumulate(map(len, self.parts), initial=0)
        return torch.cat(
            [part[max(0, first - s) : max(0, end - s)] for s, part in zip(starts, self.parts, strict=False)]
        )


def tolerance_of(dtype: Any) -> float:
    """Return the mean log-prob difference per token, in nats, that rounding in a torch dtype can cause."""
    # `dtype` is torch's, which this module does not import, or its name.
    return 1e-3 if "32" in str(dtype) else 0.15


class Ranks:
    """The processes (ranks) that train one model together. This base class is a single process.

    Attributes:
        rank: index of this process, from 0.
        size: number of processes (world size).
        mesh: torch's device mesh over which weights are sharded; None for a single process.
        rollouts: the same ranks with a separate communication group, for the thread that samples and scores.
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
        """Call `compute` only on rank 0; return its result, or raise its error, on every rank."""
        return compute()

    def only_on_rank0(self, build: Callable[[], T]) -> T | None:
        """Call `build` only on rank 0. Return its result there and None elsewhere; raise its error on every rank."""
        # Not the result of `on_rank0`, which is sent to every rank: an engine cannot be pickled.
        built: list[T] = []

        def keep() -> None:
            built.append(build())

        self.on_rank0(keep)
        return built[0] if built else None

    def on_each_rank(self, compute: Callable[[], T]) -> list[T]:
        """Call `compute` on every rank. Return all results in the order of the ranks, or raise an error on all."""
        return [compute()]

    @contextmanager
    def during(self, phase: str) -> Generator[None]:
        """Name the work inside the block, for the error message if a rank is lost."""
        yield

    def leave(self) -> None:
        """Leave the process group."""


ALONE = Ranks()


class Shards:
    """The sharding of a model's weights over ranks. This base class is a whole model in a single process.

    Attributes:
        ranks: the processes that hold the model.
        casts: True if gathered weights already have the dtype of the matrix products, so that autocast must not cast
            them.
        device: device of the computation, if weights may be offloaded to another one.
    """

    ranks: Ranks = ALONE
    casts = False
    device: device | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that runs the model's modules."""
        return function(*args)

    def recover(self) -> None:
        """Restore a consistent state if a function called by `run` has raised and training continues."""

    def copied(self, model: Any) -> tuple[Any, Any]:
        """Return a copy of the model, and the `Source` of its parameters if the copy has no values yet."""
        return copy.deepcopy(model), None

    def sum_gradients(self, parameters: list[Tensor]) -> None:
        """Sum over the ranks the gradients that the backward pass did not sum."""

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


class Task(Protocol):
    """A source of problems. Training and held-out problems do not overlap, for any pair of seeds."""

    def __init__(self) -> None:
        """Take no parameters, unless the class defines its own `__init__`."""

    @abstractmethod
    def problem(self, index: int) -> Problem:
        """Return training problem `index` (0, 1, ..., without end) in the order of this seed.

        Only `learn` may change the order.
        """

    @abstractmethod
    def heldout(self, count: int) -> list[Problem]:
        """Return the first `count` held-out problems, the same for every seed; fewer if there are fewer."""

    def finite(self) -> Iterable[Problem]:
        """Return all problems of a task that has them in memory; () for a task that generates them without end."""
        return ()

    def pose(self, text: str) -> Any:
        """Convert a question that a user types to a prompt, a text or chat messages."""
        return text

    def fingerprint(self) -> str | None:
        """Return a hash of the data and its settings, so that a run does not resume on other data; None if unknown."""
        return None

    def figures(self, problems: Sequence[Problem], answers: Sequence[Sequence[Rollout]]) -> Metrics:
        """Return further metrics of an evaluation, which are reported as `task/NAME`.

        Args:
            problems: the held-out problems.
            answers: the rollouts sampled for each problem.
        """
        return {}

    def spans(self, problem: Problem, text: str) -> Mapping[str, Sequence[tuple[int, int]]]:
        """Return named spans of a completion's text that have a meaning in this task, such as a plan.

        A span is (start, end) in characters, end exclusive.
        """
        return {}

    def learn(self, rates: Mapping[str, float]) -> Metrics:
        """Update the order of problems after a step, and return metrics.

        Args:
            rates: id of each problem of the step -> its share of correct answers.
        """
        return {}

    def state_dict(self) -> State:
        """Return the state for checkpoints: nested dicts of JSON values."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restore the state that `state_dict` returned."""


class RowSource(Protocol):
    """Determines the rows that a step trains on: its rollouts, and rows that are added to them or replace them.

    Several sources are called in the order of the configuration. Each gets the rollouts that the previous one returned.
    """

    def __init__(self) -> None:
        """Take no parameters, unless the class defines its own `__init__`."""

    @abstractmethod
    def take(self, step: int, rollouts: Sequence[Rollout]) -> Any:
        """Return the rows of a step as a list, or as a tuple of the list and a dict of metrics.

        A row is a rollout or an `ExpertRow`. Rollouts must come in complete groups. Rollouts of the step must be the
        objects in `rollouts`; the `group` of other rollouts can be any number, one for each prompt. Their advantages
        are computed again from their rewards. With several ranks only the source of rank 0 is called, and all ranks
        train on its rows.

        Args:
            step: index of the training step, from 0.
            rollouts: all rollouts that were sampled for the step. Rollouts without a reward, and groups that the
                filter dropped, are not trained on, even if they are returned.
        """

    def after(self, batch: Batch) -> Metrics:
        """Observe the batch after the update, with the columns that credit assignment computed; return metrics."""
        return {}

    def fingerprint(self) -> str | None:
        """Return a hash of the data that the source reads, so that a run does not resume on other data; None if it
        reads none.
        """
        return None

    def state_dict(self) -> State:
        """Return the state for checkpoints, such as a position: nested dicts of JSON values."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restore the state that `state_dict` returned."""


class Tracker(Protocol):
    """A destination of metrics.

    Attributes:
        where: URL of the metrics, or a command that shows them; "" if unknown.
    """

    where: str = ""

    def __init__(self) -> None:
        """Take no parameters, unless the class defines its own `__init__`."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step, or of the evaluation after `step` steps."""

    def resumed(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Receive what `log` was given before the run was resumed, for a tracker that may have lost it."""

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record completions of a step: rows with prompt, text, answer, reward and its parts."""

    def close(self) -> None:
        """Write everything and finish."""


class Executor(Protocol):
    """Executes the runs of a campaign. The constructor can take the parameter `campaign`."""

    def __init__(self) -> None:
        """Take no parameters, unless the class defines its own `__init__`."""

    @abstractmethod
    def run(self, jobs: Sequence[Any], observe: Observer) -> None:
        """Execute the jobs and return when all of them have ended."""


class StatefulComponent(Protocol):
    """A component of credit assignment that a run builds once, and whose state checkpoints store.

    Attributes:
        stateful: True if the class defines `state_dict` and `load_state_dict`. It must define both or neither.
        every_epoch: between the epochs of an update, also call `after` and `before` and compute advantages again.
    """

    stateful: bool = False
    every_epoch: bool = False

    def __init__(self) -> None:
        """Take no parameters, unless the class defines its own `__init__`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # A class that only inherits the defaults has nothing to save.
        cls.stateful = cls.state_dict is not StatefulComponent.state_dict
        # True if exactly one of both is defined.
        if cls.stateful is (cls.load_state_dict is StatefulComponent.load_state_dict):
            problem = f"{cls.__name__} has only one of state_dict and load_state_dict"
            raise ComponentError(problem, "write both, or neither if there is nothing to save")

    def before(self, batch: Batch) -> Metrics:
        """Observe the rollouts of a step before credit assignment; return metrics."""
        return {}

    def after(self, batch: Batch) -> Metrics:
        """Observe the batch after the update, with the columns that credit assignment computed; return metrics."""
        return {}

    def holds_policy(self, step: int) -> bool:
        """Return whether this step trains only the component and leaves the policy unchanged."""
        return False

    def state_dict(self) -> State:
        """Return the state for checkpoints: nested dicts of JSON values and tensors."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restore the state that `state_dict` returned."""

    def export(self, folder: Path) -> None:
        """Write the trained component into its folder inside the exported model, for use by other tools."""
