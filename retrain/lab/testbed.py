"""The testbed: makes a campaign that compares a method with a baseline on the tasks with a premise."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import tomli_w

from retrain import registry
from retrain.config.document import read
from retrain.config.load import load
from retrain.config.preset_keys import apply_preset
from retrain.errors import ConfigError, ConfigProblem, did_you_mean
from retrain.lab.controls import PLACEBO

QUICK = ("strategy", "rare", "planning", "decoy")
QUICK_SEEDS = 3
SEEDS = 9
"""With nine seeds an effect of two standard deviations on one of ten tasks is named in 94 % (docs/statistics.md)."""

CONTROLS: dict[str, dict[str, Any]] = {
    "oracle": {"algorithm_mode": "oracle"},
    "random credit": {"advantage_mode": "random_credit", "transform_mode": "none"},
    "reversed": {"advantage_mode": "reversed", "transform_mode": "none"},
}
"""Credit with a known result: the true advantage (better where credit matters), random credit and credit with the
wrong sign (worse).
"""
_FIRST_LOOK = 8
"""Number of seeds at the first look of `looks = "auto"`."""
_OTHER_SEEDS = "other seeds"
"""The control that is the baseline itself with other seeds (not different)."""
_SEED_OFFSET = 1000
"""Added to the seeds of that control; a campaign has at most 1000 seeds, so that none is used twice."""
_CREDIT_KINDS = ("advantage", "algorithm", "signal", "transform")
"""Kinds of components whose tables a control leaves out, because it has other credit than the baseline."""
_NO_CREDIT = ("filter", "reduction")
"""Keys of [algorithm] that a control has from the baseline."""

_TESTBED = ("model", "task", "training", "warmup", "eval", "checkpoint", "environment")
"""Sections set by the testbed and its tasks."""
_SHARED = ("reward_pool", "logging", "plugins")
"""Sections that also apply to the runs of the baseline."""
_PASSES = ("epochs", "minibatches")
"""Keys of [training] that belong to the method."""


def tasks_with_premise(controls: bool = False) -> list[str]:
    """Return the name of every task with a premise, those of installed packages included.

    Args:
        controls: leave out tasks with an environment, where the true advantage cannot be measured.
    """
    traits_of_task = [(task.name, registry.task.traits_of(task)) for task in registry.components("task")]
    with_premise = [(name, traits) for name, traits in traits_of_task if traits.premise]
    return [name for name, traits in with_premise if not (controls and "environment" in traits.settings)]


def card_toml(  # noqa: PLR0913 - the options of the command
    file: Path,
    against: Path | None,
    tasks: Sequence[str],
    seeds: int,
    slots: int | None,
    *,
    claim: str | None = None,
    controls: bool = False,
) -> str:
    """Return the campaign as a TOML document.

    Args:
        file: configuration of a run with the method.
        against: configuration of a run with the baseline; None for GRPO.
        tasks: names of tasks with a premise.
        seeds: number of seeds per condition.
        slots: number of concurrent runs; None: one per core or GPU.
        claim: the task on which the method is claimed to differ from the baseline.
        controls: add the baseline with other seeds, `CONTROLS` with the baseline's other settings, and the method with
            its token credit shuffled, if it has any.
    Raises:
        ConfigError: a file is not a valid run, both have the same method, a task does not exist or is given twice, or
            the claim is on none of the tasks.
    """
    _check_tasks(tasks, claim)
    method = _method(file)
    other = _method(against) if against else {}
    controlled = {*CONTROLS, _OTHER_SEEDS} if controls else set[str]()
    baseline = _distinct(against.stem if against else "grpo", controlled)
    # Two conditions with one method would train the same runs and never differ.
    if method == other:
        problem = f"it has the same method as the baseline, {baseline}"
        raise ConfigError.at(file, "file", problem, "change its method")
    label = _distinct(file.stem, controlled | {baseline})
    added: list[dict[str, Any]] = []
    if controls:
        # A preset sets credit as well, which the controls replace: written out, the rest of it can be kept.
        added = _controls(other, _method(against, presets=True) if against else {})
        if chain := _shuffled_chain(file):
            credit = {**method.get("algorithm", {}), "transform_mode": chain}
            added.append({"label": f"{label} {PLACEBO}", **method, "algorithm": credit, "against": label})
    campaign: dict[str, Any] = {
        "name": f"testbed-{file.stem}",
        "tasks": [*tasks],
        "seeds": seeds,
        "baseline": baseline,
        "slots": slots or "auto",
        "conditions": [{"label": baseline, **other}, {"label": label, **method}, *added],
    }
    # With fewer seeds "auto" has no look, and the campaign would warn about a setting that this command wrote.
    if seeds > _FIRST_LOOK:
        campaign["looks"] = "auto"
    if added:
        campaign["controls"] = [condition["label"] for condition in added]
    if claim is not None:
        campaign |= {"primary": label, "claim": claim}
    # Settings of the machine and of plug-ins hold for all conditions alike.
    shared = {name: read(file).data[name] for name in _SHARED if name in read(file).data}
    return tomli_w.dumps({"campaign": campaign, **shared})


def _distinct(name: str, taken: Set[str]) -> str:
    """Return the label of a file; labels may not differ in case alone, because folders are named after them."""
    return f"{name} (2)" if name.lower() in {label.lower() for label in taken} else name


def _check_tasks(tasks: Sequence[str], claim: str | None) -> None:
    """Raise ConfigError if a task does not exist or is given twice, or if the claim is on another task."""
    available = tasks_with_premise()
    problems: list[ConfigProblem] = []
    for index, name in enumerate(tasks):
        if name not in available:
            fix = did_you_mean(name, available, f"known: {', '.join(available)}")
            problems.append(ConfigProblem("--tasks", 0, 0, name, "there is no such task with a premise", fix))
        elif name in tasks[:index]:
            problems.append(ConfigProblem("--tasks", 0, 0, name, "this task is given twice", "name it once"))
    if claim is not None and claim not in tasks and not problems:
        fix = did_you_mean(claim, tasks, f"tasks of this testbed: {', '.join(tasks)}")
        problems.append(ConfigProblem("--claim", 0, 0, claim, "this task is not part of the testbed", fix))
    if problems:
        raise ConfigError(problems)


def _controls(baseline: dict[str, Any], written_out: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the conditions of the controls, given the baseline's settings, and the same with those of its preset."""
    credit = {component.table for kind in _CREDIT_KINDS for component in registry.components(kind)} | {"algorithm"}
    rest = {name: table for name, table in written_out.items() if name not in credit}
    kept = {key: value for key, value in written_out.get("algorithm", {}).items() if key in _NO_CREDIT}
    return [
        {"label": _OTHER_SEEDS, **baseline, "seed_offset": _SEED_OFFSET},
        *({"label": label, **rest, "algorithm": kept | chosen} for label, chosen in CONTROLS.items()),
    ]


def _shuffled_chain(file: Path) -> list[str]:
    """Return the transforms of a file with the placebo behind its token credit; [] if all tokens of a row have one.

    Corrections for the sampler stay behind it, because they belong to the tokens that were sampled.
    """
    loaded = load(file)
    first, *transforms = loaded.credit
    if first.kind == "advantage" and not transforms:
        return []
    chain = [transform.name for transform in loaded.all("transform")]
    # Behind the transforms of credit and before the corrections, which are listed last.
    chain.insert(len(transforms), PLACEBO)
    return chain


def _method(file: Path, *, presets: bool = False) -> dict[str, Any]:
    """Return the settings of credit, losses and optimization in a file, without those that the testbed sets.

    Args:
        file: configuration of a run.
        presets: with the keys of the preset that the file names.
    """
    # Validated as a run of its own, so that mistakes are reported in the user's file and not in the campaign.
    load(file)
    document = read(file)
    if presets:
        apply_preset(document)
    data = document.data
    tasks = {task.table for task in registry.components("task")}
    method = {name: table for name, table in data.items() if name not in (*_SHARED, *_TESTBED, *tasks)}
    passes = {key: data["training"][key] for key in _PASSES if key in data.get("training", {})}
    return method | ({"training": passes} if passes else {})
