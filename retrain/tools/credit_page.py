"""A comparison of advantages as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from retrain.report import run_page
from retrain.report.charts import Axes, Point, number, polyline, roomy, span, svg
from retrain.tools.credit_comparison import SUMMARY, Completion, Credit, figure

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_SHOWN = 12
"""Completions whose tokens are drawn."""
_STRONGEST = 0.95
"""Quantile of the tokens' credit that has the strongest color, so that one token does not fade the others."""


def page(title: str, completions: Sequence[Completion], credits_: Sequence[Credit]) -> str:
    """The document: a summary, advantage against length for every mode, and the credit of tokens where there is any."""
    style = Path(run_page.__file__).with_suffix(".css").read_text() + Path(__file__).with_suffix(".css").read_text()
    groups = len({one.group for one in completions})
    right = sum(one.correct for one in completions)
    drawn = "".join(_scatter(credit, completions) for credit in credits_ if credit.tokens is None)
    tokens = "".join(_tokens(credit, completions) for credit in credits_ if credit.tokens is not None)
    body = (
        f"<h1>{escape(title)}</h1>"
        f'<p class="soft">{len(completions)} completions of {groups} prompts, {right} of them correct</p>'
        f"<h2>Summary</h2>{_summary(credits_)}"
        f"<h2>Advantage against length</h2>{_key()}"
        f'<div class="charts">{drawn}</div>{tokens and _tokens_note() + tokens}'
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head><body><main>{body}</main></body></html>\n"
    )


def _summary(credits_: Sequence[Credit]) -> str:
    head = "".join(f"<th>{heading}</th>" for heading in SUMMARY.values())
    body = ""
    for one in credits_:
        figures = "".join(f"<td>{figure(key, one.summary[key])}</td>" for key in SUMMARY)
        body += f"<tr><th>{escape(one.name)}</th>{figures}</tr>"
    return f'<div class="scroll"><table class="brief"><tr><th></th>{head}</tr>{body}</table></div>'


def _key() -> str:
    right = '<svg viewBox="0 0 12 12"><circle class="right-dot" cx="6" cy="6" r="4"/></svg>correct'
    wrong = f'<svg viewBox="0 0 12 12">{_cross(6, 6)}</svg>wrong'
    line = '<svg viewBox="0 0 12 12"><path class="raw" d="M0,6 h12"/></svg>correct ones of one prompt'
    return f'<p class="legend key"><span>{right}</span><span>{wrong}</span><span>{line}</span></p>'


def _scatter(credit: Credit, completions: Sequence[Completion]) -> str:
    low, high = roomy(credit.advantages, percent=False)
    axes = Axes(
        _padded(span([float(one.length) for one in completions])),
        _padded((min(low, 0.0), max(high, 0.0))),
        label="tokens",
    )
    left, right, level = axes.across(axes.x[0]), axes.across(axes.x[1]), axes.up(0)
    zero = f'<line class="zero" x1="{left:.1f}" x2="{right:.1f}" y1="{level:.1f}" y2="{level:.1f}"/>'
    marks = "".join(
        _mark(axes.across(one.length), axes.up(value), one.correct)
        for value, one in zip(credit.advantages, completions, strict=True)
    )
    drawing = svg(axes.draw() + zero + _lines(axes, credit, completions) + marks)
    return f"<figure><figcaption><b>{escape(credit.name)}</b></figcaption>{drawing}</figure>"


def _lines(axes: Axes, credit: Credit, completions: Sequence[Completion]) -> str:
    """A line through the correct completions of each prompt, from the shortest to the longest."""
    groups: dict[str, list[Point]] = {}
    for value, one in zip(credit.advantages, completions, strict=True):
        if one.correct:
            groups.setdefault(one.group, []).append((float(one.length), value))
    return "".join(polyline(axes, sorted(points), "raw") for points in groups.values() if len(points) > 1)


def _padded(limits: tuple[float, float]) -> tuple[float, float]:
    margin = 0.05 * (limits[1] - limits[0])
    return limits[0] - margin, limits[1] + margin


def _mark(x: float, y: float, correct: bool) -> str:
    return f'<circle class="right-dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' if correct else _cross(x, y)


def _cross(x: float, y: float) -> str:
    return f'<path class="wrong-dot" d="M{x - 3.5:.1f},{y - 3.5:.1f} l7,7 m0,-7 l-7,7"/>'


def _tokens_note() -> str:
    return (
        '<h2>Credit of tokens</h2><p class="soft">The color of a token is its advantage: '
        '<span class="up" style="--a:.5">&nbsp;made likelier&nbsp;</span> '
        '<span class="down" style="--a:.5">&nbsp;made less likely&nbsp;</span>, stronger for a larger one; '
        "planning tokens are underlined.</p>"
    )


def _tokens(credit: Credit, completions: Sequence[Completion]) -> str:
    rows = list(zip(credit.tokens or (), credit.planning or (), completions, strict=True))[:_SHOWN]
    sizes = sorted(abs(value) for values, _, _ in rows for value in values if value) or [1.0]
    scale = sizes[int(_STRONGEST * (len(sizes) - 1))]
    strips = "".join(_strip(values, planning, one, scale) for values, planning, one in rows)
    more = len(completions) - len(rows)
    rest = f'<p class="soft">and {more} more completions</p>' if more else ""
    head = f"{escape(credit.name)}, strongest color from {number(round(scale, 3))}"
    return f'<h3>{head}</h3><div class="columns">{strips}</div>{rest}'


def _strip(values: Sequence[float], planning: Sequence[bool], one: Completion, scale: float) -> str:
    texts = one.tokens or ("",) * len(values)
    spans = "".join(
        _token(text, value, value / scale, plan) for text, value, plan in zip(texts, values, planning, strict=True)
    )
    verdict = "right" if one.correct else "wrong"
    head = f"group {escape(one.group)}, {verdict}, {one.length} tokens"
    kind = "tokens" if one.tokens else "tokens plain"
    return f'<div class="sample {verdict}"><p>{head}</p><div class="{kind}">{spans}</div></div>'


def _token(text: str, advantage: float, share: float, planning: bool) -> str:
    classes = " ".join(name for name, on in (("up", share > 0), ("down", share < 0), ("planning", planning)) if on)
    shown = escape(text).replace("\n", "↵\n")
    return (
        f'<span class="{classes}" title="{advantage:+.4g}" style="--a:{0.65 * min(abs(share), 1.0):.2f}">{shown}</span>'
    )
