"""Everything that a run uses, once it is built: in training, in sampling, and in the whole loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from retrain.errors import ComponentError
from retrain.protocols import Policy, Ranks, RowSource, Sampler, StatefulComponent, Task, Tracker
from retrain.types import Observer, Rollout, State

if TYPE_CHECKING:
    from pathlib import Path

    from retrain.algorithms.graph.objective import Objective
    from retrain.algorithms.graph.pipeline import Pipeline
    from retrain.config.resolve import Resolved
    from retrain.config.schema import Config
    from retrain.environments.env_pool import EnvPool
    from retrain.registry import Bound
    from retrain.rewards.pool import RewardPool
    from retrain.storage.run_directory import RunDirectory
    from retrain.training.chat import Chat
    from retrain.training.layout import Layout
    from retrain.training.model.loading import Loaded


class EpisodeSource(Protocol):
    """Where the episodes of a step come from, if the run does not play them itself."""

    def rollouts(self) -> list[Rollout]: ...

    def request_stop(self) -> None: ...


@dataclass(kw_only=True)
class TrainState:
    """What training changes and what that takes: all that is saved, without what samples and scores.

    Attributes:
        config: the resolved configuration.
        loaded: model and tokenizer with the ids that end a completion.
        policy: what is trained.
        engine: what samples from it.
        components: all that the configuration names, and those that it could.
        resources: the parts of the run that a component may ask for, by name.
        pipeline: credit, from rewards to advantages per token.
        objective: what the update minimizes.
        directory: where everything is written.
        observe: called with events as they happen.
        steps: how many steps of the run have changed the policy's weights.
        final: the folder of the final model that the weights come from; the signals are then new ones.
    """

    config: Config
    loaded: Loaded
    policy: Policy
    engine: Bound
    components: Resolved
    resources: Mapping[str, Any]
    pipeline: Pipeline
    objective: Objective
    directory: RunDirectory
    observe: Observer
    steps: int = 0
    final: Path | None = None

    @property
    def ranks(self) -> Ranks:
        """The processes that train together."""
        return self.directory.ranks

    def restore(self, state: State) -> None:
        """Take policy and signals from a checkpoint. A part that the checkpoint's run did not have starts anew."""
        self.policy.load_state_dict(state["policy"])
        for name, part in self.pipeline.stateful.items():
            self.restore_part(name, part, state["signals"].get(name))
        self.steps = int(state["loop"]["step"])

    def restore_part(self, name: str, part: StatefulComponent | RowSource, saved: State | None) -> None:
        """Give a part its saved state, or say that there is none."""
        if saved is not None:
            part.load_state_dict(saved)
            return
        text = f"the checkpoint's run did not have {name}: it starts anew"
        self.observe("message", {"text": text, "level": "warning"})


@dataclass(kw_only=True)
class SamplingContext(TrainState):
    """What answers a prompt with the trained weights: no rewards, no environment, no trackers.

    Attributes:
        sampler: where completions come from.
        task: where problems come from; it poses what somebody types.
        chat: renders prompts.
        has_base: a sampler that takes adapters has the base that they belong to.
    """

    sampler: Sampler
    task: Task
    chat: Chat
    has_base: bool = False

    def sync(self, version: int) -> None:
        """Give the sampler the policy's weights after `version` steps.

        A sampler that takes adapters gets the frozen base once, and from then on the adapter alone.

        Raises:
            EngineError: the sampler cannot load them.
            StorageError: it takes them from a file, which cannot be written.
            ComponentError: it takes adapters, and the policy has none.
        """
        if not self.sampler.takes_adapters:
            self.sampler.load_weights(self.policy.weights(), version)
            return
        if self.policy.adapter is None:
            raise ComponentError("the engine takes adapters, and this run trains all weights", "set [model] lora")
        if not self.has_base:
            self.sampler.load_weights(self.policy.reference_weights(), version)
            self.has_base = True
        folder = self.directory.path / "adapter"
        self.ranks.on_rank0(lambda: self.policy.save_adapter(folder))
        self.sampler.load_adapter(folder, version)

    def close(self) -> None:
        """End the sampler."""
        self.sampler.close()


@dataclass(kw_only=True)
class RunContext(SamplingContext):
    """The built run. The loop knows these roles and no component's name.

    Attributes:
        pool: scores completions in killable processes.
        layout: makes batches of rollouts.
        prompts: sampled per step.
        env_pool: the environment that answers the model, if there is one.
        row_sources: choose the rows that a step trains on, by name, in order.
        trackers: sinks of metrics besides the run directory.
        source: gives the episodes of every step instead of the task and the environment.
        sets: the context as each of `[[eval.sets]]` needs it, by its name.
    """

    pool: RewardPool
    layout: Layout
    prompts: int
    env_pool: EnvPool | None = None
    row_sources: Mapping[str, RowSource] = field(default_factory=dict[str, RowSource])
    trackers: Sequence[Tracker] = ()
    source: EpisodeSource | None = None
    sets: Mapping[str, RunContext] = field(default_factory=dict[str, "RunContext"])

    def request_stop(self) -> None:
        """Request that the sampler and the source of episodes stop after this step. Called in a signal handler."""
        self.sampler.request_stop()
        if self.source is not None:
            self.source.request_stop()

    def state_dict(self, step: int, cursor: int) -> State:
        """Everything a resumed run needs to continue bit for bit.

        There is no generator state in it: every random stream derives from the seed and the step.
        """
        signals = {name: part.state_dict() for name, part in self.pipeline.stateful.items()}
        sources = {name: one.state_dict() for name, one in self.row_sources.items()}
        loop = {"step": step, "cursor": cursor, "data": self.data, "sources": sources, "task": self.task.state_dict()}
        return {"policy": self.policy.state_dict(), "signals": signals, "loop": loop}

    @property
    def data(self) -> dict[str, dict[str, Any]]:
        """Hash of each section's data; None for a task that has no `fingerprint`."""
        found: dict[str, dict[str, Any]] = {"task": {"data": self.task.fingerprint()}}
        hashes = {name: one.fingerprint() for name, one in self.row_sources.items()}
        found |= {name: {"data": data} for name, data in hashes.items() if data is not None}
        found |= {"eval": {name: one.task.fingerprint() for name, one in self.sets.items()}} if self.sets else {}
        return found | {"model": self._model}

    @cached_property
    def _model(self) -> dict[str, Any]:
        """Hashes of what a start reads of the model again: with an adapter the weights of its base, too."""
        from retrain.training.reference import sample_digest

        base = {} if self.policy.adapter is None else {"weights": sample_digest(self.policy.reference_weights())}
        return {**self.loaded.digests(), **base}

    def load_state_dict(self, state: State) -> tuple[int, int]:
        """Restore what `state_dict` saved; returns (step, cursor)."""
        self.restore(state)
        # A run of version 0.2 had one expert, and no other source.
        saved = state["loop"].get("sources", {"expert": state["loop"].get("experts")})
        for name, source in self.row_sources.items():
            self.restore_part(f"the rows of {name}", source, saved.get(name) or None)
        if learned := state["loop"].get("task"):
            self.task.load_state_dict(learned)
        return self.steps, int(state["loop"]["cursor"])

    def close(self) -> None:
        """End the processes of rewards and environment, the trackers and the sampler."""
        for pool in {id(one.pool): one.pool for one in (self, *self.sets.values())}.values():
            pool.close()
        if self.env_pool is not None:
            self.env_pool.close()
        for tracker in self.trackers:
            tracker.close()
        super().close()
