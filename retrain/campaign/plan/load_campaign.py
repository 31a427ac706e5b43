"""Load a campaign's TOML file: validate every run, and report all errors at once."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from retrain import registry
from retrain.campaign.plan.campaign_schema import Campaign
from retrain.campaign.plan.conditions import Condition, conditions, owned, rungs, within
from retrain.campaign.plan.is_campaign import SECTION, is_campaign
from retrain.config.binder import Binder
from retrain.config.document import PRESET_KEY, Document, canonical, fork, merge, overlay, read, show
from retrain.config.load import validate
from retrain.config.loaded_config import LoadedConfig
from retrain.config.mistakes import catalog, collect
from retrain.config.positions import KeyPath
from retrain.config.preset_keys import apply_preset, names_file
from retrain.config.reported_metrics import result_problem
from retrain.config.rules.unread_keys import judged
from retrain.config.slots import Slot
from retrain.errors import ConfigError, ConfigProblem, did_you_mean, raise_all
from retrain.registry import Component
from retrain.run.before.data_checks import check_data
from retrain.system.files import expanded

_DATA = ("task", "tasks", "environment", "environments", "rewards", "warmup", "eval", "expert", "source", "model")
"""Tables of a run that name its data."""
_LEAST_STARTS = 6
"""Smallest number of independent differences for which a permutation test can give p <= .05."""
_LEAST_LOOK = 7
"""Smallest number of seeds of a look. Its smallest p is 2 / 2^7 = .016, and a first look has about .03 of alpha."""


@dataclass(frozen=True)
class LoadedCampaign:
    """A valid campaign.

    Attributes:
        file, text: path and content of the file.
        settings: `[campaign]`.
        executor: component that executes the runs.
        conditions: conditions in the order of the file.
        configs: validated run of each condition, with the first seed.
        warnings: settings that are valid but probably not intended.
        overrides: changes by `--set`, as `key=value`.
    """

    file: str
    text: str
    settings: Campaign
    executor: Component
    conditions: tuple[Condition, ...]
    configs: tuple[LoadedConfig, ...]
    warnings: tuple[ConfigProblem, ...]
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the campaign's directory."""
        return self.settings.name or Path(self.file).stem

    @property
    def directory(self) -> Path:
        """Directory of the campaign's files."""
        return expanded(self.configs[0].config.logging.dir) / self.name

    @property
    def baseline(self) -> str:
        """Label of the baseline condition, without its task."""
        return self.settings.baseline or self.conditions[0].method

    @property
    def ladder(self) -> list[tuple[str, str]]:
        """Pairs (condition, the condition that it extends), for all but the first; labels without the task."""
        first = [condition for condition in self.conditions if condition.task == self.conditions[0].task]
        steps = rungs(first, [config.resolved() for config in self.configs[: len(first)]])
        method = {condition.label: condition.method for condition in first}
        return [(method[condition], method[against]) for condition, against in steps]

    @property
    def control_of(self) -> dict[str, str]:
        """Control -> the condition that it is compared with, if its entry names one with `against`."""
        method_of = {condition.label: condition.method for condition in self.conditions}
        controls = (condition for condition in self.conditions if condition.method in self.settings.controls)
        return {control.method: method_of[control.against] for control in controls if control.against}

    @cached_property
    def observed(self) -> list[str]:
        """Signals that at least one condition computes and stores; every run computes them, to be comparable."""
        graphs = (config.pipeline_of(config.objective(exact=True)).graph for config in self.configs)
        signals = (stage for graph in graphs for stage in graph if stage.kind == "signal")
        return sorted({stage.writes for stage in signals if registry.signal.traits_of(stage).stored})

    def check_data(self) -> None:
        """Call `retrain.run.before.data_checks.check_data` once for each distinct data set of the conditions.

        Raises:
            ConfigError: all problems found.
        """
        distinct = {
            json.dumps([facts[key] for key in _DATA] + [facts["components"]["task"]], sort_keys=True): config
            for config in reversed(self.configs)
            for facts in (config.resolved(),)
        }
        problems: dict[ConfigProblem, None] = {}
        for config in distinct.values():
            try:
                check_data(config)
            except ConfigError as error:
                problems |= dict.fromkeys(error.problems)
        raise_all(problems)

    def cell_config(self, condition: Condition, seed: int) -> dict[str, Any]:
        """Return the complete configuration of one run as TOML data, without keys that only other conditions read."""
        folder = str(self.directory / "cells" / condition.folder)
        data = _with_seed(condition, self.name, seed, folder)
        if start := self.settings.start(seed):
            data["warmup"] = {**data.get("warmup", {}), "seed": self.configs[0].config.warmup.seed + start}
        if self.observed:
            data["logging"]["observe"] = sorted({*data["logging"].get("observe", ()), *self.observed})
        shared = {registry.find("signal", name).table for name in self.observed}
        config = next(config for other, config in zip(self.conditions, self.configs, strict=True) if other is condition)
        unread = [*config.unread, *(config.preset.unread if config.preset else ())]
        for *around, key in (path for path in unread if path[0] not in shared):
            table: Any = data
            for part in around:
                table = table.get(part, {}) if isinstance(part, str) else table[part]
            table.pop(key, None)  # the keys of a preset that is not expanded here are in no table
        return data

    def cell_toml(self, condition: Condition, seed: int) -> str:
        """Return `cell_config` as the text of a TOML file."""
        title = f"# Campaign {self.name}: {condition.label}, seed {seed}\n\n"
        return title + tomli_w.dumps(self.cell_config(condition, seed))


