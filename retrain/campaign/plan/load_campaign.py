"""From a campaign's TOML file to its validated runs, or all that is wrong with it at once."""

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
from retrain.config.binder import Binder
from retrain.config.credit_checks import check_data
from retrain.config.document import Document, canonical, fork, lay, read
from retrain.config.load import validate
from retrain.config.mistakes import catalog, collect
from retrain.config.positions import Path as Key
from retrain.config.resolve import LoadedConfig, Slot
from retrain.config.unread import judged
from retrain.errors import ConfigError, ConfigProblem, did_you_mean
from retrain.registry import Bound

SECTION = "campaign"


@dataclass(frozen=True)
class LoadedCampaign:
    """A valid campaign.

    Attributes:
        file, text: where it was read from, and what stood there.
        settings: `[campaign]`.
        executor: what executes the runs.
        conditions: in the order of the file.
        configs: the validated run of each condition, with the first seed.
        warnings: what works and is probably not what was meant.
        overrides: what `--set` changed of the file.
    """

    file: str
    text: str
    settings: Campaign
    executor: Bound
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
        """Where everything about the campaign is written."""
        return Path(self.configs[0].config.logging.dir).expanduser() / self.name

    @property
    def baseline(self) -> str:
        """Label of the condition that the others are compared with, without its task."""
        return self.settings.baseline or self.conditions[0].method

    @property
    def ladder(self) -> list[tuple[str, str]]:
        """Each condition but the first, with the one that it adds to, both without their task."""
        first = [one for one in self.conditions if one.task == self.conditions[0].task]
        steps = rungs(first, [config.resolved() for config in self.configs[: len(first)]])
        method = {one.label: one.method for one in first}
        return [(method[condition], method[against]) for condition, against in steps]

    @cached_property
    def observed(self) -> list[str]:
        """Signals that any condition computes and its files hold: every run does, so that conditions compare."""
        graphs = (config.components.graph(config.objective) for config in self.configs)
        return sorted({stage.writes for graph in graphs for stage in graph if "stored" in stage.bound.component.traits})

    def check_data(self) -> None:
        """As `check_data` of a run, for every condition whose data are not those of one before it; see there."""
        asked = ("task", "tasks", "environment", "environments", "rewards", "warmup", "eval", "expert", "model")
        distinct = {
            json.dumps([facts[key] for key in asked] + [facts["components"]["task"]], sort_keys=True): config
            for config in reversed(self.configs)
            for facts in (config.resolved(),)
        }
        found: dict[ConfigProblem, None] = {}
        for config in distinct.values():
            try:
                check_data(config)
            except ConfigError as error:
                found |= dict.fromkeys(error.problems)
        _stop(list(found), ())

    def cell_config(self, condition: Condition, seed: int) -> dict[str, Any]:
        """The whole configuration of one run, as a TOML document; what only other conditions read is left out."""
        folder = str(self.directory / "cells" / condition.folder)
        data = _with_seed(condition, self.name, seed, folder)
        if self.observed:
            data["logging"]["observe"] = sorted({*data["logging"].get("observe", ()), *self.observed})
        shared = {registry.find("signal", name).table for name in self.observed}
        config = next(config for other, config in zip(self.conditions, self.configs, strict=True) if other is condition)
        for *around, key in (path for path in config.unread if path[0] not in shared):
            table: Any = data
            for part in around:
                table = table[part]
            del table[key]
        return data

    def cell_toml(self, condition: Condition, seed: int) -> str:
        """As `cell_config`, in the words of a file."""
        title = f"# Campaign {self.name}: {condition.label}, seed {seed}\n\n"
        return title + tomli_w.dumps(self.cell_config(condition, seed))


def is_campaign(file: Path | str) -> bool:
    """Whether the file is TOML with a `[campaign]`; a mistake in it is for `load_campaign` or `load` to tell."""
    try:
        return SECTION in read(file).data
    except ConfigError:
        return False


