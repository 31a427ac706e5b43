"""Resolve the component names of a configuration to bound components; `LoadedConfig` holds both."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from pathlib import Path as FilePath
from typing import Any

from pydantic_core import to_jsonable_python

from retrain import registry
from retrain.algorithms.graph.column_graph import Stage, contributing, hyper_of, plan
from retrain.algorithms.graph.objective import Objective
from retrain.algorithms.graph.pipeline import Pipeline, Stages
from retrain.algorithms.transforms.token_stages import DEFAULT_CORRECTION, transform_chain
from retrain.config.document import Place
from retrain.config.positions import Path
from retrain.config.presets import Preset, preset_names
from retrain.config.schema import Config
from retrain.engines.capability import engines_at
from retrain.errors import ConfigProblem
from retrain.functional.seeds import derive_seed
from retrain.protocols import Task
from retrain.registry import Bound
from retrain.rewards.entry import Entry, unique_names
from retrain.system.files import expanded
from retrain.types import BASE_COLUMNS

AUTO = "auto"
"""Value of `[rollout] engine` for which the model decides."""


MIXED = {
    "environments": {"environment": ("name", "params"), "task": ("task", "task_params")},
    "tasks": {"task": ("name", "params")},
}
"""For each section whose entries are mixed, and each kind: (the key of an entry that names the component, the key with
its parameters)."""


def labels(config: Config) -> tuple[str, ...]:
    """Return the labels of a run's environments; a single environment has the label ""."""
    return mixed_labels(config) if config.environments else ("",) if config.environment.name else ()


def mixed_labels(config: Config) -> tuple[str, ...]:
    """Return the labels of the entries of `[[environments]]` or `[[tasks]]`."""
    return tuple(entry.label or entry.name for entry in config.environments or config.tasks)


def needs_own_interpreter(config: Config, environment: str | None) -> bool:
    """Return True if only the interpreter of `[environment] python` can import the environment of this name."""
    return config.environment.python is not None and registry.is_dotted(str(environment))


def is_correction(stage: Bound) -> bool:
    """Return True for a transform that corrects for the mismatch of sampler and trainer (trait `correction`)."""
    return registry.transform.traits_of(stage.component).correction


def _is_weight(stage: Bound) -> bool:
    """Return True for a correction that multiplies by importance weights; a run has at most one."""
    return is_correction(stage) and not registry.transform.traits_of(stage.component).drops_only


@dataclass(frozen=True)
class Slot:
    """A place in the configuration that names a component.

    Attributes:
        kind: kind of the component.
        name: registered name or dotted path.
        path: path of the key that names the component.
        params_path, params: path and content of the table with parameters next to the name.
        inline: True if that table also serves registered names; otherwise only dotted paths.
        weight: weight of the entry; None if it sets none.
    """

    kind: str
    name: str
    path: Path
    params_path: Path = ()
    params: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)
    inline: bool = False
    weight: float | None = None


