"""The formulas agree with their printed form, and with scipy where it has them."""

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from retrain.campaign.verdict import statistics
from retrain.campaign.verdict.statistics import Mean, mean_of
from tests.reference import statistics as reference

numbers = st.floats(-1, 1).map(lambda value: round(value, 6))
samples = st.lists(numbers, min_size=3, max_size=9)
close = pytest.approx


def test_a_hand_worked_example():
    # The sum is 0.05. With all signs positive it is 0.07; flipping 0.01 alone gives 0.05: these and the sum as it is,
    # and each with all signs turned, are 6 of the 16 patterns.
    assert statistics.max_t([[0.01, 0.02, 0.03, -0.01]]) == [6 / 16]
    assert statistics.holm([0.01, 0.04, 0.03]) == close([0.03, 0.06, 0.06])
    assert mean_of([1.0, 2.0, 3.0]).interval() == close((2, 2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5))
    assert [statistics.min_seeds_for_exact_test(alpha) for alpha in (0.05, 0.1, 0.0625, 0.01)] == [6, 5, 5, 8]


@settings(deadline=None, max_examples=60)
@given(samples, samples)
def test_formulas_equal_the_reference(left, right):
    assert statistics.max_t([left]) == close([reference.sign_flip(left) if any(left) else 1.0])
    assert mean_of(left).interval()[1:] == close(reference.t_interval(left), abs=1e-9)
    if np.std(left) > 1e-6:
        assert statistics.hedges_g(left) == close(reference.hedges(left), rel=1e-9)
        assert mean_of(left).p == close(stats.ttest_1samp(left, 0)[1], abs=1e-9)
        one_sided = float(stats.ttest_1samp(left, 0.1, alternative="greater")[1])  # pyright: ignore[reportArgumentType]
        assert mean_of(left).p_not_above(0.1) == close(one_sided, abs=1e-9)
        assert mean_of(left).p_not_below(0.1) == close(1 - one_sided, abs=1e-9)
    if np.std(left) > 1e-6 and np.std(right) > 1e-6:
        assert statistics.welch(left, right).p == close(stats.ttest_ind(left, right, equal_var=False)[1], abs=1e-9)


@pytest.mark.parametrize("floor", [0.0, 0.5])
def test_max_t_equals_the_reference(floor):
    rng = np.random.default_rng(0)
    for _ in range(10):
        table = (rng.normal(size=(4, 6)) + rng.normal(size=(4, 1))).round(2)
        assert statistics.max_t(table, floor) == close(reference.max_t(table.tolist(), floor))


def test_max_t_of_an_uneven_family_equals_the_reference():
    rng = np.random.default_rng(4)
    for _ in range(5):
        table = (rng.normal(size=(3, 8)) + rng.normal(0.5, 1, size=(3, 1))).round(2)
        table[0, :2] = table[1, 5] = math.nan
        rows = [[None if math.isnan(value) else value for value in row] for row in table.tolist()]
        assert statistics.max_t(table, 0.1) == close(reference.max_t(rows, 0.1))


def test_comparisons_with_few_pairs_do_not_silence_the_others():
    rng = np.random.default_rng(0)
    three = rng.normal(0.06, 0.01, size=(3, 12))
    for pairs in range(6):
        few = np.full((2, 12), math.nan)
        few[:, :pairs] = rng.normal([[0.3], [0.4]], 0.001, size=(2, pairs))
        tested = statistics.paired_tests(np.vstack([three, few]), [0.0] * 5)
        assert [one.corrected for one in tested[:3]] == statistics.max_t(three) == [2 / 2**12] * 3
        assert [one.test for one in tested] == ["exact"] * 3 + ["t test" if pairs >= 3 else ""] * 2
        students = [mean_of(row[~np.isnan(row)].tolist()).p for row in (*three, *few)]
        corrected = statistics.holm(students)[3:] if pairs >= 3 else [1.0, 1.0]
        assert [one.corrected for one in tested[3:]] == corrected, "corrected for the whole family"
    assert statistics.paired_tests(np.empty((2, 0)), [0.0] * 2) == [statistics.Tested()] * 2


