"""Stochastic rounding: neighbours only, right on average, repeatable."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.functional.rounding import stochastic

pytestmark = pytest.mark.numeric


def rounded(values, seed=0):
    out = torch.full_like(values, math.nan)
    stochastic(values, torch.Generator().manual_seed(seed), out=out)
    return out


def neighbours(values):
    """The bfloat16 numbers at and next to each value, away from zero, by cutting the bits of its float32."""
    low = (values.view(torch.int32) & -65536).view(torch.float32)
    return low, (low.view(torch.int32) + 65536).view(torch.float32)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=9), st.integers(0, 2**40))
@settings(deadline=None, max_examples=200)
def test_a_value_becomes_one_of_its_two_neighbours_and_bfloat16_numbers_stay(values, seed):
    values = torch.tensor(values)
    found, (low, high) = rounded(values, seed), neighbours(values)
    assert bool(((found == low) | (found == high)).all())
    assert torch.equal(found.bfloat16().float(), found)
    assert torch.equal(rounded(found, seed + 1), found)


@pytest.mark.parametrize("share", [0.001, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("low", [1.0, -0.02, 3e-5, -700.0])
def test_the_mean_of_many_roundings_is_the_value(low, share):
    low = torch.tensor(low).bfloat16().float()
    high = neighbours(low)[1]
    count = 1_000_003  # not a multiple of the block or of the numbers of a draw
    value = low + share * (high - low)
    found = rounded(value.expand(count).clone(), seed=3)
    up = float((found == high).double().mean())
    real = float((value - low) / (high - low))
    assert abs(up - real) < 5 * math.sqrt(real * (1 - real) / count)


def test_neighbouring_values_are_rounded_independently():
    found = rounded(torch.full((200_000,), 1 + 2**-8))
    up = (found > 1).double()
    for lag in (1, 2, 3, 4, 5, 1 << 16):
        both = float((up[lag:] * up[:-lag]).mean())
        assert abs(both - 0.25) < 5 * math.sqrt(0.25 * 0.75 / len(up)), lag


def test_equal_generators_round_alike_in_place_and_in_any_shape():
    values = torch.randn(70, 1000, generator=torch.Generator().manual_seed(1))
    expected = rounded(values, 7)
    assert torch.equal(rounded(values.view(-1), 7).view(70, 1000), expected)
    assert not torch.equal(rounded(values, 8), expected)
    stochastic(values, torch.Generator().manual_seed(7), out=values)
    assert torch.equal(values, expected)
