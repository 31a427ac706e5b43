"""Objects of a built run: `TrainState` is what training changes, and `RunContext` all that its loop uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from retrain.errors import ComponentError
from retrain.protocols import Ranks, RowSource, Sampler, StatefulComponent, Task, Tracker
from retrain.types import Batch, Metrics, Observer, Rollout, State

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from retrain.algorithms.graph.objective import Objective
    from retrain.algorithms.graph.pipeline import Pipeline
    from retrain.config.loaded_config import LoadedConfig
    from retrain.config.schema import Config
    from retrain.environments.env_pool import EnvPool
    from retrain.registry import Component
    from retrain.rewards.pool import RewardPool
    from retrain.run.findings import RunFindings
    from retrain.storage.run_directory import RunDirectory
    from retrain.training.chat import Chat
    from retrain.training.layout import Layout
    from retrain.training.model.loading import Loaded
    from retrain.training.policy import TorchPolicy


class EpisodeSource(Protocol):
    """Source of episodes that another program plays, such as a client of `retrain serve`."""

    def rollouts(self) -> list[Rollout]:
        """Return the episodes of the next step."""
        ...

    def request_stop(self) -> None:
        """Stop waiting for episodes. Called in a signal handler."""
        ...


class Credited(NamedTuple):
    """A batch with its advantages.

    Attributes:
        batch: the batch with the columns of signals and credit.
        keep: [N] bool, the rows that the filter keeps.
        metrics: metrics of the components.
        dropped_metrics: the filter's metrics about the groups that it drops.
    """

    batch: Batch
    keep: Tensor
    metrics: Metrics
    dropped_metrics: Metrics


BASE_DIGESTS = "base_digests.json"
"""File in the folder of an adapter, with `TrainState.digests`."""


@dataclass(kw_only=True)
class TrainState:
    """Everything that training changes, and everything needed to export it.

    It has no sampler, rewards or trackers.

    Attributes:
        config: the resolved configuration.
        run: the run directory.
        ranks: the processes that train this model together.
        loaded: model and tokenizer, with the token ids that end a completion.
        policy: the model in training.
        engine: the engine that samples from the policy, not yet built.
        plan: the configuration with its components.
        resources: objects that a component may ask for, by name.
        pipeline: credit assignment, from rewards to advantages per token.
        objective: the loss that the update minimizes.
        steps: number of finished steps.
        final: folder of the final model if the weights come from it, otherwise None. A final model
            does not hold the state of signals.
    """

    config: Config
    run: Path
    ranks: Ranks
    loaded: Loaded
    policy: TorchPolicy
    engine: Component
    plan: LoadedConfig
    resources: Mapping[str, Any]
    pipeline: Pipeline
    objective: Objective
    steps: int = 0
    final: Path | None = None

    def credit(self, batch: Batch, *, begins_step: bool = False) -> Credited:
        """Compute the credit of a batch, and the rows that the filter keeps.

        Args:
            batch: rollouts, and expert rows.
            begins_step: first call the components' `before`. A round of resampling is credited without it, from the
                state after the last step.
        """
        # Sorted, because the order of a set of texts differs between processes, and ranks compute together.
        if columns := sorted(self.pipeline.policy_columns):
            batch = batch.replace(**self.policy.logprobs(batch, columns))
        metrics = self.pipeline.before(batch) if begins_step else {}
        batch, reported = self.pipeline.credit(batch)
        keep, dropped_metrics = self.pipeline.informative(batch)
        return Credited(batch, keep, metrics | reported, dropped_metrics)

    # Cached, because hashing reads all weights, and what is hashed does not change.
    @cached_property
    def digests(self) -> dict[str, Any]:
        """Hashes of the model files that are read again when the run is resumed or opened.

        With an adapter this includes the base's weights, which the checkpoint does not hold.
        """
        from retrain.training.reference import sample_digest

        # Without an adapter the checkpoint holds all weights itself.
        base = {} if self.policy.adapter is None else {"weights": sample_digest(self.policy.reference_weights())}
        return {**self.loaded.digests(), **base}

    def restore(self, state: State, observe: Observer) -> None:
        """Load policy and signals from a checkpoint; warn of signals that it does not hold."""
        self.policy.load_state_dict(state["policy"])
        for name, part in self.pipeline.stateful.items():
            _restore_part(name, part, state["signals"].get(name), observe)
        self.steps = int(state["loop"]["step"])


def _restore_part(name: str, part: StatefulComponent | RowSource, saved: State | None, observe: Observer) -> None:
    """Load the saved state of a component, or warn that there is none."""
    if saved is not None:
        part.load_state_dict(saved)
        return
    text = f"the checkpoint has no state of {name}, which therefore starts from its initial state"
    observe("message", {"text": text, "level": "warning"})


@dataclass(kw_only=True)
class RunContext:
    """Everything that the training loop uses. The loop calls these roles and names no component.

    A context for sampling only has no rewards, environment, row sources and trackers.

    Attributes:
        trained: model, credit and loss.
        config: the resolved configuration; for one of `[[eval.sets]]` that of the set.
        directory: the run directory, to which all files are written.
        observe: receives every event.
        sampler: the built engine.
        task: source of problems; it also makes a problem of a prompt that a user types.
        chat: renders prompts.
        pool: worker processes that score completions.
        layout: turns rollouts into batches of tensors.
        prompts: number of prompts sampled per step.
        env_pool: processes of the environment; None without one.
        row_sources: sources that change which rows a step trains on, by name, in the order of their
            calls.
        trackers: receivers of metrics besides the run directory.
        episode_source: provides the episodes of every step, instead of task and environment; otherwise None.
        sets: context for each of `[[eval.sets]]`, by name.
        findings: says what is wrong with the run; None on other ranks than 0, and if they are switched off.
        has_base: the sampler takes adapters, and has loaded the base model already.
    """

    trained: TrainState
    config: Config
    directory: RunDirectory
    observe: Observer
    sampler: Sampler
    task: Task
    chat: Chat
    pool: RewardPool
    layout: Layout
    prompts: int
    env_pool: EnvPool | None = None
    row_sources: Mapping[str, RowSource] = field(default_factory=dict[str, RowSource])
    trackers: Sequence[Tracker] = ()
    episode_source: EpisodeSource | None = None
    sets: Mapping[str, RunContext] = field(default_factory=dict[str, "RunContext"])
    findings: RunFindings | None = None
    has_base: bool = False

    @property
    def ranks(self) -> Ranks:
        """The processes that train this model together."""
        return self.trained.ranks

    def sync(self, version: int) -> None:
        """Load the policy's weights after `version` steps into the sampler.

        A sampler that takes adapters loads the frozen base once, and afterwards only the adapter.

        Raises:
            EngineError: the sampler cannot load the weights.
            StorageError: the adapter's file cannot be written.
            ComponentError: the sampler takes adapters, and the policy has none.
        """
        policy = self.trained.policy
        if not self.sampler.takes_adapters:
            self.sampler.load_weights(policy.weights(), version)
            return
        if policy.adapter is None:
            raise ComponentError("the engine takes adapters, and this run trains all weights", "set [model] lora")
        if not self.has_base:
            self.sampler.load_weights(policy.reference_weights(), version)
            self.has_base = True
        # One folder for all steps, because each adapter replaces the last one.
        folder = self.directory.path / "adapter"
        self.ranks.on_rank0(lambda: policy.save_adapter(folder))
        self.sampler.load_adapter(folder, version)

    def after_update(self, batch: Batch | None) -> Metrics:
        """Show the trained batch to the row sources, on rank 0, and return their metrics; {} if no row was trained."""
        metrics: Metrics = {}
        if batch is None:
            return metrics
        for source in self.row_sources.values():
            metrics |= self.ranks.on_rank0(partial(source.after, batch))
        return metrics

    def request_stop(self) -> None:
        """Request sampler and episode source to stop after this step. Called in a signal handler."""
        self.sampler.request_stop()
        if self.episode_source is not None:
            self.episode_source.request_stop()

    def state_dict(self, step: int, cursor: int) -> State:
        """Return the state from which a resumed run continues bit for bit.

        It holds no state of random generators, because all draws derive from the seed and the step.
        """
        signals = {name: part.state_dict() for name, part in self.trained.pipeline.stateful.items()}
        sources = {name: source.state_dict() for name, source in self.row_sources.items()}
        loop = {"step": step, "cursor": cursor, "data": self.data, "sources": sources, "task": self.task.state_dict()}
        return {"policy": self.trained.policy.state_dict(), "signals": signals, "loop": loop}

    @property
    def data(self) -> dict[str, dict[str, Any]]:
        """Hashes of the data and the model, by section; None for a task without `fingerprint`."""
        hashes_by_section: dict[str, dict[str, Any]] = {"task": {"data": self.task.fingerprint()}}
        hashes = {name: source.fingerprint() for name, source in self.row_sources.items()}
        hashes_by_section |= {name: {"data": data} for name, data in hashes.items() if data is not None}
        if self.sets:
            hashes_by_section["eval"] = {name: evaluated.task.fingerprint() for name, evaluated in self.sets.items()}
        return hashes_by_section | {"model": self.trained.digests}

    def load_state_dict(self, state: State) -> tuple[int, int]:
        """Restore the state that `state_dict` returned, and return (step, cursor)."""
        self.trained.restore(state, self.observe)
        saved = state["loop"]["sources"]
        for name, source in self.row_sources.items():
            _restore_part(f"the rows of {name}", source, saved.get(name), self.observe)
        # Most tasks have no state.
        if learned := state["loop"].get("task"):
            self.task.load_state_dict(learned)
        return self.trained.steps, int(state["loop"]["cursor"])

    def close(self) -> None:
        """Close the processes of rewards and environment, the trackers and the sampler."""
        # Most evaluation sets share the pool of training, which is closed once.
        for pool in {id(context.pool): context.pool for context in (self, *self.sets.values())}.values():
            pool.close()
        if self.env_pool is not None:
            self.env_pool.close()
        for tracker in self.trackers:
            tracker.close()
        self.sampler.close()
