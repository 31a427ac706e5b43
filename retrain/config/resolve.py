"""From names in a configuration to bound components, and the loaded configuration that holds both."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path as FilePath
from typing import Any

from pydantic_core import to_jsonable_python

from retrain import registry
from retrain.algorithms.graph.column_graph import Stage, plan
from retrain.algorithms.graph.objective import Objective
from retrain.algorithms.graph.pipeline import Pipeline, Stages
from retrain.algorithms.graph.plain_functions import hyper_of
from retrain.algorithms.transforms import transform_chain
from retrain.config.document import Place
from retrain.config.positions import Path
from retrain.config.presets import Preset, preset_names
from retrain.config.schema import Config
from retrain.engines.capability import engines_at
from retrain.errors import ConfigProblem
from retrain.functional.seeds import derive_seed
from retrain.protocols import Task
from retrain.registry import Bound
from retrain.rewards.pool import Entry
from retrain.types import BASE_COLUMNS

AUTO = "auto"
"""`[rollout] engine` when the model decides."""


MIXED = {
    "environments": {"environment": ("name", "params"), "task": ("task", "task_params")},
    "tasks": {"task": ("name", "params")},
}
"""Lists of what a run mixes: keys of an entry that name a component, and those with its parameters, by kind."""


def labels(config: Config) -> tuple[str, ...]:
    """Of the environments of a run; a single one has the label ""."""
    return mixed_labels(config) if config.environments else ("",) if config.environment.name else ()


def mixed_labels(config: Config) -> tuple[str, ...]:
    """Of the entries of `[[environments]]` or `[[tasks]]`."""
    return tuple(entry.label or entry.name for entry in config.environments or config.tasks)


def is_elsewhere(config: Config, environment: str | None) -> bool:
    """Whether only the interpreter of `[environment] python` can import the environment of this name."""
    return config.environment.python is not None and registry.is_dotted(str(environment))


def is_correction(stage: Bound) -> bool:
    """It weighs advantages by how far the sampler is from the trainer: a transform with the trait `correction`."""
    return bool(stage.component.traits.get("correction"))


@dataclass(frozen=True)
class Slot:
    """A place in the configuration that names a component.

    Attributes:
        kind: what it must be.
        name: what the configuration says.
        path: the key that says so.
        params, params_path: the table next to it with parameters; `inline` if it serves registered names too.
        weight: of the entry, where entries have one and this entry sets it.
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
    """Components of a run with their parameters, by kind and in the order of the configuration."""

    tables: Mapping[str, Any]
    observe: tuple[str, ...] = ()
    bound: dict[str, list[Bound]] = field(default_factory=dict[str, list[Bound]])

    def all(self, kind: str) -> tuple[Bound, ...]:
        """Components of a kind that a list names: transform, loss, reward, tracker."""
        return tuple(self.bound.get(kind, ()))

    def every(self) -> Iterator[Bound]:
        """Every component that the configuration names."""
        return (bound for several in self.bound.values() for bound in several)

    def one(self, kind: str) -> Bound:
        """The component of a kind that one key names: advantage, uncertainty, filter, reduction, task."""
        return self.bound[kind][0]

    def optional(self, kind: str) -> Bound | None:
        """As `one`; None where the configuration leaves it open: algorithm, and engine = "auto"."""
        return next(iter(self.all(kind)), None)

    def objective(self, exact: bool) -> Objective:
        """What an update minimizes.

        Args:
            exact: the engine's log-probs are the trainer's own; where they are not, the difference is
                corrected by truncated importance weights, unless the chain does so already.
        """
        chain = self._chain
        corrections = chain[len(self._credit_chain()) :]
        if not exact and not any(map(is_correction, chain)):
            usual = (one.name for one in registry.components("transform", trait="default"))
            corrections = tuple(filter(None, (self.named("transform", name) for name in usual)))
        return Objective(self.all("loss"), self.one("reduction"), corrections, self.all("reduction")[-1])

    @property
    def _chain(self) -> tuple[Bound, ...]:
        """The transforms in use: an algorithm stands in their place."""
        return () if self.optional("algorithm") else self.all("transform")

    def _credit_chain(self) -> tuple[Bound, ...]:
        """The chain without the corrections at its end: the update makes those, from a forward that it needs anyway."""
        chain = self._chain
        return chain[: max((place for place, stage in enumerate(chain, 1) if not is_correction(stage)), default=0)]

    def stages(self, also: Collection[str] = ()) -> Stages:
        """The credit pipeline's components.

        Args:
            also: columns to compute besides those of `[logging] observe`.
        """
        return Stages(
            self.one("advantage"),
            self._credit_chain(),
            self.optional("algorithm"),
            self.one("uncertainty"),
            self.one("filter"),
            observed=(*dict.fromkeys((*self.observe, *sorted(also))),),
            hyper=hyper_of(lambda name: self.named("transform", name)),
        )

    def graph(self, objective: Objective) -> list[Stage]:
        """The stages of credit in order, with the signals that they and the objective read."""
        return Pipeline.resolve(self.stages(objective.signals), self.signal).graph

    def check_observed(self) -> None:
        """ComponentError if `[logging] observe` names a column that nothing computes."""
        plan(self.observe, self.one("uncertainty"), self.signal, BASE_COLUMNS)

    def described(self) -> dict[str, list[dict[str, Any]]]:
        """Name, source and parameters of every component, by kind."""
        return {
            kind: [{"name": one.name, "source": one.component.source, "params": dict(one.params)} for one in bound]
            for kind, bound in self.bound.items()
        }

    def named(self, kind: str, name: str) -> Bound | None:
        """A registered component that no key names, with the parameters of its table; None if there is none."""
        if name not in registry.names(kind):
            return None
        component = registry.find(kind, name)
        return component.bind(component.takes(self.tables.get(component.table, {})))

    def engines(self, model: str) -> list[Bound]:
        """The engine that the configuration names, or else all that "auto" may mean for the model at this path."""
        named = self.optional("engine")
        found = [named] if named else [self.named("engine", name) for name in engines_at(model)]
        return [one for one in found if one]

    def signal(self, name: str) -> Bound | None:
        """The signal that computes the column of that name."""
        return self.named("signal", name)


