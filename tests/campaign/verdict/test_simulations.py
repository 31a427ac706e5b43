"""Size, power and coverage of verdicts on simulated tables, as docs/statistics.md gives them (`docs/power.py`)."""

import pytest

from docs.power import KINDS, claimed, coverage_of, power_of, simulated, size_of
from retrain.campaign.verdict.statistics import power

pytestmark = pytest.mark.slow
TABLES = 300
"""Chance moves a rate of 5 % by less than 2.6 points in 95 % of cases."""
COLLAPSE = KINDS[-1]


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("size", [1, 4, 9])
@pytest.mark.parametrize("seeds", [3, 5, 6, 9])
def test_families_without_an_effect_have_few_claims(kind, size, seeds):
    assert size_of(kind, size, seeds, TABLES) <= 0.09


def test_a_method_that_collapses_in_one_run_of_ten_is_called_different_too_often():
    """The limit that docs/statistics.md states: few runs often hold no collapse."""
    assert size_of(COLLAPSE, 1, 8, TABLES) > 0.1
    assert coverage_of(COLLAPSE, 8, TABLES) < 0.9


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("seeds", [3, 6, 9])
def test_intervals_of_a_known_difference_cover_it(kind, seeds):
    assert coverage_of(kind, seeds, 1000) >= 0.92


@pytest.mark.parametrize(("size", "seeds"), [(1, 4), (1, 8), (4, 5), (4, 6), (9, 7), (9, 8)])
def test_power_is_what_the_dry_run_says_and_more_than_holms(size, seeds):
    verdicts, holm = power_of(size, seeds, TABLES)
    assert abs(verdicts - power(seeds, 2.0, size)) < 0.12
    assert verdicts >= holm
    if seeds < 6 or size > 1:
        assert verdicts > holm


def test_a_family_without_noise_in_one_member_claims_it():
    import numpy as np

    paired = simulated("normal", 4, 6, np.random.default_rng(0))
    paired[2] = 1.0 + paired[2] * 1e-3
    assert claimed(paired)[2]
