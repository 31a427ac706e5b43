"""Drawing tokens from logits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TopKLogitsWarper, TopPLogitsWarper

from retrain.functional.draws import draw, truncate

pytestmark = pytest.mark.numeric

QUARTERS = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()


@pytest.mark.parametrize(
    ("uniform", "temperature", "top_k", "token", "probability"),
    [
        *((0.0, 1.0, 0, 0, 1 / 2), (0.49, 1.0, 0, 0, 1 / 2), (0.51, 1.0, 0, 1, 1 / 4), (0.76, 1.0, 0, 2, 1 / 8)),
        (0.999, 1.0, 0, 3, 1 / 8),
        # At temperature 1/2 the probabilities are squared: 16, 4, 1, 1 of 22; of the first two, 16 and 4 of 20.
        (0.9, 0.5, 2, 1, 4 / 20),
        (0.9, 0.0, 1, 0, 1 / 2),  # greedy ignores truncation and reports temperature one
    ],
)
def test_the_first_token_whose_cumulated_probability_exceeds_the_number(
    uniform, temperature, top_k, token, probability
):
    tokens, logprobs = draw(QUARTERS, torch.tensor([uniform]), temperature, top_k, 1.0)
    assert tokens.tolist() == [token]
    assert logprobs.item() == pytest.approx(math.log(probability))


def test_top_p_keeps_the_fewest_that_hold_the_mass():
    kept = truncate(QUARTERS.expand(3, -1), 0, 0.6).isfinite()
    assert kept.tolist() == [[True, True, False, False]] * 3
    assert truncate(QUARTERS, 0, 0.4).isfinite().tolist() == [[True, False, False, False]]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(0, 12), st.floats(0.05, 1.0))
def test_truncation_is_that_of_transformers(seed, top_k, top_p):
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(seed))
    expected = TopKLogitsWarper(top_k)(None, logits) if top_k else logits
    expected = TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected
    assert torch.equal(truncate(logits, top_k, top_p), expected)


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.full((5, 9), -torch.inf)
    logits[:, 3:5] = torch.tensor([0.0, -3.0])
    edge = torch.tensor([0.0, 0.5, 0.999, 1 - 2**-22, 1 - 2**-23])
    tokens, logprobs = draw(logits, edge * (1 - 2**-22), 1.0, 0, 1.0)
    assert set(tokens.tolist()) == {3, 4}
    assert logprobs.isfinite().all()
