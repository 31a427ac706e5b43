"""Charts as inline SVG without scripts or libraries. Colors come from the page's style sheet; texts are escaped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, groupby, pairwise

from retrain.system.terminal import shown

WIDTH, HEIGHT = 440, 230
"""Size of a chart in the units of its viewBox."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 14, 10, 34
"""Margins of a chart."""
_POINTS = 400
"""Largest number of points of a line. A longer line is thinned to means, so that the file stays small."""

_STRIPS = 50
"""Largest number of x positions at which a tooltip shows the values."""

Point = tuple[float, float]
Range = tuple[float, float]


@dataclass(frozen=True)
class Axes:
    """Maps data to positions in the drawing, and draws ticks, grid and the label of the x axis.

    Attributes:
        x, y: ranges of the axes.
        percent: True if y values are shares, which are shown as percentages.
        label: label of the x axis.
    """

    x: Range
    y: Range
    percent: bool = False
    label: str = "step"

    def place(self, x: float, y: float) -> Point:
        """Return the position of a point in the drawing."""
        return self.across(x), self.up(y)

    def across(self, value: float) -> float:
        """Return the horizontal position of an x value."""
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (value - self.x[0]) / (self.x[1] - self.x[0])

    def up(self, value: float) -> float:
        """Return the vertical position of a y value."""
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (value - self.y[0]) / (self.y[1] - self.y[0])

    def value(self, y: float) -> str:
        """Format a y value."""
        return f"{y:.1%}" if self.percent else f"{y:.4g}"

    def draw(self) -> str:
        """Draw the grid, the ticks and the labels."""
        base, parts = HEIGHT - _BOTTOM, list[str]()
        for tick in ticks(*self.y):
            y = self.up(tick)
            parts.append(line("grid", (_LEFT, y), (WIDTH - _RIGHT, y)))
            parts.append(label("end", (_LEFT - 6, y + 3.5), f"{100 * tick:g}%" if self.percent else number(tick)))
        for tick in ticks(*self.x, count=6):
            x = self.across(tick)
            parts.append(line("axis", (x, base), (x, base + 4)) + label("middle", (x, base + 16), number(tick)))
        parts.append(line("axis", (_LEFT, base), (WIDTH - _RIGHT, base)))
        return "".join([*parts, label("end", (WIDTH - _RIGHT, HEIGHT - 3), self.label)])


def line_chart(points: Sequence[Point], *, percent: bool = False, x: Range | None = None) -> str:
    """Draw the values as a faint line, and their running mean over a 25th of the points as a strong line.

    Values that are not finite leave a gap in the faint line. Returns "" if no value is finite.

    Args:
        points: (step, value) of every step.
        percent: True if values are shares.
        x: range of the x axis, so that the charts of one run line up; None: the range of the points.
    """
    finite = [point for point in points if math.isfinite(point[1])]
    if not finite:
        return ""
    axes = Axes(x or span([x for x, _ in finite]), axis_range([y for _, y in finite], percent), percent)
    faint, means = "".join(polyline(axes, part, "raw") for part in runs(points)), running_mean(finite)
    texts = [
        (x, f"{axes.label} {x:g}: {axes.value(y)}, mean {axes.value(mean)}")
        for (x, y), (_, mean) in zip(finite, means, strict=True)
    ]
    return svg(axes.draw() + faint + polyline(axes, thin(means), "mean") + hover(axes, texts))


def share_chart(
    rows: Sequence[tuple[float, float, float, float]], x: Range | None = None, dashed: Sequence[Point] = ()
) -> str:
    """Draw shares as dots and a line, with their intervals as a band, on a y axis that starts at 0.

    Args:
        rows: (x, value, low, high) of every share.
        x: range of the x axis; None: that of the rows.
        dashed: (x, value) of other shares, which are drawn as a dashed line.
    """
    if not rows:
        return ""
    top = max([row[3] for row in rows] + [y for _, y in dashed])
    axes = Axes(x or span([row[0] for row in rows]), (0.0, min(1.0, 1.1 * top) or 1.0), True)
    upper, lower = [(x, high) for x, _, _, high in rows], [(x, low) for x, _, low, _ in rows]
    bars = "".join(line("bar", axes.place(x, low), axes.place(x, high)) for x, _, low, high in rows)
    dots = "".join(dot("dot", axes.place(x, y), 3) for x, y, _, _ in rows)
    curve = polyline(axes, [(x, y) for x, y, _, _ in rows], "mean")
    other = polyline(axes, dashed, "reference") if dashed else ""
    reference = {x: f"; dashed: {axes.value(y)}" for x, y in dashed}
    texts = [
        (x, f"{axes.label} {x:g}: {axes.value(y)} ({axes.value(low)} to {axes.value(high)}){reference.get(x, '')}")
        for x, y, low, high in rows
    ]
    return svg(axes.draw() + area(axes, upper, lower, "band") + bars + curve + dots + other + hover(axes, texts))


def stacked_chart(steps: Sequence[float], layers: Mapping[str, Sequence[float]], x: Range | None = None) -> str:
    """Draw a stacked area chart of running means. Layer i has the class `layer-i`, with i modulo 6.

    Args:
        steps: x values.
        layers: name of each layer -> its values at the steps.
        x: range of the x axis; None: that of the steps.
    """
    if not steps or not layers:
        return ""
    floor, shapes = [0.0] * len(steps), list[str]()
    smooth = {
        name: [y for _, y in running_mean(list(zip(steps, values, strict=True)))] for name, values in layers.items()
    }
    top = max(sum(column) for column in zip(*smooth.values(), strict=True))
    axes = Axes(x or span(steps), (0.0, 1.05 * top or 1.0))
    for index, values in enumerate(smooth.values()):
        ceiling = [below + value for below, value in zip(floor, values, strict=True)]
        upper, lower = (thin(list(zip(steps, side, strict=True))) for side in (ceiling, floor))
        shapes.append(area(axes, upper, lower, f"layer-{index % 6}"))
        floor = ceiling
    texts = [
        (
            step,
            f"{axes.label} {step:g}: {axes.value(sum(column))}, " + ", ".join(map("{} {:.3g}".format, smooth, column)),
        )
        for step, column in zip(steps, zip(*smooth.values(), strict=True), strict=True)
    ]
    return svg("".join(shapes) + axes.draw() + hover(axes, texts))


