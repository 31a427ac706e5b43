"""Charts as inline SVG: no script, no library, colors from the page's style sheet. Texts are escaped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, groupby, pairwise

from retrain.system.terminal import shown

WIDTH, HEIGHT = 440, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 14, 10, 34
_POINTS = 400
"""A longer line is thinned to means of this many points, so that the file stays small."""

_STRIPS = 50
"""Number of places at which the pointer shows a value."""

Point = tuple[float, float]
Range = tuple[float, float]


@dataclass(frozen=True)
class Axes:
    """Maps data to the drawing and draws ticks, grid and the name of the x axis.

    Attributes:
        x, y: least and greatest value shown.
        percent: y values are shares.
        label: what the x axis counts.
    """

    x: Range
    y: Range
    percent: bool = False
    label: str = "step"

    def place(self, x: float, y: float) -> Point:
        """Position of a point in the drawing."""
        return self.across(x), self.up(y)

    def across(self, value: float) -> float:
        """Horizontal position of an x value."""
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (value - self.x[0]) / (self.x[1] - self.x[0])

    def up(self, value: float) -> float:
        """Vertical position of a y value."""
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (value - self.y[0]) / (self.y[1] - self.y[0])

    def value(self, y: float) -> str:
        """A y value in words."""
        return f"{y:.1%}" if self.percent else f"{y:.4g}"

    def draw(self) -> str:
        """Grid, ticks and labels."""
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
    """Every step as a faint line and a running mean over a 25th of the run as a strong one.

    Values that are not finite leave a gap in the faint line. Returns "" if no value is finite.

    Args:
        percent: values are shares.
        x: range of the x axis, so that the charts of one run line up. By default the range of the points.
    """
    finite = [point for point in points if math.isfinite(point[1])]
    if not finite:
        return ""
    axes = Axes(x or span([x for x, _ in finite]), roomy([y for _, y in finite], percent), percent)
    faint, means = "".join(polyline(axes, part, "raw") for part in runs(points)), running_mean(finite)
    texts = [
        (x, f"{axes.label} {x:g}: {axes.value(y)}, mean {axes.value(mean)}")
        for (x, y), (_, mean) in zip(finite, means, strict=True)
    ]
    return svg(axes.draw() + faint + polyline(axes, thin(means), "mean") + hover(axes, texts))


def interval_chart(
    rows: Sequence[tuple[float, float, float, float]], x: Range | None = None, dashed: Sequence[Point] = ()
) -> str:
    """Shares (x, value, low, high) as dots and a line, with the interval as a band, on an axis that starts at 0.

    Args:
        x: range of the x axis; by default that of the rows.
        dashed: other shares (x, value), as a dashed line.
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
    """Layers on top of each other, each a running mean; layer i has the class `layer-i`."""
    if not steps or not layers:
        return ""
    floor, shapes = [0.0] * len(steps), list[str]()
    smooth = {
        name: [y for _, y in running_mean(list(zip(steps, values, strict=True)))] for name, values in layers.items()
    }
    top = max(sum(column) for column in zip(*smooth.values(), strict=True))
    axes = Axes(x or span(steps), (0.0, 1.05 * top or 1.0))
    for index, values in enumerate(smooth.values()):
        roof = [below + value for below, value in zip(floor, values, strict=True)]
        upper, lower = (thin(list(zip(steps, edge, strict=True))) for edge in (roof, floor))
        shapes.append(area(axes, upper, lower, f"layer-{index % 6}"))
        floor = roof
    words = [
        (
            step,
            f"{axes.label} {step:g}: {axes.value(sum(column))}, " + ", ".join(map("{} {:.3g}".format, smooth, column)),
        )
        for step, column in zip(steps, zip(*smooth.values(), strict=True), strict=True)
    ]
    return svg("".join(shapes) + axes.draw() + hover(axes, words))


