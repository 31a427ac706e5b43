"""What a run is made of, once everything is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from retrain.errors import ComponentError
from retrain.protocols import Policy, Ranks, Sampler, StatefulComponent, Task, Tracker
from retrain.types import ExpertRow, Observer, Rollout, State

if TYPE_CHECKING:
    from pathlib import Path

    from retrain.algorithms.graph.objective import Objective
    from retrain.algorithms.graph.pipeline import Pipeline
    from retrain.config.resolve import Resolved
    from retrain.config.schema import Config
    from retrain.data.expert_file import ExpertBuffer
    from retrain.environments.world import World
    from retrain.registry import Bound
    from retrain.run.rank_edges import Pool
    from retrain.storage.run_directory import RunDirectory
    from retrain.training.chat import Chat
    from retrain.training.layout import Layout
    from retrain.training.model.loading import Loaded


class EpisodeSource(Protocol):
    """Where the episodes of a step come from, if the run does not play them itself."""

    def rollouts(self) -> list[Rollout]: ...

    def hurry(self) -> None: ...


class Experts(NamedTuple):
    """Where the expert rows of a step come from.

    Attributes:
        per_step: how many a step trains on.
        buffer: the rows in their order.
        data: hash of what the expert says.
    """

    per_step: int
    buffer: ExpertBuffer[ExpertRow]
    data: str


@dataclass(kw_only=True)
class Trained:
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

    def restore_part(self, name: str, part: StatefulComponent | ExpertBuffer[ExpertRow], saved: State | None) -> None:
        """Give a part its saved state, or say that there is none."""
        if saved is not None:
            part.load_state_dict(saved)
            return
        text = f"the checkpoint's run did not have {name}: it starts anew"
        self.observe("message", {"text": text, "level": "warning"})


@dataclass(kw_only=True)
class SamplingParts(Trained):
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
        self.ranks.first(lambda: self.policy.save_adapter(folder))
        self.sampler.load_adapter(folder, version)

    def close(self) -> None:
        """End the sampler."""
        self.sampler.close()


@dataclass(kw_only=True)
class Parts(SamplingParts):
    """The built run. The loop knows these roles and no component's name.

    Attributes:
        pool: scores completions in killable processes.
        layout: makes batches of rollouts.
        prompts: sampled per step.
        world: the environment that answers the model, if there is one.
        experts: where expert rows come from, if a loss term trains on them.
        trackers: sinks of metrics besides the run directory.
        source: gives the episodes of every step instead of the task and the environment.
        sets: the parts as each of `[[eval.sets]]` needs them, by its name.
    """

    pool: Pool
    layout: Layout
    prompts: int
    world: World | None = None
    experts: Experts | None = None
    trackers: Sequence[Tracker] = ()
    source: EpisodeSource | None = None
    sets: Mapping[str, Parts] = field(default_factory=dict[str, "Parts"])

    def hurry(self) -> None:
        """The run is to stop after this step. From a signal handler."""
        self.sampler.hurry()
        if self.source is not None:
            self.source.hurry()

    def state_dict(self, step: int, cursor: int) -> State:
        """Everything a resumed run needs to continue bit for bit.

        There is no generator state in it: every random stream derives from the seed and the step.
        """
        signals = {name: part.state_dict() for name, part in self.pipeline.stateful.items()}
        experts = self.experts.buffer.state_dict() if self.experts is not None else {}
        loop = {"step": step, "cursor": cursor, "data": self.data, "experts": experts, "task": self.task.state_dict()}
        return {"policy": self.policy.state_dict(), "signals": signals, "loop": loop}

    @property
    def data(self) -> dict[str, dict[str, Any]]:
        """Hash of each section's data; None for a task that has no `fingerprint`."""
        found: dict[str, dict[str, Any]] = {"task": {"data": self.task.fingerprint()}}
        found |= {"expert": {"data": self.experts.data}} if self.experts is not None else {}
        found |= {"eval": {name: one.task.fingerprint() for name, one in self.sets.items()}} if self.sets else {}
        return found | {"model": self._model}

    @cached_property
    def _model(self) -> dict[str, Any]:
        """Hashes of what a start reads of the model again: with an adapter the weights of its base, too."""
        from retrain.training.reference import sample_digest

        base = {} if self.policy.adapter is None else {"weights": sample_digest(self.policy.reference_weights())}
        return {**self.loaded.digests(), **base}

    def load_state_dict(self, state: State) -> tuple[int, int]:
        """Restore the parts; returns (step, cursor)."""
        self.restore(state)
        if self.experts is not None:
            self.restore_part("the expert's rows", self.experts.buffer, state["loop"]["experts"] or None)
        if learned := state["loop"].get("task"):
            self.task.load_state_dict(learned)
        return self.steps, int(state["loop"]["cursor"])

    def close(self) -> None:
        """End the processes of rewards and environment, the trackers and the sampler."""
        for pool in {id(one.pool): one.pool for one in (self, *self.sets.values())}.values():
            pool.close()
        if self.world is not None:
            self.world.close()
        for tracker in self.trackers:
            tracker.close()
        super().close()
