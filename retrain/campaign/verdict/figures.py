"""Figures of a campaign's report, as inline SVG. Condition i has the class `c{i}`, its color; scatters add a shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from retrain.campaign.verdict.analysis import Analysis, Comparison, Estimate
from retrain.campaign.verdict.results import Cell, Results
from retrain.campaign.verdict.statistics import mean_interval
from retrain.report.charts import Axes, Point, Range, number, polyline, roomy, span, svg, ticks

COLORS = 8
_WIDE, _ROW, _PAD = 340, 26, 12

Curve = list[tuple[int, Estimate]]


def forest_span(comparisons: Sequence[Comparison]) -> Range:
    """The axis that holds every interval and 0."""
    ends = [end for one in comparisons for end in (one.difference.low, one.difference.high, one.difference.value)]
    low, high = span([0.0, *(end for end in ends if math.isfinite(end))])
    margin = 0.04 * (high - low)
    return low - margin, high + margin


def forest_axis(of: Range) -> str:
    """The axis of the drawings of `forest_row`."""
    marks = "".join(
        f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="4"/>'
        f'<text class="tick middle" x="{x:.1f}" y="16">{tick:+g}</text>'
        for tick in ticks(*of, count=5)
        for x in [_across(tick, of)]
    )
    base = f'<line class="axis" x1="{_PAD}" x2="{_WIDE - _PAD}" y1="0" y2="0"/>'
    return f'<svg class="forest" viewBox="0 0 {_WIDE} 20" role="img">{base}{marks}</svg>'


def _across(value: float, of: Range) -> float:
    return _PAD + (_WIDE - 2 * _PAD) * (value - of[0]) / (of[1] - of[0])


def forest_row(one: Comparison, of: Range) -> str:
    """A dot with its interval, and the line of no difference. Filled: clearly different. Hollow: not."""
    middle, zero = _ROW / 2, _across(0, of)
    parts = [f'<line class="zero" x1="{zero:.1f}" x2="{zero:.1f}" y1="0" y2="{_ROW}"/>']
    if math.isfinite(one.difference.low):
        left, right = _across(one.difference.low, of), _across(one.difference.high, of)
        line = f'x1="{left:.1f}" x2="{right:.1f}" y1="{middle}" y2="{middle}"'
        parts.append(f'<line class="{kind(one)} whisker" {line}/>')
    if math.isfinite(one.difference.value):
        x = _across(one.difference.value, of)
        parts.append(f'<circle class="{kind(one)}" cx="{x:.1f}" cy="{middle}" r="5"/>')
    return f'<svg class="forest" viewBox="0 0 {_WIDE} {_ROW}" role="img">{"".join(parts)}</svg>'


def kind(one: Comparison) -> str:
    """The style of a comparison: better, worse, or unclear."""
    if not one.significant:
        return "unclear"
    return "better" if one.difference.value > 0 else "worse"


def mean_curve(cells: Sequence[Cell]) -> Curve:
    """Mean accuracy over runs with its 95% t interval at every step that all of them were evaluated at."""
    if not cells:
        return []
    curves = [dict(cell.curve) for cell in cells]
    steps = [step for step in curves[0] if all(step in curve for curve in curves)]
    found: Curve = []
    for step in steps:
        values = [curve[step] for curve in curves]
        low, high = mean_interval(values)
        found.append((step, Estimate(sum(values) / len(values), float(low), float(high))))
    return found


def curves(results: Results) -> tuple[str, dict[str, str]]:
    """All mean curves in one chart, and a chart per condition with its runs, interval, and the baseline dashed."""
    means = {label: curve for label in results.conditions if (curve := mean_curve(list(results.done(label).values())))}
    if not means:
        return "", {}
    points = [point for cells in results.cells.values() if cells.done for point in cells.curve]
    axes = Axes(span([float(step) for step, _ in points]), _shares([y for _, y in points]), True)
    lines = "".join(polyline(axes, _line(curve), f"curve c{index(results, label)}") for label, curve in means.items())
    single = {label: _panel(results, label, curve, means, axes) for label, curve in means.items()}
    return svg(axes.draw() + lines), single


def _panel(results: Results, label: str, curve: Curve, means: Mapping[str, Curve], axes: Axes) -> str:
    own = f"c{index(results, label)}"
    faint = "".join(
        polyline(axes, [(float(step), y) for step, y in cell.curve], f"single {own}")
        for cell in results.done(label).values()
    )
    edges = [(float(step), *_clip(axes.y, at.low, at.high)) for step, at in curve if math.isfinite(at.low)]
    outline = [*((step, high) for step, _, high in edges), *((step, low) for step, low, _ in reversed(edges))]
    band = f'<polygon class="area {own}" points="{" ".join(axes.place(point) for point in outline)}"/>' if edges else ""
    baseline = means.get(results.baseline, []) if label != results.baseline else []
    dashed = polyline(axes, _line(baseline), "reference") if baseline else ""
    return svg(axes.draw() + band + faint + dashed + polyline(axes, _line(curve), f"curve {own}"))


def _shares(values: Sequence[float]) -> Range:
    """A range for shares, within 0 and 1."""
    low, high = roomy(values, True)
    return max(0.0, low), min(1.0, high)


def _clip(of: Range, *ends: float) -> tuple[float, ...]:
    """The ends of an interval, cut at the edge of the drawing. With two or three runs intervals are very wide."""
    return tuple(min(max(float(end), of[0]), of[1]) for end in ends)


def _line(curve: Curve) -> list[Point]:
    return [(float(step), at.value) for step, at in curve]


def costs(analysis: Analysis) -> list[tuple[str, str]]:
    """(title, chart) of accuracy over tokens and over time; a chart is empty without finished runs."""
    return [("Tokens", _cost(analysis, 1, "tokens sampled")), ("Time", _cost(analysis, 2, "seconds in steps"))]


def _cost(analysis: Analysis, what: int, label: str) -> str:
    """Final accuracy against cost: a small mark for each run, a large one with intervals for the mean of a condition.

    Args:
        what: index into `results.SPENT`.
        label: of the x axis.
    """
    results = analysis.results
    runs = {name: _spent(results, name, what) for name in results.conditions}
    points = [point for found in runs.values() for point in found]
    if not points:
        return ""
    scale = 1e6 if max(x for x, _ in points) >= 1e6 else 1.0
    unit = f"million {label}" if scale > 1 else label
    runs = {name: [(x / scale, y) for x, y in found] for name, found in runs.items()}
    x = span([x / scale for x, _ in points])
    room = 0.06 * (x[1] - x[0])
    axes = Axes((x[0] - room, x[1] + room), _shares([y for _, y in points]), True, unit)
    small = "".join(
        mark(axes, point, index(results, name), 3, "run") for name, found in runs.items() for point in found
    )
    large = "".join(_center(axes, found, index(results, name)) for name, found in runs.items() if found)
    return svg(axes.draw() + small + large)


def _spent(results: Results, label: str, what: int) -> list[Point]:
    return [(cell.total[what], cell.accuracy) for cell in results.done(label).values() if cell.accuracy is not None]


def _center(axes: Axes, points: Sequence[Point], i: int) -> str:
    x, y = (sum(point[axis] for point in points) / len(points) for axis in (0, 1))
    bars = ""
    if len(points) > 1:
        left, right = _clip(axes.x, *mean_interval([point[0] for point in points]))
        low, high = _clip(axes.y, *mean_interval([point[1] for point in points]))
        across, up = axes.across(x), axes.up(y)
        bars = (
            f'<line class="whisker c{i}" x1="{axes.across(left):.1f}" x2="{axes.across(right):.1f}" '
            f'y1="{up:.1f}" y2="{up:.1f}"/><line class="whisker c{i}" x1="{across:.1f}" x2="{across:.1f}" '
            f'y1="{axes.up(low):.1f}" y2="{axes.up(high):.1f}"/>'
        )
    return bars + mark(axes, (x, y), i, 6, "center")


_SHAPES: tuple[Callable[[float], str], ...] = (
    lambda r: f"M{-r} 0a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0",
    lambda r: f"M{-0.9 * r} {-0.9 * r}h{1.8 * r}v{1.8 * r}h{-1.8 * r}z",
    lambda r: f"M0 {-1.25 * r}L{1.25 * r} 0 0 {1.25 * r} {-1.25 * r} 0z",
    lambda r: f"M0 {-1.2 * r}L{1.15 * r} {0.9 * r} {-1.15 * r} {0.9 * r}z",
)
"""Circle, square, diamond, triangle: SVG paths around the origin."""


def mark(axes: Axes, point: Point, i: int, size: float, style: str) -> str:
    """The mark of condition i at a point."""
    place = axes.place(point).replace(",", " ")
    return f'<path class="{style} c{i}" transform="translate({place})" d="{_SHAPES[i % 4](size)}"/>'


def keys(results: Results) -> list[tuple[str, str]]:
    """Every condition with its mark, around the origin."""
    return [
        (label, f'<path class="center c{i}" d="{_SHAPES[i % 4](5)}"/>')
        for label in results.conditions
        for i in [index(results, label)]
    ]


def index(results: Results, label: str) -> int:
    """Which color and shape a condition has; they repeat after COLORS conditions."""
    return results.conditions.index(label) % COLORS


def scale_label(value: float) -> str:
    """A short label of a scale."""
    return number(float(f"{value:.2g}"))
