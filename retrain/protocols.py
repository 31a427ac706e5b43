"""The seams: everything an engine, a policy, a task, a tracker and a part with a life cycle may be asked for.

A verb without a default must be written. A class that is registered or named by a dotted path need not inherit from
its protocol: `Component.build` adds the defaults for the verbs that it leaves out. Nothing else looks for verbs.
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
from retrain.types import Adapted, State

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, device

    from retrain.types import Ask, Batch, Completion, Hear, Metrics, Observer, Problem, Request, Rollout, Sampling

T = TypeVar("T")


class Sampler(Protocol):
    """Where completions come from: an engine.

    Attributes:
        tolerance: mean difference per token, in nats, between the engine's log-probs and the trainer's
            that rounding explains; stale or wrong weights show more.
        room: tokens of a context with its completion that it takes, if that is less than the model knows.
        takes_adapters: with LoRA the engine gets the frozen base once by `load_weights`, and then adapters by
            `load_adapter`; otherwise it gets full weights, `Adapted`.
    """

    tolerance: float = 0.0
    room: float = inf
    takes_adapters: bool = False

    def __init__(self) -> None:
        """Without parameters, unless the class has its own."""

    @abstractmethod
    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """The completions of every request, in the requests' order.

        What a request draws depends on the sampling's seed and the request's stream, not on the other requests.
        """

    def keep_sampling(self, ask: Ask, hear: Hear, sampling: Sampling) -> None:
        """Sample until `ask` gives None, each request for `hear`; an engine may take more while it samples others."""
        while (requests := ask(True)) is not None:
            for request, completions in zip(requests, self.sample(requests, sampling), strict=True):
                hear(request, completions)

    @abstractmethod
    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample with these weights from now on: a full `state_dict()`, tied entries included; with LoRA, `Adapted`."""

    def lead(self, play: Callable[[Sampler], T]) -> T:
        """What `play` returns; of several ranks rank 0 alone calls it, with a sampler, and every rank returns it."""
        return play(self)

    def load_adapter(self, folder: Path, version: int) -> None:
        """Sample with the base and the adapter in this folder, in peft's format, instead of the last adapter.

        The folder stays as it is until the next call.
        """
        raise EngineError(f"{type(self).__name__} takes no adapters")

    def describe(self) -> str:
        """What computes the completions, in words."""
        return type(self).__name__

    def metrics(self) -> Metrics:
        """What the engine has counted since the last call."""
        return {}

    def hurry(self) -> None:
        """The run is to stop after this step: wait for nothing but the engine's own work. From a signal handler."""

    def close(self) -> None:
        """The run has ended."""


