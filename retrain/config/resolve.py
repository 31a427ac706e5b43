"""From names in a configuration to bound components."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import ValidationError

from retrain import registry
from retrain.algorithms.graph.objective import Objective
from retrain.algorithms.graph.pipeline import Stages
from retrain.algorithms.graph.plain_functions import Hyper
from retrain.algorithms.transforms import transform_chain
from retrain.config.document import Document
from retrain.config.mistakes import Catalog, collect
from retrain.config.positions import Path
from retrain.config.presets import preset_names, suggest
from retrain.config.schema import Config
from retrain.errors import ComponentError
from retrain.registry import Bound, Component

AUTO = "auto"
"""`[rollout] engine` when the model decides."""


CORRECTION = "tis"
"""What corrects for a sampler whose log-probs are not the trainer's own, unless the chain has a correction."""


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
    """

    kind: str
    name: str
    path: Path
    params_path: Path = ()
    params: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)
    inline: bool = False


@dataclass
class Resolved:
    """Components of a run with their parameters, by kind and in the order of the configuration."""

    tables: Mapping[str, Any]
    bound: dict[str, list[Bound]] = field(default_factory=dict[str, list[Bound]])

    def all(self, kind: str) -> tuple[Bound, ...]:
        """Components of a kind that a list names: transform, loss, reward, tracker."""
        return tuple(self.bound.get(kind, ()))

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
            default = self.named("transform", CORRECTION)
            corrections = (default,) if default else ()
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
            also: columns to compute besides those that are logged always.
        """
        return Stages(
            self.one("advantage"),
            self._credit_chain(),
            self.optional("algorithm"),
            self.one("uncertainty"),
            self.one("filter"),
            observed=(*dict.fromkeys((*Stages.observed, *sorted(also))),),
            hyper=Hyper(self._parameter("gtpo", "beta"), self._parameter("hicra", "alpha")),
        )

    def _parameter(self, transform: str, key: str) -> Any:
        bound = self.named("transform", transform)
        assert bound is not None, f"{transform} is built in"
        return bound.params[key]

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
        try:
            return component.bind(_own(component, self.tables.get(component.table, {})))
        except ValidationError as error:
            missing = ", ".join(str(detail["loc"][-1]) for detail in error.errors())
            raise ComponentError(f"{kind} {name!r} needs {missing}", f"set it in [{component.table}]") from None

    def signal(self, name: str) -> Bound | None:
        """The signal that computes the column of that name."""
        return self.named("signal", name)


def slots(config: Config, tables: Mapping[str, Any]) -> Iterator[Slot]:
    """Every place of `config` and of the components' tables that names a component, in the order of a step."""
    algorithm = config.algorithm
    yield Slot("task", config.task.name, ("task", "name"), ("task", "params"), config.task.params, inline=True)
    for index, reward in enumerate(config.rewards):
        path: Path = ("rewards", index)
        yield Slot("reward", reward.name, (*path, "name"), (*path, "params"), reward.params, inline=True)
    if config.rollout.engine != AUTO:
        yield Slot("engine", config.rollout.engine, ("rollout", "engine"))
    yield Slot("filter", algorithm.filter, ("algorithm", "filter"))
    yield Slot("uncertainty", algorithm.uncertainty_kind, ("algorithm", "uncertainty_kind"))
    table: Path = ("algorithm", "advantage_params")
    yield Slot(
        "advantage", algorithm.advantage_mode, ("algorithm", "advantage_mode"), table, algorithm.advantage_params
    )
    table = ("algorithm", "transform_params")
    for path, name in _chain(algorithm.transform_mode):
        yield Slot("transform", name, path, table, algorithm.transform_params)
    if algorithm.algorithm_mode is not None and algorithm.algorithm_mode not in preset_names():
        path, table = ("algorithm", "algorithm_mode"), ("algorithm", "params")
        yield Slot("algorithm", algorithm.algorithm_mode, path, table, algorithm.params)
    for index, term in enumerate(config.loss):
        path = ("loss", index)
        yield Slot("loss", term.name, (*path, "name"), (*path, "params"), term.params, inline=True)
    yield Slot("reduction", algorithm.reduction, ("algorithm", "reduction"))
    mix = tables.get("mix")
    if isinstance(mix, Mapping) and isinstance(name := cast("Mapping[str, Any]", mix).get("sft_reduction"), str):
        yield Slot("reduction", name, ("mix", "sft_reduction"))
    for index, name in enumerate(config.logging.trackers):
        yield Slot("tracker", name, ("logging", "trackers", index))


