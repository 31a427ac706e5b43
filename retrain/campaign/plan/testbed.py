"""`retrain testbed`: the campaign that runs a method and a baseline on the tasks that have a premise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from retrain import registry
from retrain.config.document import read
from retrain.config.load import load
from retrain.errors import ConfigError, ConfigProblem, did_you_mean

QUICK, QUICK_SEEDS = ("strategy", "rare", "planning", "decoy"), 3
SEEDS = 9
"""The fewest with which a difference on one of ten tasks can be significant after Holm's correction."""

_TESTBED = ("model", "task", "training", "warmup", "eval", "checkpoint", "environment")
"""Sections that the testbed and its tasks decide."""
_SHARED = ("reward_pool", "logging", "plugins")
"""Sections that hold for the runs of the baseline as well."""
_PASSES = ("epochs", "minibatches")
"""Keys of [training] that belong to the method."""


def testbed_tasks() -> list[str]:
    """Every registered task that has a premise."""
    return [one.name for one in registry.components("task", trait="premise")]


def testbed_toml(file: Path, against: Path | None, tasks: Sequence[str], seeds: int, slots: int | None) -> str:
    """The campaign as a TOML document.

    Args:
        file: of a run with the method to be judged. against: of a run with the baseline; None for GRPO.
    Raises:
        ConfigError: a file is no valid run, both are one method, or there is no such task.
    """
    known, baseline = testbed_tasks(), against.stem if against else "grpo"
    for name in tasks:
        if name not in known:
            fix = did_you_mean(name, known, f"known: {', '.join(known)}")
            raise ConfigError([ConfigProblem("--tasks", 0, 0, name, "no task with a premise has this name", fix)])
    method, other = _method(file), _method(against) if against else {}
    if method == other:
        raise ConfigError([ConfigProblem(str(file), 0, 0, "file", f"its method is {baseline}", "change it")])
    label = file.stem if file.stem != baseline else f"{file.stem} (2)"
    campaign = {
        "name": f"testbed-{file.stem}",
        "tasks": [*tasks],
        "seeds": seeds,
        "baseline": baseline,
        "slots": slots or "auto",
        "conditions": [{"label": baseline, **other}, {"label": label, **method}],
    }
    shared = {name: read(file).data[name] for name in _SHARED if name in read(file).data}
    return tomli_w.dumps({"campaign": campaign, **shared})


def _method(file: Path) -> dict[str, Any]:
    """What a file says of credit, losses and optimization; what the testbed decides is left out."""
    load(file)  # raises its mistakes with their places
    data, tasks = read(file).data, {one.table for one in registry.components("task")}
    method = {name: table for name, table in data.items() if name not in (*_SHARED, *_TESTBED, *tasks)}
    passes = {key: data["training"][key] for key in _PASSES if key in data.get("training", {})}
    return method | ({"training": passes} if passes else {})
