"""Draw SEPA's schedule for docs/sepa.md: `python -m docs.schedule docs/images/sepa.svg`."""

from __future__ import annotations

import sys
from pathlib import Path

from docs.pictures import STYLE
from retrain.algorithms.sepa import SepaLambda

STEPS, LEFT, TOP, WIDTH, HEIGHT = 200, 50, 24, 640, 200
GATES = ((0, "gate opens at step 0", "start"), (60, "gate opens at step 60", "late"))
COLORS = """
.axis { stroke: #66727f; } .grid { stroke: #d5dbe1; } polyline { fill: none; stroke-width: 2.5; }
.start { stroke: #4c78a8; } .late { stroke: #e07b39; stroke-dasharray: 7 4; }
@media (prefers-color-scheme: dark) { .grid { stroke: #3a424e; } }
"""


def schedule_picture() -> str:
    """The pooling weight of every step of a run with the default schedule, for an early and a late gate."""
    parts = [*_axes()]
    for row, (gate, label, kind) in enumerate(GATES):
        points = " ".join(f"{_x(step):.1f},{_y(weight):.1f}" for step, weight in enumerate(weights(gate)))
        y = TOP + HEIGHT - 60 + 20 * row
        parts += [
            f'<polyline class="{kind}" points="{points}"/>',
            f'<polyline class="{kind}" points="{LEFT + WIDTH - 190},{y - 4} {LEFT + WIDTH - 160},{y - 4}"/>',
            f'<text x="{LEFT + WIDTH - 152}" y="{y}">{label}</text>',
        ]
    size = f'viewBox="0 0 {LEFT + WIDTH + 30} {TOP + HEIGHT + 46}"'
    style = f"<style>{STYLE}{COLORS}</style>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">{style}{"".join(parts)}</svg>\n'


def weights(gate: int) -> list[float]:
    """The weight at every step of a run whose gate opens at step `gate`."""
    schedule = SepaLambda(STEPS)
    closed = [schedule.at(step) for step in range(gate)]
    schedule.load_state_dict({"opened_at": gate, "seen": 0, "variance": None, "initial": None})
    return [*closed, *(schedule.at(step) for step in range(gate, STEPS))]


def _axes() -> list[str]:
    parts = [f'<text x="{LEFT}" y="14">pooling weight of SEPA, {STEPS} steps</text>']
    for weight in (0.0, 0.5, 1.0):
        y = _y(weight)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="small end" x="{LEFT - 8}" y="{y + 4}">{weight:g}</text>')
    for step in range(0, STEPS + 1, 40):
        parts.append(f'<text class="small middle" x="{_x(step)}" y="{TOP + HEIGHT + 18}">{step}</text>')
    parts.append(f'<text class="small middle" x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 38}">step</text>')
    return parts


def _x(step: float) -> float:
    return LEFT + WIDTH * step / STEPS


def _y(weight: float) -> float:
    return TOP + HEIGHT * (1 - weight)


if __name__ == "__main__":
    Path(sys.argv[-1]).write_text(schedule_picture(), encoding="utf-8")
