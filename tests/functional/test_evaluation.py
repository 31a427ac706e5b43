"""Estimators of held-out performance."""

import json
from itertools import combinations
from math import comb
from pathlib import Path
from statistics import stdev

import pytest

from retrain.functional.evaluation import (
    aes,
    change_interval,
    mean_interval,
    paired_interval,
    pass_at_k,
    ratio_interval,
)

pytestmark = pytest.mark.numeric

VECTORS_FILE = json.loads((Path(__file__).parents[1] / "data" / "evaluation.json").read_text())

VECTORS = [
    (10, 5, 1, 0.5),
    (10, 0, 5, 0.0),
    (10, 3, 10, 1.0),
    (3, 0, 3, 0.0),
    (16, 4, 8, 0.9615384615384616),
    (0, 0, 1, 0.0),
]


@pytest.mark.parametrize(("n", "c", "k", "expected"), VECTORS)
def test_pass_at_k_has_the_published_values(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_the_share_of_draws_with_a_right_one():
    right = {0, 3}
    draws = list(combinations(range(6), 3))
    assert pass_at_k(6, 2, 3) == pytest.approx(sum(bool(right & set(draw)) for draw in draws) / comb(6, 3))


def test_more_draws_than_samples_is_an_error():
    with pytest.raises(ValueError, match="at least 4"):
        pass_at_k(3, 1, 4)


def test_the_interval_of_single_samples_is_wilsons():
    mean, low, high = mean_interval([1.0] * 7 + [0.0] * 3)
    assert (mean, low, high) == pytest.approx((0.7, 0.3968, 0.8922), abs=1e-4)


@pytest.mark.parametrize("values", [[1.0] * 20, [0.0] * 20])
def test_unanimous_problems_still_leave_doubt(values):
    mean, low, high = mean_interval(values)
    assert 0 <= low <= mean <= high <= 1
    assert 0.1 < high - low < 0.2


@pytest.mark.parametrize("right", [1, 2, 3, 7])
def test_equal_shares_are_as_uncertain_as_single_answers(right):
    answers = [1.0] * right + [0.0] * (10 - right)
    assert mean_interval([right / 10] * 10) == pytest.approx(mean_interval(answers))


def test_averages_over_several_samples_narrow_the_interval():
    single, several = mean_interval([0.0, 1.0] * 50), mean_interval([0.25, 0.75] * 50)
    assert several[2] - several[1] < single[2] - single[1]


@pytest.mark.parametrize("case", VECTORS_FILE["metrics"]["aes"])
def test_aes_has_the_published_values(case):
    value, length, accuracy = aes(*(float(case[name]) for name in ("p", "p_base", "tokens", "tokens_base")))
    assert value == pytest.approx(case["expected"], abs=1e-9)
    assert length + accuracy == pytest.approx(value, abs=1e-12)


def test_aes_of_a_base_that_is_never_right_counts_length_only():
    assert aes(0.5, 0.0, 50.0, 100.0) == (0.5, 0.5, 0.0)


def test_ratio_interval_weighs_rollouts_and_widens_by_problem():
    mean, low, high = ratio_interval([10.0, 90.0], [1, 3])  # means 10 and 30, over all rollouts 25
    assert mean == 25.0
    half = 1.96 * (2 / 1 * (15.0**2 + 15.0**2)) ** 0.5 / 4
    assert (low, high) == pytest.approx((25 - half, 25 + half))


def test_ratio_interval_of_one_problem_has_no_bounds():
    assert ratio_interval([6.0], [3]) == (2.0, None, None)


def test_change_interval_is_the_one_of_newcombe():
    """The first example of his paper: 56 of 70 against 48 of 80."""
    first, last = (mean_interval([1.0] * right + [0.0] * (count - right)) for right, count in ((48, 80), (56, 70)))
    assert change_interval(first, last) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)
    low, high = change_interval(last, first)[1:]
    assert (low, high) == pytest.approx((-0.3339, -0.0524), abs=5e-5)


def test_paired_interval_is_the_one_of_the_mean():
    differences = [1.0, 2.0, 6.0]
    half = 1.96 * stdev(differences) / 3**0.5
    assert paired_interval(differences) == pytest.approx((3.0, 3.0 - half, 3.0 + half))
    assert paired_interval([0.0, 0.0]) == (0.0, 0.0, 0.0)
