"""Metrics that the steps of a configured run report."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from retrain import registry
from retrain.config.loaded_config import LoadedConfig, is_correction, reward_columns
from retrain.config.schema import Config
from retrain.config.slots import mixed_labels
from retrain.errors import did_you_mean
from retrain.metrics import Metric, metrics
from retrain.registry import Component


def reported_metrics(loaded: LoadedConfig) -> dict[str, Metric]:
    """Return the metrics of a step of this run, by name.

    A name that only the run itself can complete keeps its placeholder, such as `env/ended_{end}`. Metrics of some
    steps only are included, and so are those that plug-ins declare by the trait `metrics`.
    """
    components = list(_components(loaded))
    names = {component.name for component in components}
    filled = _placeholders(loaded)
    reported: dict[str, Metric] = {}
    for metric in metrics().values():
        used = not metric.uses or not names.isdisjoint(metric.uses)
        if used and all(_is_set(loaded.config, key) for key in metric.keys):
            reported |= dict.fromkeys(_complete(metric.name, filled), metric)
    for component in components:
        reported |= {name: Metric(name, meaning) for name, meaning in component.traits.metrics.items()}
    return reported


def metric_problem(name: str, loaded: LoadedConfig) -> tuple[str, str] | None:
    """Return (problem, fix) if no step of this run reports a metric of this name; otherwise None.

    A plug-in that declares no metrics may report any name outside of the package's areas.
    """
    reported = reported_metrics(loaded)
    if name in reported or any(metric.matches(name) for key, metric in reported.items() if "{" in key):
        return None
    area = name.partition("/")[0]
    of_others = (component for component in _components(loaded) if component.source != "built-in")
    may_report_more = any(not component.traits.metrics for component in of_others)
    if may_report_more and area not in {metric.partition("/")[0] for metric in metrics()}:
        return None
    weights = {term.name: term.params["weight"] for term in loaded.all("loss")}
    if area == "loss" and weights.get(term := name.removeprefix("loss/")) == 0:
        return f'no step reports "{name}": the loss "{term}" has weight 0', f"set [{term}] weight above 0"
    return f'no step reports "{name}"', did_you_mean(name, sorted(reported), f"one of: {', '.join(reported)}")


def result_problem(name: str, loaded: LoadedConfig) -> tuple[str, str] | None:
    """Return (problem, fix) if neither an evaluation nor a step of this run reports a metric; otherwise None.

    Args:
        name: name in eval.jsonl, where that of an evaluation set or an environment may precede it, or in metrics.jsonl.
    """
    config = loaded.config
    around, _, figure = name.rpartition("/")
    labels = {"", *mixed_labels(config), *(entry.name for entry in config.eval.sets)}
    # An evaluation set may measure pass@k and avg@k of other numbers than [eval].
    is_figure = figure in config.eval.figures() or (around != "" and "@" in figure)
    if name.startswith("task/") or (around in labels and is_figure):
        return None
    # `[checkpoint] best` has eval/accuracy, but the rows of eval.jsonl have accuracy.
    if around == "eval" and is_figure:
        return f'the results of a campaign have no "{name}"', f'write metric = "{figure}"'
    problem = metric_problem(name, loaded)
    # A name with an area is meant to be a step's; a name without one, an evaluation's.
    if problem is None or "/" in name:
        return problem
    figures = config.eval.figures()
    return f'no evaluation measures "{name}"', did_you_mean(name, figures, f"one of: {', '.join(figures)}")


def _components(loaded: LoadedConfig) -> Iterator[Component]:
    """Yield the components that can report in a step: also the signals that others read."""
    yield from (component for component in loaded.slots.values() if component.params.get("weight") != 0)
    yield from (stage for stage in loaded.pipeline.graph if stage.kind == "signal")


def _placeholders(loaded: LoadedConfig) -> dict[str, Collection[str]]:
    """Return the names that stand for {loss}, {reward}, {source} and {transform} in this run."""
    drops = (
        transform.name
        for transform in loaded.all("transform")
        if is_correction(transform) and registry.transform.traits_of(transform).drops_only
    )
    config = loaded.config
    of_environment = ["{reward}"] if config.environment.name or config.environments else []  # it names its own parts
    return {
        "{loss}": [term.name for term in loaded.all("loss") if term.params["weight"] != 0],
        "{reward}": [*(name for name, _ in reward_columns(loaded.all("reward"))), *of_environment],
        "{source}": list(loaded.sources),
        "{transform}": list(drops),
    }


def _complete(name: str, filled: dict[str, Collection[str]]) -> Iterator[str]:
    """Yield the names of a metric with each name of the run in place of its placeholder."""
    placeholder = next((key for key in filled if key in name), "")
    yield from (name.replace(placeholder, word) for word in filled[placeholder]) if placeholder else [name]


def _is_set(config: Config, key: str) -> bool:
    """Return True if a key, or one of `A|B`, is set; `A=VALUE` asks for that value."""
    for option in key.split("|"):
        path, _, value = option.partition("=")
        entry: Any = config
        for part in path.split("."):
            entry = getattr(entry, part)
        if entry == value if value else entry:
            return True
    return False