@dataclass
class Resolved:
    """Components of a run with their parameters.

    Attributes:
        tables: tables of components, as written.
        slots: every place that names a component -> that component, in the order of the configuration.
        observe: columns of `[logging] observe`.
        written: keys set in a file or on the command line.
    """

    tables: Mapping[str, Any]
    slots: Mapping[Slot, Bound] = field(default_factory=dict[Slot, Bound])
    observe: tuple[str, ...] = ()
    written: Collection[Path] = ()

    @cached_property
    def bound(self) -> Mapping[str, Sequence[Bound]]:
        """Components by kind."""
        by_kind: dict[str, list[Bound]] = {}
        for slot, component in self.slots.items():
            by_kind.setdefault(slot.kind, []).append(component)
        return by_kind

    @cached_property
    def pipeline(self) -> Pipeline:
        """The pipeline of an engine whose log-probs may differ from the trainer's; see `pipeline_of`."""
        return self.pipeline_of(self.objective(exact=False))

    @property
    def contributing(self) -> list[Stage]:
        """Stages that the loss depends on, in order."""
        return contributing(self.pipeline.graph, {"advantages", *self.objective(exact=False).reads})

    def all(self, kind: str) -> tuple[Bound, ...]:
        """Return the components of a kind that takes a list: transform, loss, reward, tracker."""
        return tuple(self.bound.get(kind, ()))

    def every(self) -> Iterator[Bound]:
        """Yield every component that the configuration names."""
        return (bound for several in self.bound.values() for bound in several)

    def one(self, kind: str) -> Bound:
        """Return the component of a kind that takes one name: advantage, uncertainty, filter, reduction, task."""
        return self.bound[kind][0]

    def optional(self, kind: str) -> Bound | None:
        """Return the component of a kind that may be unset (algorithm, or engine = "auto"), or None."""
        return next(iter(self.all(kind)), None)

    @cached_property
    def in_use(self) -> Mapping[Slot, Bound]:
        """`slots` without the sources that provide only expert rows, if no loss term trains on expert rows."""
        if "expert" in self.objective(exact=False).sources:
            return self.slots
        return {
            slot: component
            for slot, component in self.slots.items()
            if slot.kind != "source" or brings(component, "rollouts")
        }

    @cached_property
    def sources(self) -> Mapping[str, Bound]:
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
        if not exact and not anchored and not any(map(_is_weight, chain)):
            usual = self.named("transform", DEFAULT_CORRECTION)
            corrections = (*corrections, usual) if usual else corrections
        return Objective(self.all("loss"), self.one("reduction"), corrections, self.all("reduction")[-1], self.signal)

    def _credit_chain(self) -> tuple[Bound, ...]:
        """Return the chain without trailing corrections: the update computes them from its own forward pass."""
        chain = self.all("transform")
        return chain[: max((length for length, stage in enumerate(chain, 1) if not is_correction(stage)), default=0)]

    def stages(self, also: Collection[str] = ()) -> Stages:
        """Return the components of the credit pipeline.

        Args:
            also: columns to compute in addition to `[logging] observe`.
        """
        chain, algorithm = self._credit_chain(), self.optional("algorithm")
        has_context = any(stage.component.contract == "context" for stage in (*chain, algorithm) if stage)
        return Stages(
            self.one("advantage"),
            chain,
            algorithm,
            self.one("uncertainty"),
            self.one("filter"),
            observed=(*dict.fromkeys((*self.observe, *sorted(also))),),
            hyper=hyper_of(lambda name: self.named("transform", name)) if has_context else {},
        )

    def pipeline_of(self, objective: Objective) -> Pipeline:
        """Return the credit stages with the signals that they and an objective read.

        Raises:
            ComponentError: nothing computes a column that is read.
        """
        return Pipeline.resolve(self.stages(objective.signals), self.signal)

    def check_observed(self) -> None:
        """Raise ComponentError if `[logging] observe` names a column that nothing computes."""
        plan(self.observe, self.one("uncertainty"), self.signal, BASE_COLUMNS)

    def described(self) -> dict[str, list[dict[str, Any]]]:
        """Return name, source and parameters of every component, by kind."""
        return {
            kind: [
                {"name": component.name, "source": component.component.source, "params": dict(component.params)}
                for component in bound
            ]
            for kind, bound in self.bound.items()
        }

    def method(self) -> str:
        """Name advantage, transforms and the loss terms with a weight, as `grpo, gtpo > sepa, loss ppo_clip`."""
        credit = self.optional("algorithm") or self.one("advantage")
        chain = " > ".join(transform.name for transform in self.all("transform"))
        terms = [term.name for term in self.all("loss") if term.params["weight"] != 0]
        return f"{', '.join(filter(None, (credit.name, chain)))}, loss {' + '.join(terms)}"

    def named(self, kind: str, name: str) -> Bound | None:
        """Return a registered component with the parameters of its table; None if the name is not registered."""
        if name not in registry.names(kind):
            return None
        component = registry.find(kind, name)
        return component.bind(component.takes(self.tables.get(component.table, {})))

    def engines(self, model: str) -> list[Bound]:
        """Return the engine that the configuration names, or else all that "auto" may choose for this model."""
        named = self.optional("engine")
        engines = [named] if named else [self.named("engine", name) for name in engines_at(model)]
        return [engine for engine in engines if engine]

    def signal(self, name: str) -> Bound | None:
        """Return the signal that computes the column of this name, or None."""
        return self.named("signal", name)


def reward_columns(rewards: Sequence[Bound]) -> list[tuple[str, float]]:
    """Return name and weight of each column of `reward_parts`; the name is its key in `Rollout.parts`."""
    columns: list[tuple[str, float]] = []
    for name, reward in zip(unique_names([reward.name for reward in rewards]), rewards, strict=True):
        weight, parts = float(reward.params["weight"]), registry.reward.traits_of(reward.component).parts
        parts_of_score = parts(reward.params) if parts else {}
        columns += [(f"{name}/{part}", weight * share) for part, share in parts_of_score.items()] or [(name, weight)]
    return columns


def slots(config: Config, tables: Mapping[str, Any]) -> Iterator[Slot]:
    """Yield every key that names a component: keys of sections, and parameters of tables annotated with a kind."""
    mix = next((section for section in MIXED if getattr(config, section)), "")
    yield from _expert_slots(config)
    for kind in registry.KINDS.values():
        mixed = MIXED[mix].get(kind.name) if mix else None
        section, key, params_key = (mix, *mixed) if mixed else (*(kind.key or ("", "")), kind.params)
        several = getattr(config, section, ())
        whole = not isinstance(several, tuple)
        for index, entry in enumerate((several,) if whole else several):
            around: Path = (section,) if whole else (section, index)
            params = getattr(entry, params_key) if params_key else {}
            at = (*around, params_key) if params_key else ()
            if kind.name == "environment" and needs_own_interpreter(config, getattr(entry, key)):
                continue
            for index_path, name in _named(kind.name, getattr(entry, key)):
                weight = None if mixed else getattr(entry, "weight", None)
                yield Slot(
                    kind.name, name, (*around, key, *index_path), at, params, bool(mixed) or key == "name", weight
                )
        for component in registry.components(tables=tables):
            table = tables.get(component.table)
            for key, info in component.schema.model_fields.items():
                if kind in info.metadata and isinstance(table, dict) and isinstance(name := table.get(key), str):
                    yield Slot(kind.name, name, (component.table, key))