class CheckpointRows:
    """A tensor of `count` rows, of which each file of a checkpoint has some; they are read when they are used."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts, self.count = parts, sum(map(len, parts))

    def between(self, first: int, end: int) -> Tensor:
        """A copy of the rows from `first` to before `end`."""
        import torch

        starts = accumulate(map(len, self.parts), initial=0)
        return torch.cat(
            [part[max(0, first - s) : max(0, end - s)] for s, part in zip(starts, self.parts, strict=False)]
        )


class Gathering(Mapping[str, "Tensor"]):
    """Weights by name, each gathered from the ranks when it is read.

    Every rank must read the same ones in the same order. Tied entries are gathered once while one of them is held.

    Attributes:
        shapes: known without gathering. untied: the names without those that are tied to an earlier one.
        rank: which of the ranks this process is; what is done once, rank 0 does.
    """

    shapes: Mapping[str, tuple[int, ...]]
    untied: Sequence[str]
    rank: int


def shapes_of(weights: Mapping[str, Tensor]) -> Mapping[str, tuple[int, ...]]:
    """The shapes of a full state dict; nothing is gathered or merged for them."""
    base = weights.base if isinstance(weights, Adapted) else weights
    return base.shapes if isinstance(base, Gathering) else {name: tuple(value.shape) for name, value in base.items()}


def tolerance_of(dtype: Any) -> float:
    """Mean log-prob difference per token, in nats, that rounding in this torch dtype explains."""
    return 1e-3 if "32" in str(dtype) else 0.15


class Ranks:
    """The processes that train one model together. By default a process alone: a verb gives back what it gets.

    Attributes:
        rank, size: which process this is, from 0, and of how many.
        mesh: torch's device mesh over which weights are sharded; None for a process alone.
        rollouts: the same ranks, for the thread that samples and scores; it has its own messages.
    """

    rank, size = 0, 1
    mesh: Any = None

    @property
    def rollouts(self) -> Ranks:
        return self

    def same(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        return value

    def every(self, value: T) -> list[T]:
        """The values of all ranks, in their order."""
        return [value]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        return tensor

    def first(self, compute: Callable[[], T]) -> T:
        """What `compute` returns or raises on rank 0, on every rank; the others do not call it."""
        return compute()

    def each(self, compute: Callable[[], T]) -> list[T]:
        """What `compute` returns on every rank, in their order; an error of one rank is raised on all of them."""
        return [compute()]

    @contextmanager
    def during(self, phase: str) -> Generator[None]:
        """Name what is done inside this block, for the message if a rank is lost in it."""
        yield

    def leave(self) -> None:
        """End the group."""


ALONE = Ranks()


class Shards:
    """How a model's weights lie on the ranks. By default they are whole, on a process alone.

    Attributes:
        ranks: who works on the model.
        casts: the weights come in the type of the matrix products, so autocast must not cast them.
        device: where the model computes, if its weights may wait elsewhere.
    """

    ranks: Ranks = ALONE
    casts = False
    device: device | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that uses the model's modules."""
        return function(*args)

    def recover(self) -> None:
        """A function that `run` called has raised, and training goes on."""

    def copied(self, model: Any) -> tuple[Any, Any]:
        """The model again, and the `Source` of its parameters' values if it has none."""
        return copy.deepcopy(model), None

    def sum_gradients(self, parameters: list[Tensor]) -> None:
        """Sum over the ranks what backward has not summed."""

    def full(self, tensor: Tensor) -> Tensor:
        """The whole tensor on every rank; every rank must ask."""
        return tensor

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tensors by name without gradient, whole on every rank; views where nothing is sharded."""
        return {name: value.detach() for name, value in tensors.items()}


WHOLE = Shards()


class Policy(Protocol):
    """The trainable model.

    Attributes:
        settings: see `PolicySettings`.
        model: the transformers model that is trained. adapter: peft's wrapper of it with LoRA, else None.
        step: optimizer steps taken. ranks: the processes that train it together.
    """

    settings: Any
    model: Any
    adapter: Any
    step: int
    ranks: Ranks

    @property
    def device(self) -> device:
        """Where the weights are, and where batches must be."""
        ...

    def logprobs(self, batch: Batch, columns: Sequence[str] = ("old_logprobs",)) -> dict[str, Tensor]:
        """POLICY_COLUMNS by name, each [N, T] float32, no gradient, 0 outside response_mask."""
        ...

    def update(self, batch: Batch, objective: Any) -> Metrics:
        """The optimizer steps of one training step, on the objective over the whole batch."""
        ...

    def gradient(self, batch: Batch, weights: Tensor) -> Tensor:
        """[D] gradient of sum_{n,t} weights[n, t] * logprobs[n, t] in everything that is trained; changes nothing."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Full weights by the base model's names, tied entries included; with LoRA, `Adapted`."""
        ...

    def save_adapter(self, folder: Path, base: str = "", card: str = "") -> None:
        """Write LoRA's adapter in peft's format; `base` says where its base model is, `card` is a README.md."""
        ...

    def load_adapter(self, folder: Path) -> None:
        """Take what `save_adapter` wrote."""
        ...

    def sibling(self, name: str, settings: Any) -> Policy:
        """A second model to train, which starts where training started."""
        ...

    def reference(self) -> Callable[[Batch], Tensor]:
        """Scores [N, T] by the weights of the first call."""
        ...

    def reference_weights(self) -> Mapping[str, Tensor]:
        """Full weights of the reference, by the base model's names: with LoRA the frozen ones under the adapters."""
        ...

    def remember(self) -> None:
        """Keep what `earlier_logprobs` needs of the weights."""
        ...

    def earlier_logprobs(self, batch: Batch) -> Tensor | None:
        """Scores [N, T] by the weights of the last `remember`, or of LoRA's base; None before the first."""
        ...

    def state_dict(self) -> State:
        """Weights, optimizer and schedule."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Restore what `state_dict` gave."""
        ...


