"""Premises of the testbed's tasks in plans and reports, and the version of the tasks' definitions.

The entry point group `retrain.campaign` names this module: `planned` writes premises to plan.json, and `reported`
checks them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from retrain import registry
from retrain.config.load import LoadedConfig
from retrain.report.page import Table
from retrain.storage.run_files import read_rows
from retrain.types import Problem

VERSION = "testbed-v1"
"""Version of the definitions below. Change it when a definition has to change."""

FROZEN: Mapping[str, str] = {
    "calculator": "b2a68010c8152f777f38a6fa80463ef90ecfecb7db56d29b40ad96b1e2f0e10a",
    "guess": "3d6f922d68bc0c810c5b15fc5cd2c21dcb3abcd7dcf4c21abd512763b08a1d83",
    "strategy": "8ef99187af65205119b0599a118ff07484ac08357cf873a6f84b8215887b0eed",
    "rare": "a14885878ba0fb0e993ac80d7f0e359a674e7fbcacc6eafe5cf9c7aef8ce8862",
    "brevity": "af9cc4fcf2b1999958d7f442809f04c8d78bbcf2fc910cb0c47ea39d8f2113be",
    "chain": "9d45467154d69e8c4eb21a905c6931cdde407ea99dc2adc50619979583e4d54d",
    "decoy": "75bdd0b414a0951c15a9808a41afa8d2d31f51d63a971521832dbc586a11ed73",
    "noisy": "5f91ef1e7cd13d4997c88cbd959edd8740c0b6a66f0532e9d04d863dd50a8884",
    "planning": "26f777ba8e1a3d6560f375089f84643cdc4dbab04280ac952a94324d0d8c8c31",
    "precision": "b088bedae07cbdf6f3bced93c8e226e1e0babece5bc9049c423f61577443defa",
}
"""Task -> sha256 of its definition."""

_KEYS: Mapping[str, tuple[str, ...]] = {
    "model": ("path",),
    "training": ("batch_size", "group_size", "max_steps", "max_tokens", "temperature"),
    "warmup": ("steps", "batch_size", "lr", "warmup_steps", "problems"),
    "eval": ("problems", "samples", "temperature", "top_p", "top_k", "greedy", "pass_at", "seed"),
    "environment": ("name", "max_turns", "turn_tokens"),
}
"""Keys of a run that are part of a task's definition, because methods must not differ in them."""
_TRAINING, _HELDOUT = 256, 64
"""Numbers of training problems and held-out problems that are part of a definition."""


def planned(loaded: Any) -> dict[str, dict[str, Any]]:
    """Return for each task of a campaign what plan.json records of its premise.

    Returns:
        Task -> `about`, the first sentence of the task's docstring; `bounds`, metric of an evaluation -> (smallest,
        largest value) before training; and `sha256` of the task's definition, "" without a premise.
    """
    # Conditions differ in credit alone, so that any of a task's configurations has its definition.
    tasks = {condition.task: config for condition, config in zip(loaded.conditions, loaded.configs, strict=True)}
    components = {name: config.one("task") for name, config in tasks.items() if name}
    return {
        name: {
            "about": " ".join((component.target.__doc__ or "").partition("\n\n")[0].split()),
            "bounds": dict(registry.task.traits_of(component).premise),
            "sha256": sha256(tasks[name]),
        }
        for name, component in components.items()
    }


def reported(premises: Mapping[str, Any], tables: Sequence[Any]) -> dict[str, Any]:
    """Check the premises of a campaign's tasks in the first evaluation of one run per warm start.

    One run suffices, because before training all runs of a warm start have the same weights.

    Args:
        premises: what `planned` returned.
        tables: the results of each task.
    """
    rows: list[dict[str, str]] = []
    remarks: list[str] = []
    # A task has a table for each outcome; reversed, the first outcome's table stays.
    results = {table.task: table for table in reversed(tables) if table.task}
    tasks = list(dict.fromkeys(table.task for table in tables if table.task))
    for task in tasks:
        checks = _checks(results[task], premises[task]["bounds"]) if task in premises else []
        remarks += [f"the premise of {task} {word}: {measured}" for measured, word in checks if word != "holds"]
        words = {word for _, word in checks}
        row = {
            "task": task,
            "premise": _about(premises.get(task)) or "-",
            "measured (bounds)": "; ".join(measured for measured, _ in checks) or "-",
            # One bound that fails refutes the premise; one that was not measured only leaves it open.
            "verdict": "fails" if "does not hold" in words else "holds" if words == {"holds"} else "-",
        }
        rows.append(row)
    hashes = {task: str(premises.get(task, {}).get("sha256", "")) for task in tasks}
    table = Table.of(rows if any(task in premises for task in tasks) else [])
    title = "Premises, measured before training"
    return {"title": title, "table": table, "remarks": remarks, "scope": version(hashes)}