def load_campaign(file: Path | str, overrides: Sequence[str] = ()) -> LoadedCampaign:
    """Read and validate a campaign: every condition's run is validated as `retrain train` would.

    Args:
        overrides: `key=value`, as after `--set`; `campaign.*` for the campaign, anything else for all runs.
    Raises:
        ConfigError: every mistake with its place, those inside a condition at its line.
    """
    own = [text for text in overrides if text.strip().startswith(f"{SECTION}.")]
    source = read(file, own)
    if not is_campaign(file):
        problem = ConfigProblem(str(file), 0, 0, "file", "no [campaign] table", "add [campaign], or use retrain train")
        raise ConfigError([problem])
    settings = _settings(source)
    executor = Binder(source).bind(Slot("executor", settings.executor, (SECTION, "executor")))
    base = _base(settings, source)
    found = conditions(settings, source, base)
    _check_labels(found, settings, source)
    refused = {text: problem for text in overrides if (problem := _refusal(text, found))}
    problems, notes, configs = [*source.problems, *refused.values()], list[str](), list[LoadedConfig]()
    for condition in found:
        for text in overrides:
            if text not in own and text not in refused:
                condition.document.override(text)
        document = fork(condition.document)
        document.data = _with_seed(condition, "campaign", settings.seed_list[0], None)
        try:
            configs.append(validate(document))
        except ConfigError as error:
            problems += error.problems
            notes += getattr(error, "__notes__", ())
    complete = len(configs) == len(found)
    alone = (lambda: load_campaign(file, own)) if len(overrides) > len(own) else None
    mistakes, odd = judged(_unread(configs) if complete else [], alone)
    _stop([*problems, *(_duplicates(found, configs, source) if complete else ()), *mistakes], notes)
    assert executor is not None, "a mistake in it was raised"
    warnings = tuple(dict.fromkeys([*(warning for config in configs for warning in config.warnings), *odd]))
    return LoadedCampaign(
        str(file), source.text, settings, executor, tuple(found), tuple(configs), warnings, tuple(overrides)
    )


def _settings(source: Document) -> Campaign:
    """`[campaign]`; keys with mistakes are recorded and left out, to find more."""
    known = catalog({SECTION: Campaign})
    try:
        return Campaign.model_validate(source.data.get(SECTION, {}))
    except ValidationError as error:
        culprits = collect(source, error, known, lambda path: (SECTION, *path))
    if not isinstance(source.data[SECTION], dict):
        return Campaign()
    wrong = {path[1] for path in culprits if len(path) > 1}
    return Campaign.model_validate({key: value for key, value in source.data[SECTION].items() if key not in wrong})


def _base(settings: Campaign, source: Document) -> Document:
    """The run that all conditions share: `base`, the rest of the file over it, and `max_steps`."""
    path = Path(source.file).parent / settings.base if settings.base else None
    base = Document(source.file, source.text) if path is None else read(path)
    if SECTION in base.data:
        source.refuse((SECTION, "base"), f"{path} is a campaign itself", "give the file of a run")
        del base.data[SECTION]  # one error is enough; every condition would repeat it
    tables = {component.table for component in registry.components("executor")}
    for name, value in source.data.items():
        if name != SECTION and name not in tables:
            lay(base, (name,), value, source, (name,))
    training = base.data.get("training")
    written = training.get("max_steps", 0) if isinstance(training, dict) else 0
    if settings.max_steps is not None and type(written) is int and written >= 0:  # a mistake is for validation to find
        lay(base, ("training", "max_steps"), settings.max_steps, source, (SECTION, "max_steps"))
    return base


def _refusal(text: str, found: Sequence[Condition]) -> ConfigProblem | None:
    """Why `--set text` would have no effect; None if it would have one."""
    name = text.partition("=")[0].strip()
    flag, key = Document(""), canonical(name)
    flag.override(text)
    for _, fix in owned((), flag.data):
        return ConfigProblem(f"--set {text}", 0, 0, name, "the campaign sets this", fix)
    for condition in found:
        if any(within(key, own) or within(own, key) for own in map(canonical, condition.overrides)):
            what = f"condition {condition.label!r} sets this key"
            return ConfigProblem(f"--set {text}", 0, 0, name, what, "change it in the file")
    return None


