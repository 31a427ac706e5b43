"""Charts: well-formed, inside the drawing, honest about gaps and ranges."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.report.charts import (
    HEIGHT,
    WIDTH,
    Axes,
    line_chart,
    running_mean,
    runs,
    share_chart,
    stacked_chart,
    thin,
    ticks,
)

FINITE = st.floats(-1e9, 1e9)


def positions(chart):
    """Every point of a shape in the drawing."""
    root = ElementTree.fromstring(chart)
    pairs = " ".join(element.get("points") or "" for element in root.iter()).split()
    points = [tuple(map(float, pair.split(","))) for pair in pairs]
    return points + [(float(e.get("cx")), float(e.get("cy"))) for e in root.iter() if e.get("cx")]


@settings(deadline=None, max_examples=50)
@given(values=st.lists(FINITE | st.just(math.nan) | st.just(math.inf), max_size=30))
def test_every_curve_stays_inside_its_drawing(values):
    chart = line_chart(list(enumerate(values)))
    if not any(map(math.isfinite, values)):
        assert chart == ""
        return
    assert "nan" not in chart
    assert "inf" not in chart
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in positions(chart))


def test_a_strip_for_each_of_few_points_and_for_some_of_many():
    texts = re.findall("<title>(.*?)</title>", line_chart([(0, 1.0), (10, 3.0)]))
    assert texts == ["step 0: 1, mean 1", "step 10: 3, mean 3"]
    strips = ElementTree.fromstring(line_chart([(x, float(x)) for x in range(1000)])).findall("rect")
    widths = [float(strip.get("width") or 0) for strip in strips]
    assert (len(strips), sum(widths)) == (50, pytest.approx(WIDTH - 64, abs=3))
    assert max(widths) < 1.6 * min(widths)


def test_what_is_not_finite_is_a_gap():
    assert runs([(0, 1.0), (1, 2.0), (2, math.nan), (3, math.inf), (4, 5.0)]) == [[(0, 1.0), (1, 2.0)], [(4, 5.0)]]
    assert runs([(0, math.nan)]) == []
    chart = line_chart([(0, 1.0), (1, 2.0), (2, math.nan), (3, 1.0), (4, 5.0)])
    assert chart.count('class="raw"') == 2


def test_running_mean_is_centered_and_keeps_constants():
    assert running_mean([(0, 1.0), (1, 3.0)]) == [(0, 1.0), (1, 3.0)]  # short runs are not smoothed
    line = [(i, float(i)) for i in range(100)]
    smooth = running_mean(line)
    assert smooth[50] == (50, 50.0)
    assert smooth[0] == (0, 1.0)  # the mean of 0, 1, 2
    assert all(y == pytest.approx(7) for _, y in running_mean([(i, 7.0) for i in range(500)]))


def test_thinning_keeps_the_mean_and_the_size_down():
    line = [(float(i), float(i % 7)) for i in range(40_000)]
    short = thin(line)
    assert len(short) == 400
    assert sum(y for _, y in short) / 400 == pytest.approx(sum(y for _, y in line) / len(line))
    assert thin(line[:400]) == line[:400]
    assert len(line_chart(line)) < 30_000


@settings(deadline=None)
@given(low=FINITE, width=st.floats(1e-3, 1e9))
def test_ticks_lie_within_the_range_and_are_few(low, width):
    found = ticks(low, low + width)
    assert len(found) <= 7
    assert all(low - 1e-6 * width - 1e-6 <= tick <= low + width * (1 + 1e-6) + 1e-6 for tick in found)


def test_intervals_start_at_zero_and_end_at_100_percent():
    chart = share_chart([(0, 0.5, 0.4, 0.6), (20, 0.9, 0.8, 1.0)])
    assert "100%" in chart
    assert ">0%" in chart
    assert chart.count('class="bar"') == 2
    assert chart.count("<circle") == 2
    assert share_chart([]) == ""
    both = share_chart([(0, 0.1, 0.0, 0.2), (20, 0.5, 0.4, 0.6)], dashed=[(0, 0.0), (20, 0.9)])
    assert both.count('class="reference"') == 1
    assert "80%" in both, "the axis holds both lines"
    assert "<circle" in share_chart([(0, 0.0, 0.0, 0.0)])


def test_layers_add_up():
    chart = stacked_chart([0.0, 1.0], {"a": [1.0, 1.0], "b": [3.0, 3.0]})
    shapes = [
        re.findall(r"([\d.]+),([\d.]+)", points) for points in re.findall(r'<polygon[^>]*points="([^"]*)"', chart)
    ]
    axes = Axes((0, 1), (0, 1.05 * 4))
    assert {float(y) for _, y in shapes[0]} == {round(axes.up(0), 1), round(axes.up(1), 1)}
    assert {float(y) for _, y in shapes[1]} == {round(axes.up(1), 1), round(axes.up(4), 1)}
    assert "<title>step 1: 4, a 1, b 3</title>" in chart
    assert stacked_chart([], {}) == ""
    assert stacked_chart([0.0], {"a": [0.0]})
