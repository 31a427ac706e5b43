"""Does the audit of a method's credit predict what training with it gives? Rank correlation over methods and tasks.

    retrain campaign benchmarks/evidence/ten-methods.toml
    python benchmarks/evidence/audit_and_training.py audit runs/evidence-ten-methods > audits.jsonl
    python benchmarks/evidence/audit_and_training.py compare runs/evidence-ten-methods audits.jsonl [scatter.svg]

`audit` audits every method of the campaign along the training path of the baseline: every checkpoint of its first seed
on each task. `compare` sets the mean logarithm of a method's effective batch on that path against its paired difference
from the baseline in area under the learning curve. The figure is the mean over tasks of Spearman's correlation over
methods. Its 95% interval is a percentile bootstrap that draws the methods of each task, and with them their seeds. The
figure, if asked for, has a panel for each task and a 95% t interval of each method's difference.
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
from retrain.campaign.verdict.analysis import mean_estimate
from retrain.campaign.verdict.results import Results
from retrain.campaign.verdict.run_reader import read_campaign
from retrain.campaign.verdict.statistics import Estimate

BATCHES, CONTINUATIONS, DRAWS = 24, 4, 10_000
MARGIN, SIDE, GAP, LEGEND = 60, 230, 55, 5
"""Sizes of the figure in its units, and methods on a line of its legend."""
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2933; } .small { font-size: 10.5px; fill: #66727f; }
.end { text-anchor: end; } .middle { text-anchor: middle; } .axis { fill: none; stroke: #c3ccd6; }
.bar { stroke: #e07b39; stroke-width: 1.5; } .dot { fill: #ffffff; stroke: #4c78a8; }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e7eb; } .small { fill: #9aa5b1; } .axis { stroke: #3a424e; } .dot { fill: #1b2028; }
}
"""
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


def compare(directory: Path, audits: Path, figure: Path | None = None) -> None:
    """Print both figures of every method, their correlation on each task and the mean; and draw them."""
    points = paired(directory, [json.loads(line) for line in audits.read_text(encoding="utf-8").splitlines()])
    for task, methods in points.items():
        for name, (batch, areas) in sorted(methods.items(), key=lambda item: -item[1][0]):
            print(f"{task:10} {name:24} effective batch {math.exp(batch):.2f}  area {np.mean(areas):+.3f}")
        print(f"{task:10} rank correlation {correlation({task: methods}):+.2f}")
    low, high = interval(points)
    print(f"rank correlation {correlation(points):+.2f} [{low:+.2f}, {high:+.2f}]")
    if figure:
        figure.write_text(scatter(points), encoding="utf-8")


def scatter(points: Points) -> str:
    """Draw a panel for each task: effective batch to the right, on a logarithmic scale, difference in area upwards.

    A method has the same number in every panel; the legend is below.
    """
    methods = list(dict.fromkeys(name for one in points.values() for name in one))
    spans = {
        task: {name: (batch, mean_estimate(areas)) for name, (batch, areas) in points[task].items()} for task in points
    }
    every = [one for span in spans.values() for one in span.values()]
    right = max(abs(batch) for batch, _ in every) * 1.1
    top = max(abs(end) for _, area in every for end in (area.low, area.high)) * 1.05
    parts = [_panel(place, task, spans[task], methods, (right, top)) for place, task in enumerate(spans)]
    for place, name in enumerate(methods):
        x, y = MARGIN + place % LEGEND * 150, MARGIN + SIDE + 60 + place // LEGEND * 18
        parts.append(f'<text x="{x}" y="{y}" class="small">{place + 1}  {name}</text>')
    width, height = MARGIN + (SIDE + GAP) * len(spans), SIDE + 80 + 18 * math.ceil(len(methods) / LEGEND)
    box = f'viewBox="0 {MARGIN - 30} {width} {height}" width="{width}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">'
    return f"{opening}<style>{STYLE}</style>{''.join(parts)}</svg>\n"


def _panel(
    place: int,
    task: str,
    span: Mapping[str, tuple[float, Estimate]],
    methods: Sequence[str],
    most: tuple[float, float],
) -> str:
    left, middle = MARGIN + place * (SIDE + GAP), MARGIN + SIDE / 2
    parts = [
        f'<rect x="{left}" y="{MARGIN}" width="{SIDE}" height="{SIDE}" class="axis"/>',
        f'<path d="M{left} {middle}h{SIDE}M{left + SIDE / 2} {MARGIN}v{SIDE}" class="axis"/>',
        f'<text x="{left + SIDE / 2}" y="{MARGIN - 10}" class="middle">{task}</text>',
        f'<text x="{left + SIDE / 2}" y="{MARGIN + SIDE + 33}" class="small middle">effective batch</text>',
        f'<text transform="translate({left - 38},{middle}) rotate(-90)" class="small middle">area</text>',
    ]
    for tick in (0.5, 0.7, 1.0, 1.4, 2.0):
        x = left + SIDE / 2 * (1 + math.log(tick) / most[0])
        parts += [f'<text x="{x:.1f}" y="{MARGIN + SIDE + 16}" class="small middle">{tick:g}</text>'] * (
            left < x < left + SIDE
        )
    for tick in (-0.1, -0.05, 0.05, 0.1):
        y = middle - SIDE / 2 * tick / most[1]
        parts += [f'<text x="{left - 6}" y="{y + 4:.1f}" class="small end">{tick:+g}</text>'] * (
            MARGIN < y < MARGIN + SIDE
        )
    for name, (batch, area) in span.items():
        x = left + SIDE / 2 * (1 + batch / most[0])
        y, low, high = (middle - SIDE / 2 * value / most[1] for value in (area.value, area.low, area.high))
        parts += [
            f'<path d="M{x:.1f} {high:.1f}v{low - high:.1f}" class="bar"/>',
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" class="dot"><title>{name}</title></circle>',
            f'<text x="{x:.1f}" y="{y + 3.5:.1f}" class="small middle">{methods.index(name) + 1}</text>',
        ]
    return "".join(parts)


if __name__ == "__main__":
    if sys.argv[1] == "audit":
        audit_all(Path(sys.argv[2]))
    else:
        compare(*map(Path, sys.argv[2:]))
