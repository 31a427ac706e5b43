"""Pictures of the architecture as SVG: the layers with what they import, and one step of training."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from math import sqrt
from pathlib import Path
from typing import NamedTuple

from docs.measure import arrows, layers, lines_of_packages, modules, packages

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2933; }
.small { font-size: 10.5px; fill: #66727f; } .end { text-anchor: end; } .middle { text-anchor: middle; }
.band { fill: #eef1f5; } .bar { fill: #4c78a8; } .cell { fill: #e07b39; } .own { fill: #c3ccd6; }
.box { fill: #ffffff; stroke: #4c78a8; } .path { fill: none; stroke: #e07b39; stroke-width: 1.5; }
.lane { stroke: #d5dbe1; }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e7eb; } .small { fill: #9aa5b1; } .band { fill: #262c36; } .own { fill: #4a5563; }
  .box { fill: #1b2028; } .lane { stroke: #3a424e; }
}
"""
ROW, NAME, BAR = 22, 92, 180


class Stop(NamedTuple):
    """A file that a step of training enters: its path under `retrain/`, and what it does there."""

    file: str
    does: str

    @property
    def package(self) -> str:
        """The package of the file."""
        return self.file.split("/")[0].removesuffix(".py")


def layers_picture() -> str:
    """Every package on the line of its layer: a bar for its code lines, and a square for each package that it imports.

    A square right of the diagonal is an import of a lower layer; its area counts the import statements.
    """
    names, lines, most = packages(), lines_of_packages(), max(arrows().values())
    left, top = NAME + BAR + 80, 90
    parts = [*_bands(top, left + ROW * len(names))]
    for row, name in enumerate(names):
        y, x = top + ROW * row + ROW / 2, left + ROW * row + ROW / 2
        width = BAR * lines[name] / max(lines.values())
        count = sum(one.package == name for one in modules())
        parts += [
            f'<text x="{NAME}" y="{y + 4}" class="end">{name}</text>',
            f'<rect x="{NAME + 8}" y="{y - 6}" width="{width:.1f}" height="12" class="bar"/>',
            f'<text x="{NAME + width + 14:.1f}" y="{y + 4}" class="small">{lines[name]:,} in {count}</text>',
            f'<text transform="translate({x + 4},{top - 6}) rotate(-60)" class="small">{name}</text>',
            _square(x, y, ROW - 6, "own", f"{name}: {lines[name]:,} code lines in {count} modules"),
        ]
    for (user, used), count in sorted(arrows().items()):
        x, y = (start + ROW * names.index(name) + ROW / 2 for start, name in ((left, used), (top, user)))
        side = 5 + (ROW - 9) * sqrt(count / most)
        parts.append(_square(x, y, side, "cell", f"{user} imports from {used}: {count}"))
    parts.append(f'<text x="{NAME + 8}" y="{top - 8}" class="small">code lines in modules</text>')
    parts.append(f'<text x="{left}" y="14" class="small">imports from</text>')
    title = "The packages of retrain in their layers, and which import from which"
    return _svg(left + ROW * len(names) + 60, top + ROW * len(names) + 10, title, parts)


def _bands(top: float, width: float) -> Iterator[str]:
    """A ground for every second layer."""
    row = 0
    for number, line in enumerate(layers()):
        if number % 2 == 0:
            yield f'<rect x="0" y="{top + ROW * row}" width="{width}" height="{ROW * len(line)}" class="band"/>'
        row += len(line)


def _square(x: float, y: float, side: float, kind: str, title: str) -> str:
    """A square around a point, with a text that a pointer shows."""
    place = f'x="{x - side / 2:.1f}" y="{y - side / 2:.1f}" width="{side:.1f}" height="{side:.1f}"'
    return f'<rect {place} class="{kind}"><title>{escape(title)}</title></rect>'


def step_stops(page: str) -> list[Stop]:
    """The files of the numbered list under "One step of training" of the page, in order."""
    section = page.partition("## One step of training")[2].partition("\n## ")[0]
    found = re.findall(r"^\d+\. `(?:retrain/)?([\w/]+\.py)`[:,]? *(.*)$", section, re.MULTILINE)
    return [Stop(file, re.sub(r"[`*]", "", does)) for file, does in found]


def step_picture(stops: list[Stop]) -> str:
    """The files from top to bottom in the order in which a step first enters them, each in the lane of its package."""
    lanes = [package for package in packages() if package in {stop.package for stop in stops}]
    wide, high, top = 124, 40, 34
    text = wide * len(lanes) + 16
    height = top + high * len(stops)
    parts: list[str] = []
    for number, lane in enumerate(lanes):
        x = wide * number + wide / 2
        parts.append(f'<line x1="{x}" x2="{x}" y1="{top - 8}" y2="{height}" class="lane"/>')
        parts.append(f'<text x="{x}" y="16" class="middle">{lane}</text>')
    places = [
        (wide * lanes.index(stop.package) + wide / 2, top + high * row + high / 2) for row, stop in enumerate(stops)
    ]
    parts.append(f'<polyline points="{" ".join(f"{x:g},{y:g}" for x, y in places)}" class="path"/>')
    for (x, y), stop in zip(places, stops, strict=True):
        shape = f'x="{x - wide / 2 + 4}" y="{y - 12}" width="{wide - 8}" height="24"'
        parts += [
            f'<rect {shape} rx="4" class="box"/><text x="{x}" y="{y + 4}" class="middle">{Path(stop.file).name}</text>',
            f'<text x="{text}" y="{y + 4}" class="small">{escape(stop.does)}</text>',
        ]
    return _svg(text + 400, height + 8, "The files that one step of training enters, in order", parts)


def _svg(width: float, height: float, title: str, parts: list[str]) -> str:
    """A whole picture."""
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">'
    return "\n".join([opening, f"<title>{title}</title><style>{STYLE}</style>", *parts, "</svg>\n"])