def _chain(mode: str | tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    """Every stage with the key that names it: the index in a list, or the one key of a chain."""
    path: Path = ("algorithm", "transform_mode")
    for index, name in enumerate(transform_chain(mode)):
        yield (path if isinstance(mode, str) else (*path, index)), name


def is_dotted(name: str) -> bool:
    """Whether a name is a path to code of the user's own."""
    return "." in name or ":" in name


def needs_import(slot: Slot) -> bool:
    """Whether finding the component runs code that the package has not loaded: a dotted path or an entry point."""
    known = any(component.name == slot.name for component in registry.components(slot.kind))
    return not known and (is_dotted(slot.name) or slot.name in registry.names(slot.kind))


class Binder:
    """Finds components and validates their parameters, recording every mistake in the document."""

    def __init__(self, document: Document, config: Config, known: Catalog) -> None:
        self.document, self.config, self.known = document, config, known
        self.slots = list(slots(config, document.data))
        self.traces: list[str] = []

    def bind(self, slot: Slot) -> Bound | None:
        """The slot's component with its parameters, or None when a mistake was recorded."""
        try:
            component = registry.find(slot.kind, slot.name, self.config.plugins.search_paths)
        except ComponentError as error:
            fix = suggest(slot.name) if slot.kind == "algorithm" and not is_dotted(slot.name) else error.fix
            self.document.refuse(slot.path, error.problem, fix)
            self.traces += [error.trace] if error.trace else []
            return None
        if needs := component.traits.get("extra"):
            package, extra = needs
            if importlib.util.find_spec(package) is None:
                self.document.refuse(slot.path, f"{package} is not installed", f'pip install "retrain[{extra}]"')
                return None
        try:
            return self._weighted(slot, component.bind(self._params(slot, component)))
        except ComponentError as error:
            self.document.refuse(slot.path, error.problem, error.fix)
        except ValidationError as error:
            beside = tuple(part for part in slot.params_path if isinstance(part, str))
            known = {**self.known, beside: [*component.schema.model_fields]}
            collect(self.document, error, known, lambda loc: self._locate(slot, component, loc))
        return None

    def refuse_unread(self) -> None:
        """Refuse parameters in the `*_params` tables of [algorithm] that no dotted path reads."""
        own_tables = {slot.params_path: slot for slot in self.slots if slot.params_path and not slot.inline}
        for path, slot in own_tables.items():
            readers = [other.name for other in self.slots if other.params_path == path]
            if slot.params and not any(is_dotted(name) for name in readers):
                tables = ", ".join(f"[{name}]" for name in readers)
                self.document.refuse(path, "only a dotted path reads this table", f"set the parameters in {tables}")

    def _params(self, slot: Slot, component: Component) -> dict[str, Any]:
        table = self.document.data.get(component.table, {})
        own = dict(slot.params) if slot.inline or is_dotted(slot.name) else {}
        sharing = [other for other in self.slots if other.params_path == slot.params_path and is_dotted(other.name)]
        if len(sharing) > 1 and not slot.inline:
            own = _own(component, own)
        return _own(component, table if isinstance(table, dict) else {}) | own

    def _weighted(self, slot: Slot, bound: Bound) -> Bound:
        """A loss or reward with the weight of its entry, else of its table, else 1."""
        if slot.kind not in ("loss", "reward"):
            return bound
        index = int(slot.path[1])
        entry = self.config.loss[index] if slot.kind == "loss" else self.config.rewards[index]
        weight = bound.params.get("weight", 1.0) if entry.weight is None else entry.weight
        return Bound(bound.component, {**bound.params, "weight": weight})

    def _locate(self, slot: Slot, component: Component, location: Path) -> Path:
        """Where a parameter stands: in the component's own table or next to its name."""
        in_table = isinstance(self.document.data.get(component.table), dict)
        inline = location[0] in slot.params or is_dotted(slot.name) or (slot.inline and not in_table)
        return (*slot.params_path, *location) if inline else (component.table, *location)


def _own(component: Component, table: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a shared table that the component takes."""
    if component.schema.model_config.get("extra") == "allow":
        return dict(table)
    return {key: value for key, value in table.items() if key in component.schema.model_fields}
