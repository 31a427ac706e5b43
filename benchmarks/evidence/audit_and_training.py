"""Does the audit of a method's credit predict what training with it gives? Rank correlation over methods and tasks.

    retrain campaign benchmarks/evidence/ten-methods.toml
    python benchmarks/evidence/audit_and_training.py audit runs/evidence-ten-methods > audits.jsonl
    python benchmarks/evidence/audit_and_training.py compare runs/evidence-ten-methods audits.jsonl

`audit` audits every method of the campaign along the training path of the baseline: every checkpoint of its first seed
on each task. `compare` sets the mean logarithm of a method's effective batch on that path against its paired difference
from the baseline in area under the learning curve. The figure is the mean over tasks of Spearman's correlation over
methods. Its 95% interval is a percentile bootstrap that draws the methods of each task, and with them their seeds.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from retrain.campaign.plan.plan_file import read_plan
from retrain.campaign.verdict.results import Results, read_campaign

BATCHES, CONTINUATIONS, DRAWS = 8, 4, 10_000
SETTING = "surprisal_mask.rho=0.2"
"""As the campaign has it; without it, the method is off."""

Points = dict[str, dict[str, tuple[float, list[float]]]]
"""task -> method -> (mean log effective batch, differences in area of its seeds)."""


def audit_all(directory: Path) -> None:
    """Print the audit of every checkpoint on the baseline's path, a row of JSON each, with its task."""
    for task in read_plan(directory).tasks:
        results = read_campaign(directory, task)
        methods = ",".join(one for one in results.conditions if one != results.baseline)
        command = ["retrain", "audit", str(_path(results)), "--all-checkpoints", "--json", "--methods", methods]
        command += ["--batches", str(BATCHES), "--continuations", str(CONTINUATIONS), "--set", SETTING]
        program = Path(sys.executable).parent / command[0]
        text = subprocess.run([program, *command[1:]], check=True, capture_output=True, text=True).stdout
        for line in text.splitlines():
            print(json.dumps({"task": task, **json.loads(line)}), flush=True)


def _path(results: Results) -> Path:
    """The run of the baseline with the first seed."""
    return results.cells[results.baseline, results.seeds[0]].path


def paired(directory: Path, audits: Sequence[Mapping[str, Any]]) -> Points:
    """What audits and runs say of every method on every task. Without a figure in the audits a method is left out."""
    found: Points = {}
    for task in read_plan(directory).tasks:
        results = read_campaign(directory, task)
        base = results.done(results.baseline)
        for method in results.conditions:
            values = [
                one["methods"].get(method, {}).get("effective_batch", {}).get("value")
                for one in audits
                if one["task"] == task
            ]
            known = [math.log(value) for value in values if value]
            own = results.done(method)
            areas = [own[seed].area - base[seed].area for seed in own if seed in base]
            if method != results.baseline and known and areas:
                found.setdefault(task, {})[method] = (sum(known) / len(known), areas)
    return found


def correlation(points: Points) -> float:
    """Mean over tasks of Spearman's correlation of effective batch and mean difference in area, over methods."""
    found = [
        spearmanr([batch for batch, _ in methods.values()], [np.mean(areas) for _, areas in methods.values()]).statistic
        for methods in points.values()
    ]
    return float(np.mean(found))


def interval(points: Points, draws: int = DRAWS) -> tuple[float, float]:
    """Percentile bootstrap of the correlation; a draw in which a task has one method or one value only is repeated."""
    rng = np.random.default_rng(0)
    found: list[float] = []
    while len(found) < draws:
        drawn: Points = {}
        for task, methods in points.items():
            names = [list(methods)[i] for i in rng.integers(len(methods), size=len(methods))]
            drawn[task] = {f"{place} {name}": _redrawn(methods[name], rng) for place, name in enumerate(names)}
        if all(len({batch for batch, _ in methods.values()}) > 1 for methods in drawn.values()):
            found.append(correlation(drawn))
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


def _redrawn(one: tuple[float, list[float]], rng: np.random.Generator) -> tuple[float, list[float]]:
    batch, areas = one
    return batch, [areas[i] for i in rng.integers(len(areas), size=len(areas))]


def compare(directory: Path, audits: Path) -> None:
    """Print both figures of every method, and the correlation."""
    points = paired(directory, [json.loads(line) for line in audits.read_text(encoding="utf-8").splitlines()])
    for task, methods in points.items():
        for name, (batch, areas) in sorted(methods.items(), key=lambda item: -item[1][0]):
            print(f"{task:10} {name:24} effective batch {math.exp(batch):.2f}  area {np.mean(areas):+.3f}")
    low, high = interval(points)
    print(f"rank correlation {correlation(points):+.2f} [{low:+.2f}, {high:+.2f}]")


if __name__ == "__main__":
    if sys.argv[1] == "audit":
        audit_all(Path(sys.argv[2]))
    else:
        compare(Path(sys.argv[2]), Path(sys.argv[3]))