def load_campaign(file: Path | str, overrides: Sequence[str] = ()) -> LoadedCampaign:
    """Read and validate a campaign; each condition is validated like a run of `retrain train`.

    Args:
        file: path of the TOML file.
        overrides: `key=value`, as after `--set`; `campaign.*` changes the campaign, any other key all runs.
    Raises:
        ConfigError: all errors with file, line and column; an error in a condition has the line of that condition.
    """
    of_campaign = [text for text in overrides if text.strip().startswith(f"{SECTION}.")]
    source = read(file, of_campaign)
    if not is_campaign(file):
        raise ConfigError.at(file, "file", "no [campaign] table", "add [campaign], or use retrain train")
    settings = _settings(source)
    executor = Binder(source).bind(Slot("executor", settings.executor, (SECTION, "executor")))
    base = _base(settings, source)
    compared = conditions(settings, source, base)
    _check_labels(compared, settings, source)
    refused = {text: problem for text in overrides if (problem := _refusal(text, compared))}
    problems, notes, configs = [*source.problems, *refused.values()], list[str](), list[LoadedConfig]()
    for condition in compared:
        condition.document.override_all(text for text in overrides if text not in of_campaign and text not in refused)
        document = fork(condition.document)
        document.data = _with_seed(condition, "campaign", settings.seed_list[0], None)
        try:
            config = validate(document)
            problems += _outranked(condition, config, source)
            problems += _unmeasured(settings, config, source)
            configs.append(config)
            # A run reads one file, in which a preset replaces nothing, and from another directory.
            if condition.document.lower or names_file(condition.document):
                apply_preset(condition.document)
        except ConfigError as error:
            problems += error.problems
            notes += getattr(error, "__notes__", ())
    complete = len(configs) == len(compared)
    mistakes, odd = judged(_unread(configs) if complete else [], len(overrides) > len(of_campaign))
    raise_all([*problems, *(_duplicates(compared, configs, source) if complete else ()), *mistakes], notes)
    assert executor is not None, "raise_all raises if the executor is invalid"
    found_in_runs = [warning for config in configs for warning in config.warnings]
    warnings = tuple(dict.fromkeys([*found_in_runs, *odd, *_without_effect(settings, source, configs)]))
    return LoadedCampaign(
        str(file), source.text, settings, executor, tuple(compared), tuple(configs), warnings, tuple(overrides)
    )


