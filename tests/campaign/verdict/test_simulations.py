"""Size, power and coverage of verdicts on simulated tables, as docs/statistics.md gives them (`docs/power.py`)."""

import pytest

from docs.power import KINDS, UNEVEN, claimed, coverage_of, power_of, simulated, size_of, uneven
from retrain.campaign.verdict.statistics import detectable_effect

pytestmark = pytest.mark.slow
TABLES = 300
"""Chance moves a rate of 5 % by less than 2.6 points in 95 % of cases."""
COLLAPSE = KINDS[-1]


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("size", [1, 4, 9])
@pytest.mark.parametrize("seeds", [3, 5, 6, 9])
def test_families_without_an_effect_have_few_claims(kind, size, seeds):
    assert size_of(kind, size, seeds, TABLES) <= 0.09


@pytest.mark.parametrize(("family", "least", "most"), [(0, 0.98, 1), (1, 0.97, 1), (2, 0.93, 0.08), (3, 0.91, 1)])
def test_methods_with_fewer_runs_do_not_silence_the_others(family, least, most):
    _, pairs, effects = UNEVEN[family]
    named, false = uneven(pairs, effects, TABLES)
    assert named >= least
    assert false <= most


@pytest.mark.parametrize("family", range(4, 8))
def test_uneven_families_without_an_effect_have_few_claims(family):
    _, pairs, effects = UNEVEN[family]
    assert uneven(pairs, effects, TABLES)[1] <= 0.09


def test_a_method_that_collapses_in_one_run_of_ten_is_called_different_too_often():
    """The limit that docs/statistics.md states: few runs often hold no collapse."""
    assert size_of(COLLAPSE, 1, 8, TABLES) > 0.1
    assert coverage_of(COLLAPSE, 8, TABLES) < 0.9


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("seeds", [3, 6, 9])
def test_intervals_of_a_known_difference_cover_it(kind, seeds):
    assert 0.92 <= coverage_of(kind, seeds, 1000) <= 0.975, "intervals that are too wide find nothing"


@pytest.mark.parametrize(("size", "seeds"), [(1, 4), (1, 8), (4, 5), (4, 6), (9, 7), (9, 8)])
def test_power_is_more_than_that_of_holms_correction(size, seeds):
    verdicts, holm = power_of(size, seeds, TABLES)
    assert (verdicts > 0.8 + 0.05) >= (detectable_effect(seeds, size) < 2.0 - 0.15)
    assert verdicts >= holm
    if seeds < 6 or size > 1:
        assert verdicts > holm


def test_a_family_without_noise_in_one_member_claims_it():
    import numpy as np

    paired = simulated("normal", 4, 6, np.random.default_rng(0))
    paired[2] = 1.0 + paired[2] * 1e-3
    assert claimed(paired)[2]