def hover(axes: Axes, texts: Sequence[tuple[float, str]]) -> str:
    """Return at most `_STRIPS` transparent strips over the drawing; each shows the text at its x as a tooltip."""
    count = min(len(texts), _STRIPS)
    # The middle of each part: equal distances without a preference for either end.
    chosen = [texts[(2 * position + 1) * len(texts) // (2 * count)] for position in range(count)]
    middles = [(axes.across(a) + axes.across(b)) / 2 for (a, _), (b, _) in pairwise(chosen)]
    bounds = [_LEFT, *middles, WIDTH - _RIGHT]
    return "".join(
        f'<rect class="hover" x="{a:.1f}" y="{_TOP}" width="{max(0.0, b - a):.1f}" height="{HEIGHT - _TOP - _BOTTOM}">'
        f"<title>{svg_text(text)}</title></rect>"
        for (a, b), (_, text) in zip(pairwise(bounds), chosen, strict=True)
    )


def svg(content: str) -> str:
    """Return the SVG element of a chart, which takes the width of the element around it."""
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{content}</svg>'


def polyline(axes: Axes, points: Sequence[Point], style: str) -> str:
    """Draw a line through the points, or a dot for a single point."""
    if len(points) == 1:
        return dot("dot", axes.place(*points[0]), 2)
    return f'<polyline class="{style}" points="{_joined(axes, points)}"/>'


def area(axes: Axes, upper: Sequence[Point], lower: Sequence[Point], style: str) -> str:
    """Draw the area between two lines."""
    return f'<polygon class="{style}" points="{_joined(axes, [*upper, *reversed(lower)])}"/>'


def _joined(axes: Axes, points: Sequence[Point]) -> str:
    return " ".join(f"{axes.across(x):.1f},{axes.up(y):.1f}" for x, y in points)


def line(style: str, start: Point, end: Point) -> str:
    """Draw a straight line between two positions."""
    return f'<line class="{style}" x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"/>'


def dot(style: str, at: Point, radius: float) -> str:
    """Draw a circle around a position."""
    return f'<circle class="{style}" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{radius:g}"/>'


def label(side: str, at: Point, text: str) -> str:
    """Draw a text. `side` is the part of the text that is at the position: "start", "middle" or "end"."""
    return f'<text class="tick {side}" x="{at[0]:.1f}" y="{at[1]:.1f}">{svg_text(text)}</text>'


def svg_text(text: str) -> str:
    """Escape a text, and remove control characters and secrets from it."""
    return escape(shown(text))


def runs(points: Sequence[Point]) -> list[list[Point]]:
    """Split the points at values that are not finite, and thin each part."""
    return [thin([*part]) for finite, part in groupby(points, lambda point: math.isfinite(point[1])) if finite]


def running_mean(points: Sequence[Point]) -> list[Point]:
    """Return the centered running mean over a 25th of the points, over fewer at both ends; x values are kept."""
    # A window of a 25th smooths sampling noise and keeps the shape of the curve.
    half = len(points) // 50
    sums = [0.0, *accumulate(y for _, y in points)]
    bounds = [(max(0, i - half), min(len(points), i + half + 1)) for i in range(len(points))]
    return [(x, (sums[b] - sums[a]) / (b - a)) for (x, _), (a, b) in zip(points, bounds, strict=True)]


def thin(points: Sequence[Point]) -> list[Point]:
    """Reduce the points to at most `_POINTS`, each a mean over neighbors."""
    if len(points) <= _POINTS:
        return list(points)
    bounds = [index * len(points) // _POINTS for index in range(_POINTS + 1)]
    parts = [points[a:b] for a, b in pairwise(bounds)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def span(values: Sequence[float]) -> Range:
    """Return the smallest and the largest value, 0.5 below and above it if all values are equal."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def padded(of: Range, share: float) -> Range:
    """Return the range with a margin on both sides, which is given as a share of the range."""
    margin = share * (of[1] - of[0])
    return of[0] - margin, of[1] + margin


def axis_range(values: Sequence[float], percent: bool) -> Range:
    """Return the range of an axis: that of the values, with a margin.

    It starts at 0 unless this would flatten the curve. The range of percentages is within 0% and 100%.
    """
    low, high = span(values)
    margin = 0.05 * (high - low)
    # From 0 on, a curve in the upper half of the axis would lose half of its height.
    bottom = 0.0 if 0 <= low < 0.5 * high else low - margin
    if percent and min(values) >= 0 and max(values) <= 1:
        return max(0.0, bottom), min(1.0, high + margin)
    return bottom, high + margin


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round values between low and high, at distances of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    # Slightly less than `rough` still fits, and spares a jump to the next factor by rounding.
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    # 0.3 / 0.1 is 2.9999999999999996: without the slack a tick at the end of an axis would be lost.
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def number(value: float) -> str:
    """Format a number as a short label: 0.25, 40, 12k, 2.5e-4. A longer one would not fit beside an axis."""
    if 0 < abs(value) < 0.001:
        power = math.floor(math.log10(abs(value)))
        return f"{value / 10.0**power:.3g}e{power}"
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:g}"
