"""Figures of a campaign's report, as inline SVG. Condition i has the class `c{i}`, its color; scatters add a shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from retrain.campaign.verdict.analysis import Comparison, mean_estimate
from retrain.campaign.verdict.judging import Look
from retrain.campaign.verdict.results import Cell, Results
from retrain.campaign.verdict.sentences import drawn_range
from retrain.campaign.verdict.statistics import Estimate
from retrain.campaign.verdict.verdict_kinds import KINDS, KindStyle, Shape
from retrain.report import charts
from retrain.report.page import plural

COLORS = 16  # colors of the style sheet, c0 to c15
_WIDE, _ROW, _PAD = 340, 26, 12

Curve = list[tuple[int, Estimate]]


def forest_span(comparisons: Sequence[Comparison]) -> charts.Range:
    """Return the range of an axis that contains 0, the margin and every interval, of which very wide ones are cut."""
    return charts.padded(drawn_range(comparisons), 0.04)


def forest_axis(of: charts.Range) -> str:
    """Draw the axis below the rows of `forest_row`."""
    places = {tick: _across(tick, of) for tick in charts.ticks(*of, count=5)}
    marks = "".join(
        charts.line("axis", (x, 0), (x, 4)) + charts.label("middle", (x, 16), f"{tick:+g}" if tick else "0")
        for tick, x in places.items()
    )
    return _forest(20, charts.line("axis", (_PAD, 0), (_WIDE - _PAD, 0)) + marks)


def forest_row(comparison: Comparison, of: charts.Range) -> str:
    """Draw a difference with its interval, the mark of its verdict, the line at 0, and a band for the margin."""
    middle = _ROW / 2
    zero = _across(0, of)
    kind = KINDS[comparison.kind]
    parts = []
    if margin := comparison.outcome.margin:
        low, high = (min(max(_across(end, of), _PAD), _WIDE - _PAD) for end in (-margin, margin))
        parts.append(f'<rect class="margin" x="{low:.1f}" y="0" width="{high - low:.1f}" height="{_ROW}"/>')
    parts.append(charts.line("zero", (zero, 0), (zero, _ROW)))
    if comparison.look:
        parts.append(_looks(comparison.look, kind.css))
    if math.isfinite(comparison.difference.low):
        low, high = (_across(_clip(of, end), of) for end in (comparison.difference.low, comparison.difference.high))
        parts.append(charts.line(f"{kind.css} whisker", (low, middle), (high, middle)))
    if math.isfinite(comparison.difference.value):
        parts.append(_shape(kind, (_across(_clip(of, comparison.difference.value), of), middle)))
    return _forest(_ROW, "".join(parts))


def _looks(look: Look, css: str) -> str:
    """Draw the looks as ticks below an interval, at their shares of the seeds, and the seeds that were needed."""
    bottom = _ROW - 2
    ends = [_PAD + (_WIDE - 2 * _PAD) * size / look.sizes[-1] for size in look.sizes]
    reached = ends[look.number - 1] if look.ended else (ends[look.number - 2] if look.number > 1 else _PAD)
    ticks_of_looks = "".join(charts.line("axis", (end, bottom - 4), (end, bottom)) for end in ends)
    return ticks_of_looks + charts.line(f"{css} whisker", (_PAD, bottom), (reached, bottom))


def _shape(kind: KindStyle, center: charts.Point) -> str:
    """Draw the mark of a verdict."""
    turned = " rotate(180)" if kind.shape == "inverted triangle" else ""
    path = _SHAPES[_SHAPE_OF[kind.shape]](5.5)
    x, y = center
    return f'<path class="{kind.css} mark" transform="translate({x:.1f} {y:.1f}){turned}" d="{path}"/>'


def verdict_marks() -> list[tuple[str, str]]:
    """Return the words and the mark, drawn around the origin, of every kind of verdict, for a legend."""
    return [(kind.legend, _shape(kind, (0.0, 0.0))) for kind in KINDS.values() if kind.legend]


def _across(value: float, of: charts.Range) -> float:
    return _PAD + (_WIDE - 2 * _PAD) * (value - of[0]) / (of[1] - of[0])


def _forest(height: int, content: str) -> str:
    return f'<svg class="forest" viewBox="0 0 {_WIDE} {height}" role="img">{content}</svg>'


def mean_curve(cells: Sequence[Cell]) -> Curve:
    """Return the mean accuracy over runs, with its 95% t interval, at every step at which all were evaluated."""
    curves = [dict(cell.curve) for cell in cells]
    # A mean over the runs that happen to have a step would jump where a run drops out.
    steps = [step for step in (curves[0] if curves else ()) if all(step in curve for curve in curves)]
    return [(step, mean_estimate([curve[step] for curve in curves])) for step in steps]


def curves(results: Results) -> list[tuple[str, str, str]]:
    """Return the learning curves as (title, caption, chart).

    The first chart has the means of all conditions. Then follows a chart for each condition, with its runs, its
    interval, and the baseline as a dashed line. A condition whose runs share fewer than two steps has no curve.
    """
    curves = {condition: mean_curve(list(results.done(condition).values())) for condition in results.conditions}
    means = {condition: curve for condition, curve in curves.items() if len(curve) > 1}
    if not means:
        return []
    # One pair of axes for all charts, so that conditions can be compared by eye.
    points = [point for condition in means for cell in results.done(condition).values() for point in cell.curve]
    axes = charts.Axes(charts.span([float(step) for step, _ in points]), *_values([y for _, y in points]))
    lines = "".join(
        charts.polyline(axes, _line(curve), f"curve c{index(results, condition)}") for condition, curve in means.items()
    )
    drawn = [("All conditions", "mean over runs", charts.svg(axes.draw() + lines + _tooltips(axes, means)))]
    for name, curve in means.items():
        runs = plural(len(results.done(name)), "run") + (", the baseline" if name == results.baseline else "")
        drawn.append((name, runs, _panel(results, name, curve, means, axes)))
    return drawn


def _panel(results: Results, condition: str, curve: Curve, means: Mapping[str, Curve], axes: charts.Axes) -> str:
    style = f"c{index(results, condition)}"
    runs = [[(float(step), y) for step, y in cell.curve] for cell in results.done(condition).values()]
    faint = "".join(charts.polyline(axes, run, f"single {style}") for run in runs)
    # One run has a mean without an interval, and no band.
    finite = [(float(step), at) for step, at in curve if math.isfinite(at.low)]
    upper = [(x, _clip(axes.y, at.high)) for x, at in finite]
    lower = [(x, _clip(axes.y, at.low)) for x, at in finite]
    band = charts.area(axes, upper, lower, f"area {style}") if finite else ""
    baseline = means.get(results.baseline, []) if condition != results.baseline else []
    dashed = charts.polyline(axes, _line(baseline), "reference") if baseline else ""
    shown = {condition: curve} | ({results.baseline: baseline} if baseline else {})
    mean = charts.polyline(axes, _line(curve), f"curve {style}")
    return charts.svg(axes.draw() + band + faint + dashed + mean + _tooltips(axes, shown))


def _tooltips(axes: charts.Axes, shown: Mapping[str, Curve]) -> str:
    """Add tooltips with the means at every step."""
    at: dict[int, list[str]] = {}
    for name, curve in shown.items():
        for step, mean in curve:
            at.setdefault(step, []).append(f"{name} {axes.value(mean.value)}")
    return charts.hover(axes, [(float(step), f"step {step}: {', '.join(at[step])}") for step in sorted(at)])


def _values(values: Sequence[float]) -> tuple[charts.Range, bool]:
    """Return the range of an axis for these values, and True if all of them are between 0 and 1."""
    # Values within 0 and 1 are taken for shares and printed in percent.
    if any(not 0 <= value <= 1 for value in values):
        return charts.axis_range(values, False), False
    low, high = charts.axis_range(values, True)
    return (max(0.0, low), min(1.0, high)), True


def _clip(of: charts.Range, end: float) -> float:
    """Clip the end of an interval to the axis, because intervals of two or three runs are very wide."""
    return min(max(end, of[0]), of[1])


def _line(curve: Curve) -> list[charts.Point]:
    return [(float(step), at.value) for step, at in curve]


def scatters(results: Results, others: Sequence[Results]) -> list[tuple[str, str]]:
    """Return (title, chart) of the result over each other outcome, and over tokens and time.

    A chart without points is left out, such as those of costs if no finished run has a known one.

    Args:
        results: results of the runs.
        others: results of the same runs in other outcomes.
    """
    metric = results.outcome.metric
    across = [(f"{metric} over {other.outcome.metric}", other.outcome.label, _results(other)) for other in others]
    for cost, (title, unit) in enumerate((("Tokens", "tokens sampled"), ("Time", "seconds in steps")), start=1):
        spent = {run: cell.total[cost] for run, cell in results.cells.items() if cell.done}
        # Ticks of seven digits would not fit under the axis.
        scale, unit = (1e6, f"million {unit}") if max(spent.values(), default=0.0) >= 1e6 else (1.0, unit)
        across.append((title, unit, {run: value / scale for run, value in spent.items() if math.isfinite(value)}))
    return [(title, _scatter(results, values, unit)) for title, unit, values in across if values]


def _results(results: Results) -> dict[tuple[str, int], float]:
    return {run: cell.result for run, cell in results.cells.items() if cell.result is not None}


def _scatter(results: Results, across: Mapping[tuple[str, int], float], unit: str) -> str:
    """Plot results over other values: a small mark for each run, a large one with CIs for each condition's mean.

    Args:
        results: results of the runs.
        across: value of each run, by condition and seed.
        unit: unit of these values.
    """
    runs: dict[str, list[charts.Point]] = {name: [] for name in results.conditions}
    for run, value in _results(results).items():
        if run in across:
            runs[run[0]].append((across[run], value))
    points = [point for dots in runs.values() for point in dots]
    axes = charts.Axes(charts.padded(charts.span([x for x, _ in points]), 0.06), *_values([y for _, y in points]), unit)
    small = "".join(
        f"<g><title>{title}: {axes.value(at[1])}</title>{mark(axes, at, index(results, name), 3, 'run')}</g>"
        for name, dots in runs.items()
        for title in [charts.svg_text(name)]
        for at in dots
    )
    large = "".join(_center(axes, dots, index(results, name)) for name, dots in runs.items() if dots)
    return charts.svg(axes.draw() + small + large)


def _center(axes: charts.Axes, points: Sequence[charts.Point], i: int) -> str:
    """Draw the mean of the points with its 95% intervals, in the color of condition i."""
    x, y = (mean_estimate(values) for values in zip(*points, strict=True))
    bars = ""
    if len(points) > 1:
        left, right = ((_clip(axes.x, end), y.value) for end in (x.low, x.high))
        below, above = ((x.value, _clip(axes.y, end)) for end in (y.low, y.high))
        ends = [(left, right), (below, above)]
        bars = "".join(charts.line(f"whisker c{i}", axes.place(*a), axes.place(*b)) for a, b in ends)
    return bars + mark(axes, (x.value, y.value), i, 6, "center")


_SHAPES: tuple[Callable[[float], str], ...] = (
    lambda r: f"M{-r} 0a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0",
    lambda r: f"M{-0.9 * r} {-0.9 * r}h{1.8 * r}v{1.8 * r}h{-1.8 * r}z",
    lambda r: f"M0 {-1.25 * r}L{1.25 * r} 0 0 {1.25 * r} {-1.25 * r} 0z",
    lambda r: f"M0 {-1.2 * r}L{1.15 * r} {0.9 * r} {-1.15 * r} {0.9 * r}z",
)
"""Circle, square, diamond, triangle: SVG paths around the origin."""
_SHAPE_OF: Mapping[Shape, int] = {"circle": 0, "square": 1, "diamond": 2, "triangle": 3, "inverted triangle": 3}


def mark(axes: charts.Axes, point: charts.Point, i: int, size: float, style: str) -> str:
    """Draw the mark of condition i at a point."""
    x, y = axes.place(*point)
    return f'<path class="{style} c{i}" transform="translate({x:.1f} {y:.1f})" d="{_SHAPES[i % 4](size)}"/>'


def keys(results: Results) -> list[tuple[str, str]]:
    """Return every condition with its mark, drawn around the origin, for a legend."""
    marks = [(condition, index(results, condition)) for condition in results.conditions]
    return [(condition, f'<path class="center c{i}" d="{_SHAPES[i % 4](5)}"/>') for condition, i in marks]


def index(results: Results, condition: str) -> int:
    """Return the index of a condition's color and shape; they repeat after COLORS conditions."""
    return results.conditions.index(condition) % COLORS
