import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.functional.masked import (
    expand,
    keep,
    masked_mean,
    masked_variance,
    row_above,
    row_mean,
    row_top,
    top_fraction,
    turn_ends,
    turn_mean,
    turn_sum,
)

pytestmark = pytest.mark.numeric

NAN = float("nan")
VALUES = torch.tensor([[1.0, 2.0, NAN], [4.0, NAN, float("inf")]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, False, False]])
NONE = torch.zeros_like(MASK)


def test_what_lies_outside_the_mask_contributes_nothing():
    assert keep(VALUES, MASK).tolist() == [[1.0, 2.0, 0.0], [4.0, 0.0, 0.0]]
    assert masked_mean(VALUES, MASK).item() == pytest.approx(7 / 3)
    assert masked_variance(VALUES, MASK).item() == pytest.approx(statistics.pvariance([1, 2, 4]))
    assert masked_variance(VALUES, MASK, ddof=1).item() == pytest.approx(statistics.variance([1, 2, 4]))
    assert row_mean(VALUES, MASK).tolist() == [[1.5], [4.0]]
    assert expand(torch.tensor([3.0, 5.0]), MASK).tolist() == [[3.0, 3.0, 0.0], [5.0, 0.0, 0.0]]


def test_nothing_masked_gives_zero():
    assert masked_mean(VALUES, NONE) == 0
    assert masked_variance(VALUES, NONE) == 0
    assert row_mean(VALUES, NONE).tolist() == [[0.0], [0.0]]
    assert not top_fraction(VALUES, NONE, torch.tensor([0, 1]), 0.5).any()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 9), min_size=1, max_size=5)), min_size=1, max_size=5),
    st.sampled_from([0.01, 0.25, 0.5, 0.99, 1.0]),
)
def test_the_top_of_each_group(rows, fraction):
    mask = torch.tensor([[t < len(values) for t in range(6)] for _, values in rows])
    padded = torch.tensor([[*map(float, values), *[NAN] * (6 - len(values))] for _, values in rows])
    selected = top_fraction(padded, mask, torch.tensor([g for g, _ in rows]), fraction)
    assert not (selected & ~mask).any()
    for row, (group, values) in enumerate(rows):
        pool = sorted((v for g, vs in rows if g == group for v in vs), reverse=True)
        lowest = pool[max(1, -int(-len(pool) * fraction // 1)) - 1]
        assert selected[row, : len(values)].tolist() == [v >= lowest for v in values]


@pytest.mark.parametrize(
    ("fraction", "count", "kept"), [(0.3, 50, 15), (0.3, 90, 27), (0.1, 30, 3), (0.5, 5, 3), (0.21, 10, 3)]
)
def test_the_share_is_rounded_up_from_the_decimal_not_the_binary_fraction(fraction, count, kept):
    values, mask = torch.arange(float(count))[None], torch.ones(1, count, dtype=torch.bool)
    assert int(top_fraction(values, mask, torch.zeros(1, dtype=torch.long), fraction).sum()) == kept


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=7), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 1.0]),
)
def test_the_top_of_each_row(rows, fraction):
    mask = torch.tensor([[t < len(row) and row[t][1] for t in range(8)] for row in rows])
    values = torch.tensor([[row[t][0] if t < len(row) and row[t][1] else NAN for t in range(8)] for row in rows])
    top, above = row_top(values, mask, fraction), row_above(values, mask, fraction)
    for row, tokens in enumerate(rows):
        inside = [(t, v) for t, (v, kept) in enumerate(tokens) if kept]
        n = len(inside)
        best = sorted(inside, key=lambda tv: (-tv[1], tv[0]))[: -int(-(fraction * n - 1e-9) // 1)]
        assert top[row].nonzero()[:, 0].tolist() == sorted(t for t, _ in best)
        threshold = sorted(v for _, v in inside)[min(int((1 - fraction) * n), n - 1)] if n else 0
        assert above[row].nonzero()[:, 0].tolist() == [t for t, v in inside if v > threshold]


def test_turns_are_apart_and_need_not_be_next_to_each_other():
    values = torch.tensor([[NAN, 1.0, 3.0, NAN, 5.0], [2.0, NAN, NAN, NAN, 4.0], [NAN] * 5], dtype=torch.float64)
    mask = values.isfinite()
    turns = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    assert turn_sum(values, mask, turns).tolist() == [[0, 4, 4, 0, 5], [6, 0, 0, 0, 6], [0] * 5]
    assert turn_mean(values, mask, turns).tolist() == [[0, 2, 2, 0, 5], [3, 0, 0, 0, 3], [0] * 5]
    assert turn_ends(mask, turns).long().tolist() == [[0, 0, 1, 0, 1], [0, 0, 0, 0, 1], [0] * 5]