def test_max_t_of_a_family_is_at_least_that_of_each_and_at_least_two_in_two_to_the_n():
    rng = np.random.default_rng(1)
    table = rng.normal(1.0, 1.0, size=(9, 6))
    found = statistics.max_t(table)
    assert all(one >= statistics.max_t([row])[0] for one, row in zip(found, table, strict=True))
    large = np.vstack([np.arange(6) * 0.01 + 1.0, table * 0.1])
    assert statistics.max_t(large)[0] == 2 / 2**6, "six seeds suffice for any family"


def test_missing_pairs_are_left_out_and_the_rest_of_the_seed_is_flipped():
    whole, part = [0.3, 0.2, 0.4, 0.1, 0.2, 0.3], [0.5, 0.1, 0.2, 0.3]
    found = statistics.max_t([whole, [*part, math.nan, math.nan]])
    assert 2 / 2**6 <= found[0] < 0.1
    assert found[1] >= 2 / 2**4
    assert statistics.max_t([[*part, math.nan, math.nan]]) == statistics.max_t([part])
    assert statistics.max_t([whole, [math.nan] * 6, [0.1, *[math.nan] * 5]])[1:] == [1.0, 1.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "of",
    [
        mean_of,
        lambda values: statistics.max_t([[math.inf if math.isnan(one) else one for one in values]]),
        statistics.holm,
        statistics.hedges_g,
        lambda values: statistics.welch(values, [0.1]),
        lambda values: statistics.differences(values, [0.1] * 3),
        lambda values: statistics.mcnemar(values, [0.1] * 3),
    ],
)
def test_what_is_not_finite_is_refused(of, value):
    with pytest.raises(ValueError, match="is not a finite number"):
        of([0.1, value, 0.2])


def test_the_exact_test_equals_scipys():
    rng = np.random.default_rng(5)
    for count in (2, 5, 8):
        differences = rng.normal(0.3, 1, count)
        expected = stats.permutation_test((differences,), np.sum, permutation_type="samples", n_resamples=np.inf)
        assert statistics.max_t([differences]) == close([expected.pvalue], abs=1e-9)


def test_unpaired_runs_have_welchs_t_test_corrected_for_the_family():
    rng = np.random.default_rng(0)
    sides = [
        (list(rng.normal(mean, sd, n)), list(rng.normal(0, 1, 4))) for mean, sd, n in ((3, 1, 12), (0, 9, 2), (0, 1, 1))
    ]
    tested = statistics.unpaired_tests(sides, [0.0] * 3)
    alone = [float(stats.ttest_ind(*both, equal_var=False)[1]) for both in sides[:2]]
    assert [one.test for one in tested] == ["Welch's t test", "Welch's t test", ""]
    assert [one.p for one in tested[:2]] == close(alone)
    assert [one.corrected for one in tested[:2]] == close(reference.holm([*alone, 1.0])[:2])


def test_mcnemar_counts_the_problems_on_which_two_models_differ():
    values, others = [1] * 9 + [0] * 1 + [1] * 50, [0] * 9 + [1] * 1 + [1] * 50
    assert statistics.mcnemar(values, others) == close(2 * (1 + 10) / 2**10)
    assert statistics.mcnemar([1, 0], [1, 0]) == 1.0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_holm_equals_the_reference_whatever_the_order(p_values):
    adjusted = statistics.holm(p_values)
    assert adjusted == close(reference.holm(p_values), abs=1e-12)
    assert statistics.holm(p_values[::-1]) == close(adjusted[::-1], abs=1e-12)


@pytest.mark.parametrize(("seeds", "effect", "size"), [(30, -0.5, 1), (17, 0.9, 4), (8, 1.53, 4), (4, 2.0, 2)])
def test_power_of_the_t_test(seeds, effect, size):
    power = statistics.t_power(seeds - 1, effect * seeds**0.5, size)
    assert power == close(reference.t_power(seeds, abs(effect), 0.05 / size), abs=1e-6)
    shift = statistics.detectable_shift(seeds - 1, size)
    assert statistics.t_power(seeds - 1, shift, size) == close(0.8, abs=1e-5)
    if seeds < 6:
        assert statistics.detectable_effect(seeds, size) == close(shift / seeds**0.5)