def hover(axes: Axes, texts: Sequence[tuple[float, str]]) -> str:
    """Strips over the drawing, at most `_STRIPS`, that show the text at their x while the pointer is on them."""
    count = min(len(texts), _STRIPS)
    chosen = [texts[(2 * place + 1) * len(texts) // (2 * count)] for place in range(count)]
    middles = [(axes.across(a) + axes.across(b)) / 2 for (a, _), (b, _) in pairwise(chosen)]
    edges = [_LEFT, *middles, WIDTH - _RIGHT]
    return "".join(
        f'<rect class="hover" x="{a:.1f}" y="{_TOP}" width="{max(0.0, b - a):.1f}" height="{HEIGHT - _TOP - _BOTTOM}">'
        f"<title>{_text(text)}</title></rect>"
        for (a, b), (_, text) in zip(pairwise(edges), chosen, strict=True)
    )


def svg(content: str) -> str:
    """The drawing. It takes the width of the element around it."""
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{content}</svg>'


def polyline(axes: Axes, points: Sequence[Point], style: str) -> str:
    """A line through the points; a single point is a dot."""
    if len(points) == 1:
        return dot("dot", axes.place(*points[0]), 2)
    return f'<polyline class="{style}" points="{_joined(axes, points)}"/>'


def area(axes: Axes, upper: Sequence[Point], lower: Sequence[Point], style: str) -> str:
    """The area between two lines."""
    return f'<polygon class="{style}" points="{_joined(axes, [*upper, *reversed(lower)])}"/>'


def _joined(axes: Axes, points: Sequence[Point]) -> str:
    return " ".join(f"{axes.across(x):.1f},{axes.up(y):.1f}" for x, y in points)


def line(style: str, start: Point, end: Point) -> str:
    """A straight line between two positions in the drawing."""
    return f'<line class="{style}" x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"/>'


def dot(style: str, at: Point, radius: float) -> str:
    """A circle around a position in the drawing."""
    return f'<circle class="{style}" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{radius:g}"/>'


def label(side: str, at: Point, text: str) -> str:
    """The text of a tick or axis at a position in the drawing, which is its "middle" or "end"."""
    return f'<text class="tick {side}" x="{at[0]:.1f}" y="{at[1]:.1f}">{_text(text)}</text>'


def _text(text: str) -> str:
    """Text from outside, without controls and secrets."""
    return escape(shown(text))


def runs(points: Sequence[Point]) -> list[list[Point]]:
    """The longest stretches of finite points, thinned."""
    return [thin([*part]) for finite, part in groupby(points, lambda point: math.isfinite(point[1])) if finite]


def running_mean(points: Sequence[Point]) -> list[Point]:
    """The centered mean over a 25th of the points around each, fewer at the ends; the xs are kept."""
    half = len(points) // 50
    sums = [0.0, *accumulate(y for _, y in points)]
    bounds = [(max(0, i - half), min(len(points), i + half + 1)) for i in range(len(points))]
    return [(x, (sums[b] - sums[a]) / (b - a)) for (x, _), (a, b) in zip(points, bounds, strict=True)]


def thin(points: Sequence[Point]) -> list[Point]:
    """At most `_POINTS` points, each a mean over neighbors."""
    if len(points) <= _POINTS:
        return list(points)
    edges = [index * len(points) // _POINTS for index in range(_POINTS + 1)]
    parts = [points[a:b] for a, b in pairwise(edges)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def span(values: Sequence[float]) -> Range:
    """Least and greatest value, never the same."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def padded(of: Range, share: float) -> Range:
    """The range with a margin of this share of it on both sides."""
    margin = share * (of[1] - of[0])
    return of[0] - margin, of[1] + margin


def roomy(values: Sequence[float], percent: bool) -> Range:
    """The values' range with a margin; from 0 unless that would flatten the curve, and at most to 100%."""
    low, high = span(values)
    margin = 0.05 * (high - low)
    bottom = 0.0 if 0 <= low < 0.5 * high else low - margin
    return bottom, min(1.0, high + margin) if percent and high <= 1 and bottom < 1 else high + margin


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values (1, 2 or 5 times a power of ten apart) between low and high, about `count` of them."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def number(value: float) -> str:
    """A short label: 0.25, 40, 12k."""
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:g}"
