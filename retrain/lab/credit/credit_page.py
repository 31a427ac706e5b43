"""Report of a comparison of advantages as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrain.lab.credit.credit_comparison import SUMMARY, ComparedCompletion, Credit, figures
from retrain.report.charts import Axes, Point, axis_range, dot, line, number, padded, polyline, span, svg
from retrain.report.page import Table, fill, plural

_SHOWN = 12
"""Number of completions whose tokens are drawn."""
_STRONGEST = 0.95
"""Quantile of the size of the tokens' credit that gets the strongest color; the maximum would fade most tokens."""


def page(title: str, completions: Sequence[ComparedCompletion], credits_: Sequence[Credit]) -> str:
    """Return the HTML page: a summary, and for every mode a plot of advantage against length or the tokens' credit.

    Args:
        title: title of the page.
        completions: the completions.
        credits_: credit of these completions under every mode.
    """
    groups = len({completion.group for completion in completions})
    right = sum(completion.correct for completion in completions)
    return fill(
        Path(__file__).with_name("credit.html"),
        title=title,
        scope=f"{plural(len(completions), 'completion')} of {plural(groups, 'prompt')}, {right:,} of them correct",
        summary=Table(["", *SUMMARY.values()], [[credit.name, *figures(credit)] for credit in credits_]),
        scatters=[(credit.name, _scatter(credit, completions)) for credit in credits_ if credit.tokens is None],
        strips=[_strips(credit, completions) for credit in credits_ if credit.tokens is not None],
    )


def _scatter(credit: Credit, completions: Sequence[ComparedCompletion]) -> str:
    low, high = axis_range(credit.advantages, percent=False)
    lengths = span([float(completion.length) for completion in completions])
    # 0 belongs to the axis, because the sign of an advantage is its meaning.
    axes = Axes(padded(lengths, 0.05), padded((min(low, 0.0), max(high, 0.0)), 0.05), label="tokens")
    zero = line("zero", axes.place(axes.x[0], 0), axes.place(axes.x[1], 0))
    marks = "".join(
        _mark(*axes.place(completion.length, value), completion.correct)
        for value, completion in zip(credit.advantages, completions, strict=True)
    )
    return svg(axes.draw() + zero + _lines(axes, credit, completions) + marks)


# A penalty of length shows as lines that fall.
def _lines(axes: Axes, credit: Credit, completions: Sequence[ComparedCompletion]) -> str:
    """Draw a line through the correct completions of each prompt, from the shortest to the longest."""
    groups: dict[str, list[Point]] = {}
    for value, completion in zip(credit.advantages, completions, strict=True):
        if completion.correct:
            groups.setdefault(completion.group, []).append((float(completion.length), value))
    return "".join(polyline(axes, sorted(points), "raw") for points in groups.values() if len(points) > 1)


def _mark(x: float, y: float, correct: bool) -> str:
    if correct:
        return dot("right-dot", (x, y), 4)
    return f'<path class="wrong-dot" d="M{x - 3.5:.1f},{y - 3.5:.1f} l7,7 m0,-7 l-7,7"/>'


def _strips(credit: Credit, completions: Sequence[ComparedCompletion]) -> dict[str, Any]:
    """Return the template's values for the first completions with the credit of their tokens."""
    rows = list(zip(completions, credit.tokens or (), credit.planning or (), strict=True))[:_SHOWN]
    sizes = sorted(abs(value) for _, values, _ in rows for value in values if value) or [1.0]
    # One outlier would otherwise fade the colors of all other tokens.
    scale = sizes[int(_STRONGEST * (len(sizes) - 1))]
    return {
        "name": credit.name,
        "scale": scale,
        "scale_text": number(round(scale, 3)),
        "more": len(completions) - len(rows),
        "rows": [
            (
                f"group {completion.group}, {verdict}, {completion.length} tokens",
                verdict,
                completion.tokens,
                values,
                planning,
            )
            for completion, values, planning in rows
            for verdict in ["right" if completion.correct else "wrong"]
        ],
    }