def test_six_seeds_need_the_same_sign_of_all():
    """The probability that six normal differences of mean e have one sign is Phi(e)^6 + Phi(-e)^6."""
    effect = statistics.detectable_effect(6)
    assert stats.norm.cdf(effect) ** 6 == close(0.8, abs=0.03)
    assert statistics.detectable_effect(6, 4) > 2.4, "in a family the largest t of each sign vector counts"


@pytest.mark.parametrize("size", [1, 4])
def test_seeds_detect_the_difference_that_reports_name(size):
    """In tables with another seed than those from which the figure comes."""
    rng, found = np.random.default_rng(9), 0
    effect = statistics.detectable_effect(8, size)
    for _ in range(400):
        noise = rng.normal(size=(size + 1, 8))
        noise[1] += effect * 2**0.5
        found += statistics.paired_tests(noise[1:] - noise[0], [0.0] * size)[0].corrected <= 0.05
    assert found / 400 == close(0.8, abs=0.06)


def test_too_few_seeds_detect_nothing():
    assert [statistics.detectable_effect(seeds) for seeds in (0, 1, 2)] == [math.inf] * 3


def test_seeds_needed_for_a_margin_is_the_least_number_that_shows_equality():
    rng = np.random.default_rng(0)
    for margin, deviation in ((0.02, 0.02), (0.02, 0.03)):
        needed = statistics.seeds_needed(margin, deviation) or 0
        share = {}
        for seeds in (needed - 2, needed):
            means = [mean_of(row) for row in rng.normal(0, deviation, size=(1000, seeds))]
            inside = [-margin < one.interval().low and one.interval().high < margin for one in means]
            share[seeds] = np.mean(inside)
        assert share[needed] > 0.77
        assert share[needed - 2] < 0.8
    assert [statistics.seeds_needed(0.02, 0.03, size) for size in (1, 9)] == [26, 36]
    assert statistics.seeds_needed(1e-6, 1.0) is None
    assert statistics.seeds_needed(0.02, 0.0) == 3


def test_many_seeds_are_sampled_close_to_the_exact_value_and_the_same_every_time(monkeypatch):
    differences = np.random.default_rng(2).normal(0.35, 1, 14)
    (exact,) = statistics.max_t([differences])
    monkeypatch.setattr(statistics, "MAX_ENUMERATED_SEEDS", 13)
    (sampled,) = statistics.max_t([differences])
    assert sampled == close(exact, abs=0.01)
    assert [sampled] == statistics.max_t([differences])
    assert 0 < statistics.max_t([[1.0] * 40])[0] < 1e-3, "never 0"


def exact_p(pairs):
    """The sign-flip p of decimal texts, in fractions, which are not rounded."""
    differences = [Fraction(left) - Fraction(right) for left, right in pairs]
    signs = product((-1, 1), repeat=len(pairs))
    sums = [abs(sum(s * d for s, d in zip(one, differences, strict=True))) for one in signs]
    return sum(one >= abs(sum(differences)) for one in sums) / len(sums)


@pytest.mark.parametrize("level", [0, 50, 10_000, 123_456_789])
@pytest.mark.parametrize("seeds", [4, 6])
def test_ties_of_large_values_are_counted_as_in_fractions(level, seeds):
    rng = np.random.default_rng(level + seeds)
    for _ in range(50):
        texts = [[f"{level + value / 10:.1f}" for value in rng.integers(-9, 9, 2)] for _ in range(seeds)]
        differences = statistics.differences(*([float(pair[side]) for pair in texts] for side in (0, 1)))
        assert statistics.max_t([differences]) == [exact_p(texts)]


def test_degenerate_samples():
    assert statistics.max_t([[0.0] * 8, [0.1] * 8]) == [1.0, 2 / 2**8]
    assert statistics.max_t(np.empty((1, 0))) == [1.0]
    assert math.isnan(mean_of([1.0]).interval().low)
    assert math.isnan(mean_of([]).interval().value)
    assert mean_of([1.0]).p == mean_of([]).p == 1.0
    assert Mean(0.1, 0.0, 7).p == 0.0
    assert mean_of([0.1] * 8, floor=0.01).error == 0.01 / 8**0.5, "the resolution of the metric is the least spread"
    assert math.isnan(statistics.hedges_g([1.0, 2.0]))
    assert statistics.hedges_g([0.0] * 4) == 0.0
    assert statistics.hedges_g([-0.1] * 4) == -math.inf