class Task(Protocol):
    """Where problems come from. Training and held-out problems never overlap, whatever the seed."""

    def __init__(self) -> None:
        """Without parameters, unless the class has its own."""

    @abstractmethod
    def problem(self, index: int) -> Problem:
        """Training problem number `index` (0, 1, ...) in this seed's order, endless; only `learn` may change which."""

    @abstractmethod
    def heldout(self, count: int) -> list[Problem]:
        """The first `count` held-out problems, the same for every seed; fewer if the data has fewer."""

    def finite(self) -> Iterable[Problem]:
        """All problems of a task whose problems are in memory; () of one that draws them without end."""
        return ()

    def pose(self, text: str) -> Any:
        """The prompt that a question becomes which somebody types: text, or messages."""
        return text

    def fingerprint(self) -> str | None:
        """Hash of the data and its settings: a run is not resumed on other data. None: it is not known."""
        return None

    def figures(self, problems: Sequence[Problem], answers: Sequence[Sequence[Rollout]]) -> Metrics:
        """What an evaluation reports as `task/NAME` of the sampled answers to each of these held-out problems."""
        return {}

    def spans(self, problem: Problem, text: str) -> Mapping[str, Sequence[tuple[int, int]]]:
        """Characters of a completion's text that the task knows to be special, by the name of what they are."""
        return {}

    def learn(self, rates: Mapping[str, float]) -> Metrics:
        """The share of right answers to every problem of a step, by its id; returns metrics."""
        return {}

    def state_dict(self) -> State:
        """What has been learned, for checkpoints: nested dicts of JSON values."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restore what `state_dict` gave."""


class Tracker(Protocol):
    """A sink of metrics. `where` is a URL or a command that shows them, "" while there is none."""

    where: str = ""

    def __init__(self) -> None:
        """Without parameters, unless the class has its own."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step, or of the evaluation after so many steps."""

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record completions of a step whose rollouts are stored: prompt, text, answer, reward and its parts."""

    def close(self) -> None:
        """Flush and finish."""


class Executor(Protocol):
    """What executes the runs of a campaign; it may be built with `campaign`."""

    def __init__(self) -> None:
        """Without parameters, unless the class has its own."""

    @abstractmethod
    def run(self, jobs: Sequence[Any], observe: Observer) -> None:
        """Execute the jobs; returns when all of them have ended."""


class StatefulComponent(Protocol):
    """A component of credit assignment with a life cycle: built once per run, saved in its checkpoints.

    Attributes:
        stateful: the class writes `state_dict` and `load_state_dict`, which come together.
    """

    stateful: bool = False

    def __init__(self) -> None:
        """Without parameters, unless the class has its own."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.stateful = cls.state_dict is not StatefulComponent.state_dict
        if cls.stateful is (cls.load_state_dict is StatefulComponent.load_state_dict):
            problem = f"{cls.__name__} has only one of state_dict and load_state_dict"
            raise ComponentError(problem, "write both, or neither if there is nothing to save")

    def before(self, batch: Batch) -> Metrics:
        """A step begins; `batch` has its rollouts, before credit."""
        return {}

    def after(self, batch: Batch) -> Metrics:
        """The update is done; `batch` has the columns that credit computed."""
        return {}

    def state_dict(self) -> State:
        """What a checkpoint must hold: nested dicts of JSON values and tensors."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restore what `state_dict` gave."""

    def export(self, folder: Path) -> None:
        """Write what was learned into a folder of the exported model, for other tools."""