def slots(config: Config, tables: Mapping[str, Any]) -> Iterator[Slot]:
    """Every key of a section, or of a table by a parameter annotated with a kind, that names a component."""
    mix = next((section for section in MIXED if getattr(config, section)), "")
    for kind in registry.KINDS.values():
        mixed = MIXED[mix].get(kind.name) if mix else None
        section, key, beside = (mix, *mixed) if mixed else (*(kind.key or ("", "")), kind.params)
        several = getattr(config, section, ())
        whole = not isinstance(several, tuple)
        for index, entry in enumerate((several,) if whole else several):
            around: Path = (section,) if whole else (section, index)
            params = getattr(entry, beside) if beside else {}
            at = (*around, beside) if beside else ()
            if kind.name == "environment" and is_elsewhere(config, getattr(entry, key)):
                continue
            for place, name in _named(kind.name, getattr(entry, key)):
                weight = None if mixed else getattr(entry, "weight", None)
                yield Slot(kind.name, name, (*around, key, *place), at, params, bool(mixed) or key == "name", weight)
        for component in registry.components(tables=tables):
            table = tables.get(component.table)
            for key, info in component.schema.model_fields.items():
                if kind in info.metadata and isinstance(table, dict) and isinstance(name := table.get(key), str):
                    yield Slot(kind.name, name, (component.table, key))


