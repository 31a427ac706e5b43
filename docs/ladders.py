"""Draw what campaigns found, side by side: `python -m docs.ladders runs/A runs/B ... FILE.svg`.

Above, the mean held-out accuracy of every condition; below, what each condition changes against the one that it adds
to, with its 95% interval: filled where the test tells, hollow where it does not.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from retrain.campaign.verdict import figures
from retrain.campaign.verdict.analysis import Analysis, Comparison, analyze
from retrain.campaign.verdict.run_reader import read_campaign
from retrain.campaign.verdict.sentences import title
from retrain.report import page
from retrain.report.charts import HEIGHT, WIDTH

STYLE = Path(page.__file__).parent / "templates" / "style.css"
NAME, TOP, ROW = 100, 26, 26
"""Width of the name of a row; heights of a title and of a row."""


def pictured(directories: Sequence[Path]) -> str:
    """The SVG; nothing in it is fetched."""
    found = [analyze([read_campaign(directory)]) for directory in directories]
    rows = max(len(_ladder(one)) for one in found)
    height = TOP + HEIGHT + ROW * rows + 60
    parts = [
        f'<g transform="translate({number * (WIDTH + 10)} 0)">{"".join(_panel(directory.name, one, found))}</g>'
        for number, (directory, one) in enumerate(zip(directories, found, strict=True))
    ]
    width = len(found) * (WIDTH + 10)
    legend, lines = _legend(found[0], width - 20)
    legend = f'<g transform="translate(20 {height - 14})">{legend}</g>'
    height += ROW * (lines - 1)
    style = STYLE.read_text(encoding="utf-8")
    shown = "text { font: 13px system-ui, sans-serif; fill: var(--ink); } .name { font-weight: 600; }"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        f'<style>{style}{shown}</style><rect width="{width}" height="{height}" fill="var(--paper)"/>'
        f"{''.join(parts)}{legend}</svg>\n"
    )


def _ladder(analysis: Analysis) -> list[Comparison]:
    """The comparisons with the condition that each extends, or with the baseline if there are no others."""
    return [one for one in analysis.shown if one.family == analysis.shown[0].family]


def _panel(name: str, analysis: Analysis, every: Sequence[Analysis]) -> Iterator[str]:
    """The campaign's name, its curves, and a row for each comparison over an axis that all panels share."""
    yield f'<text class="name" x="50" y="17">{escape(name)}</text>'
    [(_, _, curves), *_] = figures.curves(analysis.first)
    yield _placed(curves, 0, TOP)
    span = figures.forest_span([comparison for one in every for comparison in _ladder(one)])
    y = TOP + HEIGHT + 8
    for row, comparison in enumerate(_ladder(analysis)):
        yield f'<text class="end" x="{NAME}" y="{y + ROW * row + 17}">{escape(title(comparison).split(" ")[0])}</text>'
        yield f'<g class="forest">{_placed(figures.forest_row(comparison, span), NAME, y + ROW * row)}</g>'
    yield _placed(figures.forest_axis(span), NAME, y + ROW * len(_ladder(analysis)))


def _placed(drawing: str, x: float, y: float) -> str:
    """What is inside a drawing, moved."""
    inside = re.sub(r"^<svg[^>]*>|</svg>$", "", drawing)
    return f'<g transform="translate({x} {y})">{inside}</g>'


def _legend(analysis: Analysis, width: float) -> tuple[str, int]:
    """Every condition with its mark, in lines of at most this width, and how many lines there are."""
    x, line, parts = 0, 0, list[str]()
    for name, mark in figures.keys(analysis.first):
        wide = 40 + 8 * len(name)
        x, line = (0, line + 1) if x and x + wide > width else (x, line)
        parts.append(f'<g transform="translate({x} {ROW * line - 4})">{mark}</g>')
        parts.append(f'<text x="{x + 12}" y="{ROW * line}">{escape(name)}</text>')
        x += wide
    return "".join(parts), line + 1


if __name__ == "__main__":
    Path(sys.argv[-1]).write_text(pictured([Path(one) for one in sys.argv[1:-1]]), encoding="utf-8")
