"""Where the numbers of a campaign come from: configurations, environments, and commands that reproduce them."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrain.campaign.plan.plan_file import PLAN
from retrain.campaign.verdict.results import Cell, Results
from retrain.storage.run_files import flatten
from retrain.system.records import read_json
from retrain.system.secret_names import masked

_FREE = ("training.seed", "logging", "checkpoint", "components")
"""Keys that may differ between the runs of a condition, or that follow from others."""

_NAME = re.compile(r"[^A-Za-z0-9._-]+")


def configuration(results: Results) -> dict[str, Any]:
    """The resolved configuration of the first run of the baseline that was started; empty without one."""
    cell = _started(results.of(results.baseline))
    return read_json(cell.path / "config.resolved.json") if cell else {}


def settings(run: Path) -> dict[str, Any]:
    """What determines a run apart from its seed: dotted key -> value; secrets are masked."""
    leaves = flatten(masked(read_json(run / "config.resolved.json")))
    return {key: value for key, value in leaves if not any(f"{key}.".startswith(f"{free}.") for free in _FREE)}


def differences(results: Results) -> dict[str, dict[str, str]]:
    """Keys that differ between conditions: key -> label -> value as JSON; `-` where it is not set.

    Conditions without a started run are left out.
    """
    first = {label: cell for label in results.conditions if (cell := _started(results.of(label)))}
    found = {label: settings(cell.path) for label, cell in first.items()}
    keys = dict.fromkeys(key for values in found.values() for key in values)
    shown = {
        key: {label: json.dumps(values[key]) if key in values else "-" for label, values in found.items()}
        for key in keys
    }
    return {key: values for key, values in shown.items() if len(set(values.values())) > 1}


def environments(results: Results) -> dict[str, dict[str, int]]:
    """Of every fact about the machines and packages: value -> runs; most frequent first."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for cell in results.cells.values():
        facts = dict(flatten(read_json(cell.path / "environment.json")))
        if cell.host:
            facts["host"] = cell.host
        for key, value in facts.items():
            counts[key][value if isinstance(value, str) else json.dumps(value)] += 1
    return {key: dict(values.most_common()) for key, values in counts.items()}


def campaign_commands(directory: Path, results: Results) -> list[str]:
    """Commands that run the campaign again, and each of its cells alone."""
    source = str(read_json(directory / PLAN).get("file") or directory / "campaign.toml")
    lines = ["# everything", f"retrain campaign {shlex.quote(source)}", f"retrain report {shlex.quote(str(directory))}"]
    lines += ["", "# one run; its name keeps it apart from the campaign's"]
    for cell in (cell for label in results.conditions for cell in results.of(label)):
        config, name = str(cell.path / "config.toml"), f"again-{cell.path.parent.name}-{cell.path.name}"
        options = f"--set logging.name={_NAME.sub('-', name)} --set logging.dir=runs"
        lines.append(f"retrain train {shlex.quote(config)} {options}")
    return lines


def _started(cells: Sequence[Cell]) -> Cell | None:
    started = [cell for cell in cells if (cell.path / "config.resolved.json").is_file()]
    return next((cell for cell in started if cell.done), started[0] if started else None)