def _without_effect(settings: Campaign, source: Document, configs: Sequence[LoadedConfig]) -> list[ConfigProblem]:
    """Return warnings about `looks` and `warm_starts`."""
    count = settings.warm_starts
    seeds = len(settings.seed_list)
    at = (SECTION, "warm_starts")
    if settings.looks == "auto" and not settings.look_sizes:
        fix = "set seeds = 12 or more, or remove it"
        return [source.at((SECTION, "looks"), f"has no effect with {seeds} seeds: the first look is at 8", fix)]
    if count > 1 and not any(config.config.warmup.steps for config in configs):
        return [source.at(at, "has no effect: no run has a warm-up", "remove it, or set [warmup] steps")]
    if 1 < count < min(_LEAST_STARTS, seeds):
        text = f"no result can be significant with {count} warm starts: runs of one warm start count as one observation"
        return [source.at(at, text, f"use {seeds}, one for each seed, or at least {_LEAST_STARTS}")]
    return []


def _settings(source: Document, left_out: frozenset[str] = frozenset()) -> Campaign:
    """Validate `[campaign]`. Errors are recorded and their keys left out, so that later checks can find more."""
    section = source.data.get(SECTION, {})
    kept = {key: section[key] for key in section if key not in left_out} if isinstance(section, dict) else section
    try:
        return Campaign.model_validate(kept)
    except ValidationError as error:
        culprits = collect(source, error, catalog({SECTION: Campaign}), lambda path: (SECTION, *path))
    wrong = {str(path[1]) for path in culprits if len(path) > 1}
    # Keys that contradict each other are found once each of them is valid; then the section as a whole is wrong.
    return _settings(source, left_out | wrong) if wrong else Campaign()


def _base(settings: Campaign, source: Document) -> Document:
    """Build the run that all conditions share: `base`, overridden by the tables of this file and by `max_steps`."""
    path = Path(source.file).parent / settings.base if settings.base else None
    base = Document(source.file, source.text) if path is None else read(path)
    if SECTION in base.data:
        source.refuse((SECTION, "base"), f"{path} is a campaign", "give the file of a run")
        del base.data[SECTION]  # otherwise every condition would repeat the error
    tables = {component.table for component in registry.components("executor")}
    run = {name: value for name, value in source.data.items() if name != SECTION and name not in tables}
    overlay(base, [((name,), value, (name,)) for name, value in run.items()], source)
    training = base.data.get("training")
    written = training.get("max_steps", 0) if isinstance(training, dict) else 0
    if settings.max_steps is not None and type(written) is int and written >= 0:  # validation reports an invalid value
        merge(base, ("training", "max_steps"), settings.max_steps, source, (SECTION, "max_steps"))
    return base


def _refusal(text: str, compared: Sequence[Condition]) -> ConfigProblem | None:
    """Return the error if `--set text` would have no effect in some run, else None."""
    name = text.partition("=")[0].strip()
    flag, key = Document(""), canonical(name)
    flag.override(text)
    for _, fix in owned((), flag.data):
        return ConfigProblem(f"--set {text}", 0, 0, name, "the campaign sets this", fix)
    for condition in compared:
        if any(within(key, key_path) or within(key_path, key) for key_path in map(canonical, condition.overrides)):
            problem = f"condition {condition.label!r} sets this key"
            return ConfigProblem(f"--set {text}", 0, 0, name, problem, "change the file instead")
    return None