def _check_labels(found: Sequence[Condition], settings: Campaign, source: Document) -> None:
    folders: dict[str, Condition] = {}
    labels = [condition.label for condition in found]
    known = f"labels: {', '.join(labels)}"
    for condition in found:
        first = folders.setdefault(condition.folder.lower(), condition)
        if first is not condition:
            other = f" (another is {first.label!r})" if first.label != condition.label else ""
            source.refuse(condition.at, f"two conditions are called {condition.label!r}{other}", "give each a label")
        if condition.against is not None and condition.against not in {*labels} - {condition.label}:
            source.refuse((*condition.at, "against"), f'no other condition is called "{condition.against}"', known)
    methods = list(dict.fromkeys(condition.method for condition in found))
    if settings.baseline is not None and settings.baseline not in methods:
        fix = did_you_mean(settings.baseline, methods, f"labels: {', '.join(methods)}")
        source.refuse((SECTION, "baseline"), f'no condition is called "{settings.baseline}"', fix)
    others = [label for label in methods if label != (settings.baseline or methods[0])]
    if settings.primary is not None and settings.tasks:
        source.refuse((SECTION, "primary"), "with tasks there is no one comparison with the baseline", "leave it out")
    elif settings.primary is not None and settings.primary not in others:
        fix = did_you_mean(settings.primary, others, f"labels: {', '.join(others)}")
        source.refuse((SECTION, "primary"), f'no condition but the baseline is called "{settings.primary}"', fix)


def _with_seed(condition: Condition, campaign: str, seed: int, folder: str | None) -> dict[str, Any]:
    """The condition's configuration with its seed, its own run directory (in `folder`), and names for trackers."""
    data = copy.deepcopy(condition.document.data)
    for section, values in {"training": {"seed": seed}, "logging": {"name": f"s{seed}"}}.items():
        if isinstance(data.setdefault(section, {}), dict):
            data[section] |= values
    logging = data["logging"]
    if folder is not None:
        logging["dir"] = folder
    used = logging.get("trackers", ()) if isinstance(logging, dict) else ()
    used = used if isinstance(used, list) else ()  # another value is a mistake, which validation finds
    for tracker in registry.components("tracker"):
        table = data.setdefault(tracker.table, {}) if tracker.name in used else None
        if isinstance(table, dict):
            tags = [*table.get("tags", ()), campaign, condition.label]
            known = {"name": f"{condition.label}_s{seed}", "group": condition.label, "tags": tags}
            table |= {key: value for key, value in known.items() if key in tracker.schema.model_fields}
    return data


def tracker_tables() -> list[str]:
    """Tables of all registered trackers: they say where metrics go, and change nothing that is measured."""
    return [tracker.table for tracker in registry.components("tracker")]


def _unread(configs: Sequence[LoadedConfig]) -> list[tuple[Key, ConfigProblem]]:
    """Keys that no run reads: what the base says may be for some conditions alone, what a condition says is its own."""
    return [
        (path, problem)
        for config in configs
        for path, problem in config.unread.items()
        if all(path in other.unread for other in configs if other.places.get(path) == config.places.get(path))
    ]


def _duplicates(found: Sequence[Condition], configs: Sequence[LoadedConfig], source: Document) -> list[ConfigProblem]:
    """Conditions that come out as the same run: comparing them would compare nothing."""
    problems: list[ConfigProblem] = []
    seen: dict[str, str] = {}
    for condition, config in zip(found, configs, strict=True):
        facts = config.resolved()
        for free in ("logging", *tracker_tables()):
            facts.pop(free, None)
        facts["components"].pop("tracker", None)
        first = seen.setdefault(json.dumps(facts, sort_keys=True), condition.label)
        if first != condition.label:
            text = f"condition {condition.label!r} is the same run as {first!r}"
            problems.append(source.at(condition.at, text, "change or remove one of the two"))
    return problems


def _stop(problems: Sequence[ConfigProblem], notes: Sequence[str]) -> None:
    if not problems:
        return
    error = ConfigError(sorted(dict.fromkeys(problems), key=lambda one: (one.file, one.line, one.column)))
    for note in dict.fromkeys(notes):
        error.add_note(note)
    raise error