def _expert_slots(config: Config) -> Iterator[Slot]:
    """Yield a source for `[expert]`, or for each `[[expert]]`, that names a file."""
    for index, entry in enumerate(config.experts):
        if entry.path is not None:
            at: Path = ("expert", index) if isinstance(config.expert, tuple) else ("expert",)
            yield Slot("source", "expert", (*at, "path"), at, entry.model_dump(), inline=True)


def _named(kind: str, value: str | tuple[str, ...] | None) -> Iterator[tuple[Path, str]]:
    """Yield the component names in the value of a key with their indices; chains are expanded.

    Presets and "auto" are skipped, because they are not components.
    """
    nothing = {"engine": (AUTO,), "algorithm": preset_names()}.get(kind, ())
    if value is None or value in nothing:
        return
    names = transform_chain(value) if kind == "transform" else (value,) if isinstance(value, str) else value
    for index, name in enumerate(names):
        yield (() if isinstance(value, str) else (index,)), name


def needs_import(slot: Slot) -> bool:
    """Return True if finding the component imports new code: a dotted path, or an entry point not yet loaded."""
    imported = registry.is_dotted(slot.name) or slot.name in registry.names(slot.kind)
    return imported and not registry.is_registered(slot.kind, slot.name)


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
    return (rows - sum(source_rows)) // config.training.group_size, source_rows


def ratio_of(source: Bound) -> float:
    """Return the share of a step's rows that a source provides in place of prompts."""
    key = registry.source.traits_of(source.component).ratio
    return float(source.params[key]) if key else 0.0


def brings(source: Bound, rows: str) -> bool:
    """Return True if a source may provide rows of this sort: "rollouts" or "expert"."""
    return rows in registry.source.traits_of(source.component).brings


@dataclass(frozen=True)
class LoadedConfig:
    """A valid configuration.

    Attributes:
        file, text: path and content of the file.
        config: the sections, with defaults filled in.
        tables: tables of components, as written.
        components: components that the configuration names, bound to their parameters.
        places: key -> place in the file.
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
    components: Resolved
    places: Mapping[Path, Place]
    warnings: tuple[ConfigProblem, ...]
    preset: Preset | None = None
    unread: Mapping[Path, ConfigProblem] = field(default_factory=dict[Path, ConfigProblem])
    sets: Mapping[str, LoadedConfig] = field(default_factory=dict[str, "LoadedConfig"])

    @property
    def name(self) -> str:
        """Default name of the run directory, without `[logging] name`."""
        return FilePath(self.file).stem

    @property
    def directory(self) -> FilePath:
        """The run directory."""
        return expanded(self.config.logging.dir) / (self.config.logging.name or self.name)

    @property
    def rewards(self) -> list[Entry]:
        """Rewards with their settings for the reward pool."""
        pairs = zip(self.config.rewards, self.components.all("reward"), strict=True)
        return [
            Entry(bound, float(bound.params["weight"]), entry.timeout_s, entry.concurrency) for entry, bound in pairs
        ]

    @property
    def objective(self) -> Objective:
        """Objective that an update minimizes, for an engine whose log-probs equal the trainer's."""
        return self.components.objective(exact=True)

    @property
    def division(self) -> tuple[int, int]:
        """Number of prompts in a step, and number of rows that sources provide instead of further prompts."""
        prompts, source_rows = division(self.config, [*map(ratio_of, self.components.sources.values())])
        return prompts, sum(source_rows)

    def task(self, seed: int) -> Task:
        """Build the task with a seed; with `[[environments]]` or `[[tasks]]` the mixture of their tasks."""
        bound, entries = self.components.all("task"), self.config.environments or self.config.tasks
        if not entries:
            return bound[0].build({"seed": seed})
        from retrain.environments.mixture import Mixture, WeightedTask

        named = zip(mixed_labels(self.config), bound, entries, strict=True)
        parts = {
            label: WeightedTask(task.build({"seed": derive_seed(seed, label)}), e.weight) for label, task, e in named
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
        return list(dict.fromkeys(place.file for place in self.places.values() if not place.line))

    def resolved(self) -> dict[str, Any]:
        """Return the complete configuration as JSON data: sections with defaults, tables, bound components."""
        return {
            **self.config.model_dump(mode="json"),
            **to_jsonable_python(self.tables, fallback=str),
            "components": to_jsonable_python(self.components.described(), fallback=str),
        }