def _check_labels(compared: Sequence[Condition], settings: Campaign, source: Document) -> None:
    folders: dict[str, Condition] = {}
    labels = [condition.label for condition in compared]
    listed = f"labels: {', '.join(labels)}"
    for condition in compared:
        first = folders.setdefault(condition.folder.lower(), condition)
        if first is not condition:
            other = f" (another is {first.label!r})" if first.label != condition.label else ""
            source.refuse(condition.at, f"two conditions are called {condition.label!r}{other}", "set distinct labels")
        if condition.against is not None and condition.against not in {*labels} - {condition.label}:
            source.refuse((*condition.at, "against"), f'no other condition is called "{condition.against}"', listed)
    methods = list(dict.fromkeys(condition.method for condition in compared))
    _check_questions(methods, settings, source)
    _check_looks(settings, source)
    _check_controls([method for method in methods if method != (settings.baseline or methods[0])], settings, source)


def _check_questions(methods: Sequence[str], settings: Campaign, source: Document) -> None:
    """Check that baseline, primary comparison and number of warm starts fit the conditions, tasks and seeds."""
    if settings.baseline is not None and settings.baseline not in methods:
        fix = did_you_mean(settings.baseline, methods, f"labels: {', '.join(methods)}")
        source.refuse((SECTION, "baseline"), f'no condition is called "{settings.baseline}"', fix)
    others = [label for label in methods if label != (settings.baseline or methods[0])]
    if settings.warm_starts > len(settings.seed_list):
        fix = f"use at most {len(settings.seed_list)}, one for each seed"
        source.refuse((SECTION, "warm_starts"), "fewer seeds than warm starts", fix)
    if settings.claim is not None and settings.claim not in settings.tasks:
        fix = did_you_mean(settings.claim, settings.tasks, f"tasks: {', '.join(settings.tasks) or 'none'}")
        source.refuse((SECTION, "claim"), f'no task is called "{settings.claim}"', fix)
    if (settings.primary is None) is (settings.claim is not None) and settings.tasks:
        given, other = ("claim", "primary") if settings.claim else ("primary", "claim")
        fix = f'set the {"condition" if settings.claim else "task"} as well: {other} = "..."'
        source.refuse((SECTION, given), "a claim needs a condition and a task", fix)
    elif settings.primary is not None and settings.primary not in others:
        fix = did_you_mean(settings.primary, others, f"labels: {', '.join(others)}")
        source.refuse((SECTION, "primary"), f'no condition other than the baseline is called "{settings.primary}"', fix)


def _check_looks(settings: Campaign, source: Document) -> None:
    """Check that looks are ascending numbers of seeds, each with enough independent differences for a verdict."""
    sizes = settings.look_sizes
    at = (SECTION, "looks")
    if not sizes:
        return
    if sorted(set(sizes)) != [*sizes]:
        fix = f"give ascending numbers below {sizes[-1]}, the number of seeds, which is the last look by itself"
        source.refuse(at, f"looks at {', '.join(map(str, sizes[:-1]))} of {sizes[-1]} seeds", fix)
    elif sizes[0] < _LEAST_LOOK:
        source.refuse(at, f"a look at {sizes[0]} seeds cannot decide anything", f"begin at {_LEAST_LOOK} or more")
    # The mean difference of a warm start with several seeds changes between looks, so that a verdict could be undone.
    if settings.warm_starts not in (1, sizes[-1]):
        fix = f"set warm_starts = 1, or {sizes[-1]}, one for each seed"
        source.refuse(at, f"looks need independent seeds, and {settings.warm_starts} warm starts are shared", fix)


def _check_controls(others: Sequence[str], settings: Campaign, source: Document) -> None:
    """Check that the controls are conditions other than the baseline and the claimed one, in a campaign with tasks."""
    for label in settings.controls:
        if label not in others:
            fix = did_you_mean(label, others, f"labels: {', '.join(others)}")
            source.refuse((SECTION, "controls"), f'no condition other than the baseline is called "{label}"', fix)
        elif label == settings.primary:
            source.refuse((SECTION, "controls"), f'"{label}" is the primary condition', "leave it out of the controls")
    if settings.controls and not settings.tasks:
        source.refuse((SECTION, "controls"), "without tasks there are no families of controls", "set tasks = [...]")


