"""Draw the credit of two completions of a run as an SVG: `python -m docs.credit runs/NAME STEP FILE.svg`.

They are the best and the worst completion of the group that the report shows, in the report's colors, which are full
from half of the largest advantage on. The numbers are the advantages that exceed most others of the completion.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from retrain.report.page import source
from retrain.report.samples import best_and_worst, completion, largest_advantage, reward_weights
from retrain.storage.run_files import read_rows
from retrain.system.records import read_json

CHARACTER, LINE, COLUMN, TOP, MARGIN = 9.0, 36, 300, 92, 24
"""Width of a character, height of a line, width of a completion, and place of its first line, in pixels."""
KEY = ("blue: made likelier, red: made less likely, underlined: planning tokens", "numbers: advantages that stand out")
NUMBERED = 1.25
"""Ratio to the median beyond which an advantage is written above its token."""
STYLE = """
text { font: 15px ui-monospace, "SF Mono", Menlo, Consolas, monospace; fill: var(--ink); white-space: pre; }
.prose { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 14px; fill: var(--soft); }
.number { font-size: 10.5px; fill: var(--soft); text-anchor: middle; }
.ground { fill: var(--paper); } .plan { stroke: var(--ink); stroke-width: 2; }
"""


def colors() -> str:
    """The custom properties of the report's pages, for a light and a dark ground."""
    light, dark = re.findall(r":root \{(.*?)\}", source("style.css"), re.DOTALL)[:2]
    return f":root {{{light}}}\n@media (prefers-color-scheme: dark) {{ :root {{{dark}}} }}"


def tokens(row: Mapping[str, Any], left: float, scale: float) -> Iterator[str]:
    """Every token with its color, its text and, where it stands out, its advantage."""
    x, y, usual = left, float(TOP), median(map(abs, row["advantages"]))
    for place, (text, advantage) in enumerate(zip(row["tokens"], row["advantages"], strict=True)):
        shown, width = text.replace("\n", "\u21b5"), CHARACTER * len(text)
        color, share = "good" if advantage > 0 else "bad", min(abs(advantage) / scale, 1.0)
        box = f'x="{x:.1f}" y="{y - 15:.1f}" width="{width:.1f}" height="21" rx="2"'
        style, title = f"fill: rgba(var(--{color}), {0.6 * share:.2f})", f"<title>{advantage:+.3g}</title>"
        yield f'<rect {box} style="{style}">{title}</rect>'
        yield f'<text x="{x:.1f}" y="{y:.1f}" textLength="{width:.1f}">{escape(shown)}</text>'
        if (row["planning"] or {})[place : place + 1] == [True]:
            yield f'<line class="plan" x1="{x:.1f}" x2="{x + width:.1f}" y1="{y + 7}" y2="{y + 7}"/>'
        if abs(advantage) > NUMBERED * usual:
            yield f'<text class="number" x="{x + width / 2:.1f}" y="{y - 18:.1f}">{advantage:+.2f}</text>'
        x, y = (left, y + LINE) if text.endswith("\n") else (x + width, y)


def picture(rows: Sequence[Mapping[str, Any]], scale: float) -> str:
    """The completions beside each other, under their common prompt."""
    parts = [f'<text class="prose" x="{MARGIN}" y="28">prompt: {escape(str(rows[0]["prompt"]))}</text>']
    for number, row in enumerate(rows):
        left = MARGIN + COLUMN * number
        parts += [f'<text class="prose" x="{left}" y="54">{escape(row["head"])}</text>', *tokens(row, left, scale)]
    lines = max(row["text"].count("\n") for row in rows) + 1
    width, height = MARGIN + COLUMN * len(rows), TOP + LINE * lines + 24
    for number, key in enumerate(KEY):
        parts.append(f'<text class="prose" x="{MARGIN}" y="{height - 36 + 20 * number}">{key}</text>')
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    title = "Two completions of a prompt, colored by the credit of every token"
    ground = f'<rect class="ground" width="{width}" height="{height}"/>'
    return "\n".join([opening, f"<title>{title}</title><style>{colors()}{STYLE}</style>", ground, *parts, "</svg>\n"])


def main(run: Path, step: int, file: Path) -> None:
    """Write the picture of a stored step of a run."""
    stored = read_rows(run / "rollouts" / f"step-{step:06d}.jsonl.gz")
    chosen = [stored[place] for place in best_and_worst(stored)]
    weights = reward_weights(read_json(run / "config.resolved.json"))
    shown = [completion(row, weights) for row in (chosen[0], chosen[-1])]
    file.write_text(picture(shown, largest_advantage((chosen[0], chosen[-1])) / 2), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
