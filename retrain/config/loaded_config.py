"""A validated configuration with the components that it names: all that `retrain.run.build` builds a run from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from retrain import registry
from retrain.algorithms.graph.column_graph import contributing, hyper_of
from retrain.algorithms.graph.objective import Objective
from retrain.algorithms.graph.pipeline import Pipeline
from retrain.algorithms.transforms.token_stages import DEFAULT_CORRECTION
from retrain.config.document import Place
from retrain.config.positions import KeyPath
from retrain.config.presets import Preset
from retrain.config.schema import Config
from retrain.config.slots import Slot, mixed_labels
from retrain.engines.capability import engines_at
from retrain.errors import ConfigProblem
from retrain.functional.seeds import derive_seed
from retrain.protocols import Task
from retrain.registry import Component
from retrain.rewards.entry import Entry, unique_names
from retrain.system.files import expanded


@dataclass(frozen=True)
class LoadedConfig:
    """A valid configuration with its components; `retrain.run.build` builds a run from it.

    Attributes:
        file, text: path and content of the file.
        config: the sections, with defaults filled in.
        tables: tables of components, as written.
        slots: every key that names a component -> the component with its parameters, in the order of the file.
        places: key -> place in the file, or on the command line.
        warnings: settings that are valid but probably not intended.
        preset: the preset that `algorithm_mode` names, as applied; None without one.
        unread: keys that nothing in the run reads -> the error. `load` raises it, and a campaign raises it if no
            condition reads the key.
        sets: name of each of `[[eval.sets]]` -> the run's configuration with the keys of the set.
    """

    file: str
    text: str
    config: Config
    tables: Mapping[str, Any]
    slots: Mapping[Slot, Component]
    places: Mapping[KeyPath, Place]
    warnings: tuple[ConfigProblem, ...] = ()
    preset: Preset | None = None
    unread: Mapping[KeyPath, ConfigProblem] = field(default_factory=dict[KeyPath, ConfigProblem])
    sets: Mapping[str, LoadedConfig] = field(default_factory=dict[str, "LoadedConfig"])

    @property
    def name(self) -> str:
        """Default name of the run directory, without `[logging] name`."""
        return Path(self.file).stem

    @property
    def directory(self) -> Path:
        """The run directory."""
        return expanded(self.config.logging.dir) / (self.config.logging.name or self.name)

    @property
    def rewards(self) -> list[Entry]:
        """Rewards with their settings for the reward pool."""
        pairs = zip(self.config.rewards, self.all("reward"), strict=True)
        return [
            Entry(reward, float(reward.params["weight"]), entry.timeout_s, entry.concurrency) for entry, reward in pairs
        ]

    @property
    def division(self) -> tuple[int, list[int]]:
        """Number of prompts in a step, and number of rows that each source provides instead of further prompts."""
        return division(self.config, [*map(ratio_of, self.sources.values())])

    def task(self, seed: int) -> Task:
        """Build the task with a seed; with `[[environments]]` or `[[tasks]]` the mixture of their tasks."""
        tasks, entries = self.all("task"), self.config.environments or self.config.tasks
        if not entries:
            return tasks[0].build({"seed": seed})
        from retrain.environments.mixture import Mixture, WeightedTask

        named = zip(mixed_labels(self.config), tasks, entries, strict=True)
        parts = {
            # Each task has random numbers of its own, so that adding one does not change the problems of the others.
            label: WeightedTask(task.build({"seed": derive_seed(seed, label)}), e.weight)
            for label, task, e in named
        }
        return Mixture(seed, parts)

    @property
    def resources(self) -> dict[str, Any]:
        """Resources that a component may request by name and that depend only on the configuration."""
        training = self.config.training
        shared = training.model_dump(include={"seed", "max_tokens", "group_size", "temperature"})
        return {**shared, "total_steps": training.max_steps, "search_paths": self.config.plugins.search_paths}

    @property
    def overrides(self) -> list[str]:
        """Overrides from the command line, as `--set key=value`."""
        # The place of an override has line 0, and the flag in place of a file.
        return list(dict.fromkeys(key_place.file for key_place in self.places.values() if not key_place.line))

    def resolved(self) -> dict[str, Any]:
        """Return the complete configuration as JSON data: sections with defaults, tables, components by kind."""
        components: dict[str, list[dict[str, Any]]] = {}
        for slot, component in self.slots.items():
            row = {"name": component.name, "source": component.source, "params": dict(component.params)}
            components.setdefault(slot.kind, []).append(row)
        return {
            **self.config.model_dump(mode="json"),
            # A default of a plug-in may be an object that JSON does not have.
            **to_jsonable_python(self.tables, fallback=str),
            "components": to_jsonable_python(components, fallback=str),
        }

    @cached_property
    def pipeline(self) -> Pipeline:
        """The pipeline of an engine whose log-probs may differ from the trainer's; see `pipeline_of`."""
        return self.pipeline_of(self.objective(exact=False))

    @property
    def contributing(self) -> list[Component]:
        """Stages that the loss depends on, in order."""
        return contributing(self.pipeline.graph, {"advantages", *self.objective(exact=False).reads})

    def all(self, kind: str) -> tuple[Component, ...]:
        """Return the components of a kind that takes a list: transform, loss, reward, tracker."""
        return tuple(component for slot, component in self.slots.items() if slot.kind == kind)

    def one(self, kind: str) -> Component:
        """Return the component of a kind that takes one name: advantage, uncertainty, filter, reduction, task."""
        return self.all(kind)[0]

    def optional(self, kind: str) -> Component | None:
        """Return the component of a kind that may be unset (algorithm, or engine = "auto"), or None."""
        return next(iter(self.all(kind)), None)

    @cached_property
    def in_use(self) -> Mapping[Slot, Component]:
        """`slots` without the sources that provide only expert rows, if no loss term trains on expert rows."""
        if "expert" in self.objective(exact=False).sources:
            return self.slots
        return {
            slot: component
            for slot, component in self.slots.items()
            if slot.kind != "source" or brings(component, "rollouts")
        }

    @cached_property
    def sources(self) -> Mapping[str, Component]:
        """Sources in use, by unique name."""
        used = [source for slot, source in self.in_use.items() if slot.kind == "source"]
        return dict(zip(unique_names([source.name for source in used]), used, strict=True))

    def objective(self, exact: bool) -> Objective:
        """Return the objective that an update minimizes.

        Args:
            exact: True if the engine's log-probs equal the trainer's. If False, or if a source brings rollouts of other
                weights, truncated importance weights are added. They are not added if the chain has importance
                weights, or if a loss term reads the sampler's log-probs. Corrections that only drop tokens are kept
                in addition.
        """
        exact = exact and not any(brings(source, "rollouts") for source in self.all("source"))
        chain = self.all("transform")
        corrections = chain[len(self._credit_chain()) :]
        anchored = any("sampler_logprobs" in term.reads for term in self.all("loss") if term.params["weight"] != 0)
        # One importance weight is enough: two would multiply.
        drop = [registry.transform.traits_of(stage).drops_only for stage in filter(is_correction, chain)]
        if not exact and not anchored and all(drop):
            usual = self.named("transform", DEFAULT_CORRECTION)
            corrections = (*corrections, usual) if usual else corrections
        # The last reduction is `[mix] sft_reduction` if the file sets that, else the only one.
        return Objective(self.all("loss"), self.one("reduction"), corrections, self.all("reduction")[-1], self.signal)

    def _credit_chain(self) -> tuple[Component, ...]:
        """Return the transforms without trailing corrections: the update computes them from its own forward pass."""
        chain = self.all("transform")
        # A correction before another transform stays in the chain, because that transform reads its result.
        return chain[: max((length for length, stage in enumerate(chain, 1) if not is_correction(stage)), default=0)]

    @property
    def credit(self) -> tuple[Component, ...]:
        """The stages of credit assignment: the advantage, or the algorithm in its place, and the transforms."""
        return (self.optional("algorithm") or self.one("advantage"), *self._credit_chain())

    def pipeline_of(
        self,
        objective: Objective | None = None,
        *,
        credit: Sequence[Component] | None = None,
        group_filter: Component | None = None,
        given: frozenset[str] = frozenset(),
    ) -> Pipeline:
        """Return the pipeline of credit assignment, with the signals that it reads.

        Args:
            objective: an objective whose signals are computed as well.
            credit: stages in place of the run's `credit`.
            group_filter: filter in place of the run's.
            given: columns of batches besides the base columns.
        Raises:
            ComponentError: nothing computes a column that is read.
        """
        stages = self.credit if credit is None else credit
        # Only the `ctx` of a plain function shows the parameters of other transforms.
        has_context = any(stage.contract == "context" for stage in stages)
        # Sorted, because the order of a set of texts differs between processes, and ranks compute together.
        signals = sorted(objective.signals) if objective else ()
        return Pipeline.resolve(
            stages,
            group_filter or self.one("filter"),
            self.signal,
            observed=tuple(dict.fromkeys((*self.config.logging.observe, *signals))),
            hyper=hyper_of(lambda name: self.named("transform", name)) if has_context else {},
            given=given,
        )

    def method(self) -> str:
        """Name advantage, transforms and the loss terms with a weight, as `grpo, gtpo > sepa, loss ppo_clip`."""
        chain = " > ".join(transform.name for transform in self.all("transform"))
        terms = [term.name for term in self.all("loss") if term.params["weight"] != 0]
        return f"{', '.join(filter(None, (self.credit[0].name, chain)))}, loss {' + '.join(terms)}"

    def named(self, kind: str, name: str) -> Component | None:
        """Return a registered component with the parameters of its table; None if the name is not registered."""
        if name not in registry.names(kind):
            return None
        component = registry.find(kind, name)
        return component.bind(component.takes(self.tables.get(component.table, {})))

    def engines(self) -> list[Component]:
        """Return the engine that the configuration names, or else all that "auto" may choose for this model."""
        named = self.optional("engine")
        engines = [named] if named else [self.named("engine", name) for name in engines_at(self.config.model.path)]
        return [engine for engine in engines if engine]

    def signal(self, column: str) -> Component | None:
        """Return the signal, or the uncertainty, that computes a column; None if nothing does."""
        return self.one("uncertainty") if column == "uncertainty" else self.named("signal", column)