def _checks(results: Any, bounds: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return for each warm start and metric its value with the bounds, and "holds" or why it does not."""
    checks: list[tuple[str, str]] = []
    for start in sorted({cell.start for cell in results.runs}):
        files = (cell.path / "eval.jsonl" for cell in results.runs if cell.start == start)
        # A run may have failed before its first evaluation; any other of the warm start serves.
        first = next((rows[0] for file in files if (rows := read_rows(file))), {})
        for metric, (low, high) in bounds.items():
            value = float(first.get(metric, "nan"))
            name = metric.removeprefix("task/").replace("_", " ") + (f" of start {start}" if start else "")
            if math.isnan(value):
                checks.append((f"{name} ({low:g} to {high:g})", "was not measured"))
            else:
                word = "holds" if low <= value <= high else "does not hold"
                checks.append((f"{name} {value:.3f} ({low:g} to {high:g})", word))
    return checks


def _about(premise: Mapping[str, str] | None) -> str:
    """Return the first sentence of the task's docstring, up to a colon; "" without a premise."""
    if premise is None:
        return ""
    sentence = premise["about"].partition(":")[0].partition(". ")[0].rstrip(".")
    return sentence[:1].lower() + sentence[1:]


def sha256(config: LoadedConfig) -> str:
    """Return the sha256 of the definition of a run's task; "" for a task without a premise.

    The definition consists of the premise, the parameters, the rewards, the keys in `_KEYS`, 256 training problems of
    seed 0 with their demonstrations, and 64 held-out problems. It includes neither the Python code nor the observations
    of an environment.
    """
    bound = config.one("task")
    traits = registry.task.traits_of(bound)
    if not traits.premise:
        return ""
    # Resolved values: a default that changes in the package changes the definition as well.
    sections = config.config.model_dump(mode="json")
    task = config.task(0)
    stated = {
        "task": bound.name,
        "premise": {name: [*bounds] for name, bounds in traits.premise.items()},
        "parameters": bound.arguments,
        "rewards": traits.settings.get("rewards", []),
        "keys": {section: {key: sections[section][key] for key in keys} for section, keys in _KEYS.items()},
        "training": [_stated(task.problem(index)) for index in range(_TRAINING)],
        # Problems stand for the code that draws them: refactored code with the same problems is the same task.
        "heldout": [_stated(problem) for problem in task.heldout(_HELDOUT)],
    }
    return hashlib.sha256(json.dumps(stated, sort_keys=True, default=str).encode()).hexdigest()


def version(hashes: Mapping[str, str]) -> str:
    """Describe the version of these tasks for a report, with a digest of all definitions.

    Args:
        hashes: task -> sha256 of its definition.
    Returns:
        A phrase; "" if there is no task, or if a task has no premise.
    """
    # A task without a premise has no definition that could be compared.
    if not hashes or not all(hashes.values()):
        return ""
    digest = hashlib.sha256("".join(f"{name} {hashes[name]}\n" for name in sorted(hashes)).encode()).hexdigest()
    # Settings of a run, such as its model, can change a definition without any change of the code.
    changed = [name for name, sha256_of_task in hashes.items() if FROZEN.get(name) != sha256_of_task]
    differs = f"{', '.join(changed)}, which {'differs' if len(changed) == 1 else 'differ'} from {VERSION}"
    return f"tasks of {VERSION}{f', except {differs}' if changed else ''} (sha256 {digest[:16]})"


def _stated(problem: Problem) -> list[Any]:
    """Return the content of a problem: prompt, answer, demonstration and further fields."""
    return [problem.id, problem.prompt, problem.answer, problem.solution, [*problem.replies], dict(problem.extra)]