def _with_seed(condition: Condition, campaign: str, seed: int, folder: str | None) -> dict[str, Any]:
    """Return the condition's configuration with seed, run directory (in `folder`), and run names for trackers."""
    data = copy.deepcopy(condition.document.data)
    values_of = {"training": {"seed": seed + condition.seed_offset}, "logging": {"name": f"s{seed}"}}
    for section, values in values_of.items():
        if isinstance(data.setdefault(section, {}), dict):
            data[section] |= values
    logging = data["logging"]
    if folder is not None:
        logging["dir"] = folder
    used = logging.get("trackers", ()) if isinstance(logging, dict) else ()
    used = used if isinstance(used, list) else ()  # validation reports another type
    for tracker in registry.components("tracker"):
        table = data.setdefault(tracker.table, {}) if tracker.name in used else None
        if isinstance(table, dict):
            tags = [*table.get("tags", ()), campaign, condition.label]
            tags_of_run = {"name": f"{condition.label}_s{seed}", "group": condition.label, "tags": tags}
            table |= {key: value for key, value in tags_of_run.items() if key in tracker.schema.model_fields}
    return data


def free_tables() -> list[str]:
    """Return the tables that may change after a run was started, because they do not change its result."""
    return ["logging", "checkpoint", *(tracker.table for tracker in registry.components("tracker"))]


def _unread(configs: Sequence[LoadedConfig]) -> list[tuple[KeyPath, ConfigProblem]]:
    """Return the keys that no run reads.

    A key of the base is unread if no condition reads it; a key of a condition, if that condition does not read it.
    """
    return [
        (path, problem)
        for config in configs
        for path, problem in config.unread.items()
        if all(path in other.unread for other in configs if other.places.get(path) == config.places.get(path))
    ]


def _unmeasured(settings: Campaign, config: LoadedConfig, source: Document) -> list[ConfigProblem]:
    """Return an error for each outcome that no evaluation and no step of a run measures."""
    problems: list[ConfigProblem] = []
    for index, outcome in enumerate(settings.all_outcomes):
        at: KeyPath = (SECTION, "outcomes", index, "metric") if settings.outcomes else (SECTION, "metric")
        if mistake := result_problem(outcome.key, config):
            problems.append(source.at(at, *mistake))
    return problems


def _outranked(condition: Condition, config: LoadedConfig, source: Document) -> list[ConfigProblem]:
    """Return an error for each change of a condition that a preset of a higher layer replaces: its label would lie."""
    if config.preset is None:
        return []
    preset, named_at = config.preset.name, config.places.get(PRESET_KEY)
    by = f"{named_at.file}:{named_at.line}" if named_at and named_at.line else "--set"
    replaced = [
        show(path)
        for path in config.preset.outranked
        if any(within(canonical(key), ".".join(map(str, path))) for key in condition.overrides)
    ]
    text = f'preset "{preset}" ({by}) replaces {{}} of {condition.label!r}'
    return [source.at(condition.at, text.format(key), "set one of the two") for key in replaced]


def _duplicates(
    compared: Sequence[Condition], configs: Sequence[LoadedConfig], source: Document
) -> list[ConfigProblem]:
    """Return an error for each condition whose runs would equal those of an earlier condition."""
    problems: list[ConfigProblem] = []
    seen: dict[str, str] = {}
    for condition, config in zip(compared, configs, strict=True):
        facts = config.resolved()
        # What [algorithm] names is among the components, under the name that the file happens to use.
        for free in ("algorithm", *free_tables()):
            facts.pop(free, None)
        facts["components"].pop("tracker", None)
        first = seen.setdefault(json.dumps(facts, sort_keys=True), condition.label)
        if first != condition.label:
            text = f"condition {condition.label!r} is the same run as {first!r}"
            problems.append(source.at(condition.at, text, "change or remove one of the two"))
    return problems