def is_correction(stage: Component) -> bool:
    """Return True for a transform that corrects for the mismatch of sampler and trainer (trait `correction`)."""
    return registry.transform.traits_of(stage).correction


def reward_columns(rewards: Sequence[Component]) -> list[tuple[str, float]]:
    """Return name and weight of each column of `reward_parts`; the name is its key in `Rollout.parts`."""
    columns: list[tuple[str, float]] = []
    for name, reward in zip(unique_names([reward.name for reward in rewards]), rewards, strict=True):
        weight, parts = float(reward.params["weight"]), registry.reward.traits_of(reward).parts
        parts_of_score = parts(reward.params) if parts else {}
        columns += [(f"{name}/{part}", weight * share) for part, share in parts_of_score.items()] or [(name, weight)]
    return columns


def division(config: Config, ratios: Sequence[float]) -> tuple[int, list[int]]:
    """Divide the rows of a step between prompts and sources.

    Args:
        config: the sections.
        ratios: share of the step's rows that each source provides.
    Returns:
        (number of prompts, number of rows of each source); the rows of sources replace prompts.
    """
    rows = config.training.batch_size * config.training.group_size
    # 1e-9 absorbs rounding: 0.07 * 100 is 7.000000000000001, which `ceil` would make 8.
    source_rows = [ceil(ratio * rows - 1e-9) for ratio in ratios]
    # Rounded down, so that a step never has more rows than batch_size x group_size.
    return (rows - sum(source_rows)) // config.training.group_size, source_rows


def ratio_of(source: Component) -> float:
    """Return the share of a step's rows that a source provides in place of prompts."""
    key = registry.source.traits_of(source).ratio
    return float(source.params[key]) if key else 0.0


def brings(source: Component, rows: str) -> bool:
    """Return True if a source may provide rows of this sort: "rollouts" or "expert"."""
    return rows in registry.source.traits_of(source).brings