def _named(kind: str, value: str | tuple[str, ...] | None) -> Iterator[tuple[Path, str]]:
    """Names in the value of a key, with their index in a list: a chain's stages; no preset, no "auto"."""
    nothing = {"engine": (AUTO,), "algorithm": preset_names()}.get(kind, ())
    if value is None or value in nothing:
        return
    names = transform_chain(value) if kind == "transform" else (value,) if isinstance(value, str) else value
    for index, name in enumerate(names):
        yield (() if isinstance(value, str) else (index,)), name


def needs_import(slot: Slot) -> bool:
    """Whether finding the component runs code that the package has not loaded: a dotted path or an entry point."""
    imported = registry.is_dotted(slot.name) or slot.name in registry.names(slot.kind)
    return imported and not registry.is_registered(slot.kind, slot.name)


def division(config: Config, *, expert: bool) -> tuple[int, int]:
    """(prompts, expert rows) of a step; without an expert it is all prompts."""
    rows = config.training.batch_size * config.training.group_size
    # Less a hair: 0.07 * 100 is 7, whatever binary fractions make of it.
    written = ceil(config.expert.ratio * rows - 1e-9) if expert else 0
    return (rows - written) // config.training.group_size, written


@dataclass(frozen=True)
class LoadedConfig:
    """A valid configuration.

    Attributes:
        file, text: where it was read from, and what stood there.
        config: the sections, every key with its value.
        tables: the components' tables as written.
        components: the components that the configuration names, bound to their parameters.
        places: where each value was written.
        warnings: what works and is probably not what was meant.
        preset: what `algorithm_mode` expanded to, if it names a preset.
        sets: what evaluates each of `[[eval.sets]]`, by its name: the run's configuration with the keys of the set.
        unread: keys that nothing in the run reads, with the mistake that they are; `load` refuses them, a campaign
            where no condition reads them.
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
        """Name of the run directory, unless `[logging] name` says otherwise."""
        return FilePath(self.file).stem

    @property
    def directory(self) -> FilePath:
        """The run directory."""
        return FilePath(self.config.logging.dir).expanduser() / (self.config.logging.name or self.name)

    @property
    def rewards(self) -> list[Entry]:
        """The rewards with their settings in the pool."""
        pairs = zip(self.config.rewards, self.components.all("reward"), strict=True)
        return [
            Entry(bound, float(bound.params["weight"]), one.timeout_s, one.concurrency, one.network)
            for one, bound in pairs
        ]

    @property
    def objective(self) -> Objective:
        """What an update minimizes."""
        return self.components.objective(exact=True)

    @property
    def division(self) -> tuple[int, int]:
        """(prompts, expert rows) of a step."""
        return division(self.config, expert="expert" in self.objective.sources)

    def task(self, seed: int) -> Task:
        """The task of this seed; with `[[environments]]` or `[[tasks]]` the mixture of theirs."""
        bound, entries = self.components.all("task"), self.config.environments or self.config.tasks
        if not entries:
            return bound[0].build({"seed": seed})
        from retrain.environments.mixture import Mixture, WeightedTask

        named = zip(mixed_labels(self.config), bound, entries, strict=True)
        parts = {
            label: WeightedTask(one.build({"seed": derive_seed(seed, label)}), e.weight) for label, one, e in named
        }
        return Mixture(seed, parts)

    @property
    def resources(self) -> dict[str, Any]:
        """The parts of a run that a component may ask for by name and that the configuration alone tells."""
        training = self.config.training
        shared = training.model_dump(include={"seed", "max_tokens", "group_size", "temperature"})
        return {**shared, "total_steps": training.max_steps, "search_paths": self.config.plugins.search_paths}

    @property
    def overrides(self) -> list[str]:
        """What the command line overrode, as `--set key=value`."""
        return list(dict.fromkeys(place.file for place in self.places.values() if not place.line))

    def resolved(self) -> dict[str, Any]:
        """Everything that decides the run, as JSON: sections with all defaults, tables, components with parameters."""
        return {
            **self.config.model_dump(mode="json"),
            **to_jsonable_python(self.tables, fallback=str),
            "components": to_jsonable_python(self.components.described(), fallback=str),
        }
