"""Report of audits as a self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrain.lab.audit.credit_audit import COSTLIEST, Audit, Figure, ShownCompletion, Verdict
from retrain.lab.audit.methods import ORACLE
from retrain.report.charts import dot, line, number
from retrain.report.exported_figures import Drawing, stacked
from retrain.report.page import Table, fill

HEADINGS = ("effective batch", "of the oracle's", "bias", "signal to noise", "correlation")
_STRONGEST = 0.95
"""Quantile of the size of a completion's credit that gets the strongest color."""
_WIDEST = 4.0
"""Largest effective batch on the axis."""


def cells(verdict: Verdict) -> list[str]:
    """Format the figures of a method with their intervals, in the order of HEADINGS."""
    return [
        _with_interval(figure, form)
        for figure, form in zip(verdict.figures.values(), (".2f", ".2f", ".3f", ".3f", ".3f"), strict=True)
    ]


def placebo_lines(audit: Audit) -> list[str]:
    """Compare every method whose tokens differ with its placebo, in a sentence each.

    A method that is not above 1 is not shown to profit from the tokens that it selects, however large its effective
    batch is.
    """
    lines: list[str] = []
    for name, verdict in audit.methods.items():
        if verdict.placebo_ratio is None:
            continue
        _, low, high = verdict.placebo_ratio
        if low is None or high is None:
            word = "too noisy to compare"
        else:
            word = "better" if low > 1 else "worse" if high < 1 else "not shown to be better"
            word = f"{word}, {_with_interval(verdict.placebo_ratio, '.2f')} times the effective batch"
        lines.append(f"{name}, against its weights shuffled within each row: {word}")
    return lines


def _with_interval(figure: Figure, form: str) -> str:
    value, low, high = figure
    if value is None:
        return "inconclusive"
    return f"{value:{form}}" if low == high else f"{value:{form}} [{low:{form}}, {high:{form}}]"


def page(audits: Sequence[Audit]) -> str:
    """Return the HTML page: for every checkpoint the figures of each method, the tokens that it credits, and examples.

    Args:
        audits: audits of checkpoints of one run, at least one.
    """
    names = list(dict.fromkeys(name for audit in audits for name in audit.methods))
    path = [[name, *(_with_interval(audit.methods[name].effective_batch, ".2f") for audit in audits)] for name in names]
    return fill(
        Path(__file__).with_name("audit.html"),
        title=f"Credit audit of {audits[-1].run}",
        path=Table(["", *(f"step {audit.step}" for audit in audits)], path) if len(audits) > 1 else None,
        audits=[_section(audit) for audit in audits],
        costliest=COSTLIEST,
    )


def exported(audits: Sequence[Audit]) -> dict[str, Drawing]:
    """Return a drawing per checkpoint by its name: the methods' effective batches with their intervals."""
    drawings: dict[str, Drawing] = {}
    for audit in audits:
        rows = [(name, drawing, texts[0]) for name, drawing, texts in _section(audit)["figures"]]
        drawings[f"effective batch step {audit.step}"] = Drawing(stacked(rows, "", ("", "effective batch")))
    return drawings


def _section(audit: Audit) -> dict[str, Any]:
    methods = dict(sorted(audit.methods.items(), key=lambda item: -(item[1].effective_batch.value or 0.0)))
    # The baseline's value 1 is always on the axis.
    most = max([verdict.effective_batch.high or 0.0 for verdict in methods.values()] + [1.0])
    kinds = [kind for kind, size in audit.where.items() if math.isfinite(size)]
    # The oracle's credit is the true advantage, so it would be the first row again.
    sizes = {"true advantage": audit.where}
    sizes |= {name: verdict.where for name, verdict in methods.items() if name != ORACLE}
    return {
        "audit": audit,
        "placebos": placebo_lines(audit),
        "figures": [
            (name, _whisker(verdict.effective_batch, min(most, _WIDEST)), cells(verdict))
            for name, verdict in methods.items()
        ],
        "where": Table(
            ["", *kinds], [[name, *(f"{size[kind]:.2f}" for kind in kinds)] for name, size in sizes.items()]
        ),
        "shown": [_strips(completion, list(methods)) for completion in audit.shown],
    }


def _whisker(figure: Figure, most: float) -> str:
    """Draw a figure as a dot with its interval, on an axis from 0 to `most`, with a line at 1, the baseline's value."""

    def across(value: float | None) -> float:
        return 12 + 316 * min(value or 0.0, most) / most

    low, middle, high = ((across(end), 13.0) for end in (figure.low, figure.value, figure.high))
    # The interval must exclude 1 when it is rounded to two digits.
    better, worse = (figure.low or 0.0) > 1.005, figure.high is not None and figure.high < 0.995
    kind = "better" if better else "worse" if worse else "unclear"
    marks = line(f"{kind} whisker", low, high) + dot(kind, middle, 5) if figure.value is not None else ""
    zero = line("zero", (across(1.0), 0.0), (across(1.0), 26.0))
    return f'<svg class="forest" viewBox="0 0 340 26" role="img">{zero}{marks}</svg>'


def _strips(shown: ShownCompletion, names: Sequence[str]) -> dict[str, Any]:
    given = {name: shown.credit[name] for name in names if name in shown.credit}
    lines = {"true advantage": shown.true_advantages, **given}
    rows: list[tuple[str, float, str, Sequence[float]]] = []
    for name, values in lines.items():
        sizes = sorted(abs(value) for value in values if value) or [1.0]
        # One outlier would otherwise fade the colors of all other tokens.
        scale = sizes[int(_STRONGEST * (len(sizes) - 1))]
        rows.append((name, scale, number(round(scale, 3)), values))
    verdict = "right" if shown.rollout.correct else "wrong"
    return {
        "head": f"{verdict}, {len(shown.tokens)} tokens",
        "prompt": shown.rollout.prompt,
        "tokens": shown.tokens,
        "rows": rows,
    }
