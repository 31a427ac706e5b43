"""Draw the live screen of a finished run as an animated SVG: `python -m docs.recording runs/NAME FILE.svg`.

The frames are what the terminal showed: the same code draws them, from the rows and samples that the run stored.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from retrain.display.live_screen import Screen
from retrain.storage.run_files import read_rows

WIDTH, FRAMES, SECONDS = 96, 16, 0.8
"""Columns; pictures; seconds that each is shown."""


def screens(run: Path) -> Iterator[Screen]:
    """The screen after each of FRAMES steps, evenly spaced, the last step included."""
    steps, evaluations = read_rows(run / "metrics.jsonl"), {row["step"]: row for row in read_rows(run / "eval.jsonl")}
    shown = {round((frame + 1) * len(steps) / FRAMES) for frame in range(FRAMES)}
    screen = Screen(Console(width=WIDTH))
    screen("run", {"directory": "runs/quickstart"})
    screen("eval", evaluations[0])
    for done, row in enumerate(steps, 1):
        screen("step", row | {"max_steps": len(steps)})
        spent = sum(one["time/step_s"] for one in steps[:done])
        screen.left_s = spent / done * (len(steps) - done)  # by the run's clock, not by this one's
        if done in evaluations:
            screen("eval", evaluations[done])
        if (stored := run / "rollouts" / f"step-{row['step']:06d}.jsonl.gz").is_file():
            screen("sample", _first(stored))
        if done in shown:
            yield screen


def _first(rollouts: Path) -> dict[str, Any]:
    with gzip.open(rollouts, "rt", encoding="utf-8") as lines:
        return json.loads(next(lines))


def animated(run: Path) -> str:
    """All screens in one SVG, one after the other; the last alone where motion is not wanted."""
    styles, groups, last = [""], [""], ""
    for number, screen in enumerate(screens(run)):
        console = Console(width=WIDTH, height=20, record=True, force_terminal=True, file=StringIO())
        console.print(screen.render())
        last = console.export_svg(title="retrain train configs/quickstart.toml", unique_id=f"f{number}")
        styles += re.findall(rf"^\s*(\.f{number}-r\d+ \{{.*?\}})", last, re.MULTILINE)
        [matrix] = re.findall(rf'<g class="f{number}-matrix">(.*?)</g>\s*</g>', last, re.DOTALL)
        groups.append(f'<g class="frame" style="animation-delay:{number * SECONDS}s">{matrix}</g>')
    return _joined(last, styles, groups)


def _joined(last: str, styles: list[str], groups: list[str]) -> str:
    """The window of the last screen around all of them."""
    count = len(groups) - 1
    styles.append(
        f".frame {{ visibility: hidden; animation: show {count * SECONDS}s step-end infinite; }}"
        f"@keyframes show {{ 0% {{ visibility: visible }} {100 / count:.3f}% {{ visibility: hidden }} }}"
        "@media (prefers-reduced-motion: reduce) "
        "{ .frame { animation: none } .frame:last-of-type { visibility: visible } }"
    )
    last = re.sub(r"@font-face \{.*?\}", "", last, flags=re.DOTALL)  # nothing is fetched to show it
    head, _, rest = last.replace("</style>", "\n".join(styles) + "</style>", 1).partition('-matrix">')
    _, _, tail = rest.rpartition("</g>\n    </g>")
    text = f'{head}-matrix">{"".join(groups)}</g>\n    </g>{tail}'
    text = re.sub(r"f\d+-line", "line", text)  # all screens are clipped alike
    return "\n".join(line.strip() for line in text.splitlines() if line.strip()) + "\n"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(animated(Path(sys.argv[1])), encoding="utf-8")
