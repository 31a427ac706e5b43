"""The formulas agree with their printed form; tests err, and intervals cover, as often as they say."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from retrain.campaign.verdict import statistics
from tests.reference import statistics as reference

numbers = st.floats(-1, 1).map(lambda value: round(value, 6))
samples = st.lists(numbers, min_size=3, max_size=9)
close = pytest.approx
SIGNS = {count: [*itertools.product((-1, 1), repeat=count)] for count in (4, 6)}


def test_a_hand_worked_example():
    differences = [0.01, 0.02, 0.03, -0.01]
    # The sum is 0.05. With all signs positive it is 0.07; flipping 0.01 alone gives 0.05: these and the sum as it is,
    # and each with all signs turned, are 6 of the 16 patterns.
    assert statistics.sign_flip(differences) == 6 / 16
    assert statistics.holm([0.01, 0.04, 0.03]) == close([0.03, 0.06, 0.06])
    assert statistics.iqm([0, 1, 2, 3, 100]) == 2.0
    assert statistics.improvement([2, 3], [1, 3], 0)[0] == 0.625
    assert statistics.mean_interval([1.0, 2.0, 3.0]) == close((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5))
    assert [statistics.smallest_p(n) for n in (0, 1, 5, 8)] == [1, 1, 0.0625, 0.0078125]


@settings(deadline=None, max_examples=60)
@given(samples, samples)
def test_formulas_equal_the_reference(left, right):
    assert statistics.sign_flip(left) == reference.sign_flip(left)
    assert statistics.iqm(left) == close(reference.iqm(left), abs=1e-9)
    assert statistics.iqm(left) == close(stats.trim_mean(left, 0.25), abs=1e-9)
    assert statistics.mean_interval(left) == close(reference.t_interval(left), abs=1e-9)
    found, _, _ = statistics.improvement(left, right, 0)
    assert found == close(reference.probability_of_improvement(left, right), abs=1e-9)
    if np.std(left) > 1e-6:
        assert statistics.effect_size(left) == close(reference.hedges(left), rel=1e-9)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "of",
    [
        statistics.iqm,
        statistics.mean_interval,
        statistics.sign_flip,
        statistics.holm,
        statistics.effect_size,
        lambda values: statistics.bootstrap_interval(values, np.mean, seed=0),
        lambda values: statistics.improvement(values, [0.1], seed=0),
        lambda values: statistics.improvement([0.1], values, seed=0),
    ],
)
def test_what_is_not_finite_is_refused(of, value):
    with pytest.raises(ValueError, match="is not a finite number"):
        of([0.1, value, 0.2])


def test_the_permutation_test_equals_scipys():
    rng = np.random.default_rng(5)
    for count in (2, 5, 8):
        differences = rng.normal(0.3, 1, count)
        expected = stats.permutation_test((differences,), np.sum, permutation_type="samples", n_resamples=np.inf)
        assert statistics.sign_flip(differences) == close(expected.pvalue, abs=1e-9)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_holm_equals_the_reference_whatever_the_order(p_values):
    adjusted = statistics.holm(p_values)
    assert adjusted == close(reference.holm(p_values), abs=1e-12)
    assert statistics.holm(p_values[::-1]) == close(adjusted[::-1], abs=1e-12)


@pytest.mark.parametrize(
    ("seeds", "effect", "alpha", "expected"),
    [
        (30, -0.5, 0.05, lambda effect: reference.t_power(30, effect, 0.05)),
        (17, 0.9, 0.0125, lambda effect: reference.t_power(17, effect, 0.0125)),
        (14, 0.9, 0.05, lambda effect: reference.t_power(14, effect, 0.05)),
        (8, 1.53, 0.0125, lambda effect: reference.all_alike_power(8, effect)),
        (6, -0.7, 0.05, lambda effect: reference.all_alike_power(6, effect)),
    ],
)
def test_power_equals_the_reference(seeds, effect, alpha, expected):
    assert statistics.power(seeds, effect, alpha) == close(expected(abs(effect)), abs=1e-9)
    found = statistics.detectable_effect(seeds, 0.02, alpha=alpha)
    assert found == close(reference.detectable_effect(expected, 0.02), rel=1e-9)


@pytest.mark.parametrize("alpha", [0.05, 0.05 / 2, 0.05 / 4])
@pytest.mark.parametrize("seeds", [8, 9, 10, 11, 12])
def test_a_difference_is_found_as_often_as_the_power_says(seeds, alpha):
    effect = statistics.detectable_effect(seeds, 1.0, alpha=alpha)
    rng = np.random.default_rng(4)
    p = np.concatenate([statistics.sign_flip(rng.normal(effect, 1, (500, seeds))) for _ in range(8)])
    assert (p <= alpha).mean() == close(0.8, abs=0.025)
    assert statistics.power(seeds, effect, alpha) == close(0.8, abs=0.001)


def test_eight_seeds_and_four_comparisons_ask_for_the_same_sign_of_all():
    assert statistics.power(8, 1.53, 0.05 / 4) == close(0.594, abs=0.001)
    assert statistics.detectable_effect(8, 1.0, alpha=0.05 / 4) == close(1.92, abs=0.01)


def test_power_grows_with_the_effect_and_with_the_seeds():
    for alpha in (0.05, 0.0125):
        found = [[statistics.power(seeds, effect / 4, alpha) for effect in range(13)] for seeds in range(2, 19)]
        assert (np.diff(found, axis=1) >= 0).all()
        assert (np.diff(found, axis=0) >= -0.02).all()  # chance in what is simulated


def test_too_few_seeds_detect_nothing():
    assert statistics.detectable_effect(5, 0.02) == math.inf
    assert statistics.power(5, 100.0) == 0.0
    assert statistics.power(1, 100.0) == 0.0
    assert statistics.power(6, math.inf) == 1.0


def test_seeds_needed_is_the_least_number_with_the_power():
    for effect in (0.2, 0.5, 1.0, -1.0, 40.0):
        needed = statistics.seeds_needed(effect)
        assert statistics.power(needed, effect) >= 0.8 > statistics.power(needed - 1, effect)
    assert statistics.seeds_needed(0.5) == 34  # as printed in tables of the paired t-test
    assert statistics.seeds_needed(math.inf) == 6  # 2 / 2^5 is above 5%
    assert statistics.seeds_needed(math.inf, 0.05 / 4) == 8
    assert statistics.seeds_needed(0.0) is None
    assert statistics.seeds_needed(1e-4) is None


def test_many_seeds_are_sampled_close_to_the_exact_value_and_the_same_every_time(monkeypatch):
    differences = np.random.default_rng(2).normal(0.35, 1, 14)
    exact = statistics.sign_flip(differences)
    monkeypatch.setattr(statistics, "EXACT_SEEDS", 13)
    sampled = statistics.sign_flip(differences, seed=1)
    assert sampled == close(exact, abs=0.005)
    assert sampled == statistics.sign_flip(differences, seed=1)
    assert 0 < statistics.sign_flip([1.0] * 40) < 1e-4  # never 0


def exact_p(pairs):
    """The sign-flip p of decimal texts, in fractions, which are not rounded."""
    differences = [Fraction(left) - Fraction(right) for left, right in pairs]
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in SIGNS[len(pairs)]]
    return sum(one >= abs(sum(differences)) for one in sums) / len(sums)


@pytest.mark.parametrize("level", [0, 50, 10_000, 123_456_789])
@pytest.mark.parametrize("seeds", [4, 6])
def test_ties_of_large_values_are_counted_as_in_fractions(level, seeds):
    rng = np.random.default_rng(level + seeds)
    for _ in range(50):
        texts = [[f"{level + value / 10:.1f}" for value in rng.integers(-9, 9, 2)] for _ in range(seeds)]
        pairs = [[float(text) for text in pair] for pair in texts]
        scale = max(abs(value) for pair in pairs for value in pair)
        assert statistics.sign_flip([a - b for a, b in pairs], scale=scale) == exact_p(texts)


def test_equal_differences_of_large_values_have_an_infinite_effect():
    differences = [level + 0.1 - level for level in (10_000.3, 9_999.9, 10_000.1)]
    assert statistics.effect_size(differences, 10_000.4) == math.inf
    assert statistics.effect_size([1e-12, -1e-12, 0.0], 10_000.4) == 0.0


def test_degenerate_samples():
    assert statistics.sign_flip([]) == 1.0
    assert statistics.sign_flip([0.0] * 8) == 1.0
    assert statistics.sign_flip([0.1] * 8) == 2 / 2**8
    assert math.isnan(statistics.mean_interval([1.0])[0])
    assert math.isnan(statistics.mean_interval([])[1])
    assert math.isnan(statistics.bootstrap_interval([1.0], statistics.iqm, 0)[0])
    value, low, high = statistics.improvement([1.0], [1.0, 2.0], 0)
    assert value == 0.25
    assert math.isnan(low)
    assert math.isnan(high)
    assert math.isnan(statistics.improvement([], [1.0], 0)[0])
    assert math.isnan(statistics.effect_size([1.0, 2.0]))
    assert statistics.effect_size([0.0] * 4) == 0.0
    assert statistics.effect_size([-0.1] * 4) == -math.inf


def test_bootstrap_intervals_are_those_of_a_seed_and_contain_the_estimate():
    values = list(np.random.default_rng(0).normal(0.5, 0.05, 10))
    low, high = statistics.bootstrap_interval(values, statistics.iqm, 3)
    assert low < statistics.iqm(values) < high
    assert (low, high) == statistics.bootstrap_interval(values, statistics.iqm, 3)
    scipys = stats.bootstrap(
        (values,), statistics.iqm, method="percentile", n_resamples=10_000, rng=np.random.default_rng(3)
    ).confidence_interval
    assert (low, high) == close(tuple(scipys), abs=0.002)
    found, low, high = statistics.improvement(values, [value - 0.02 for value in values], 3)
    assert 0 < low < found < high <= 1


# --- How often the tests err and the intervals cover, on simulated tables: seeds shared by all conditions, and noise.

TABLES = 4000
"""So many that chance moves a rate of 5% by less than 0.4 points."""


def tables(seed, conditions, seeds, effects, noise):
    """[TABLES, conditions, seeds] final accuracies, on 512 held-out problems."""
    rng = np.random.default_rng(seed)
    share = rng.normal(0, 0.03, (TABLES, 1, seeds))
    own = noise(rng, (TABLES, conditions, seeds)) * 0.02
    rate = np.clip(0.5 + np.asarray(effects)[:, None] + share + own, 0, 1)
    return rng.binomial(512, rate) / 512


def normal(rng, shape):
    return rng.normal(size=shape)


def skewed(rng, shape):
    return rng.exponential(size=shape) - 1


def family(accuracies, pairs):
    """[TABLES, pairs] corrected p."""
    p = np.stack([statistics.sign_flip(accuracies[:, a] - accuracies[:, b]) for a, b in pairs], axis=1)
    return np.array([statistics.holm(row) for row in p])


LADDER = [(1, 0), (2, 1), (3, 2), (4, 3)]
BASELINE = [(1, 0), (2, 0), (3, 0), (4, 0)]


@pytest.mark.parametrize("noise", [normal, skewed])
@pytest.mark.parametrize("pairs", [LADDER, BASELINE], ids=["ladder", "baseline"])
@pytest.mark.parametrize("seeds", [8, 10])
def test_without_a_difference_a_family_is_wrong_in_at_most_5_percent(noise, pairs, seeds):
    wrong = (family(tables(1, 5, seeds, [0.0] * 5, noise), pairs) <= 0.05).any(axis=1).mean()
    assert wrong <= 0.05


@pytest.mark.parametrize("seeds", [3, 5, 8, 16])
@pytest.mark.parametrize("noise", [normal, skewed])
def test_intervals_of_a_known_difference_cover_it(noise, seeds):
    accuracies = tables(2, 2, seeds, [0.0, 0.03], noise)
    low, high = statistics.mean_interval(accuracies[:, 1] - accuracies[:, 0])
    assert 0.93 <= ((low <= 0.03) & (high >= 0.03)).mean() <= 0.97


def test_the_bootstrap_of_few_paired_differences_covers_too_seldom_which_is_why_it_is_not_used():
    accuracies = tables(3, 2, 5, [0.0, 0.03], normal)[:500]
    ends = [
        statistics.bootstrap_interval(pair[1] - pair[0], lambda drawn: drawn.mean(axis=-1), 0, 1000)
        for pair in accuracies
    ]
    assert np.mean([low <= 0.03 <= high for low, high in ends]) < 0.91
