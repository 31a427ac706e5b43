"""Token log-probs against the definition, in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.functional.logprobs import predictors, token_scores

pytestmark = pytest.mark.numeric


def literal(logits, tokens, temperature):
    """Definition, one token at a time."""
    rows = []
    for row, token in zip(logits.tolist(), tokens.tolist(), strict=True):
        top = max(z / temperature for z in row)
        normalizer = top + math.log(sum(math.exp(z / temperature - top) for z in row))
        logs = [z / temperature - normalizer for z in row]
        entropy = -sum(math.exp(lp) * lp for lp in logs)
        varentropy = sum(math.exp(lp) * lp * lp for lp in logs) - entropy**2
        squares = sum(math.exp(2 * lp) for lp in logs)
        rows.append((logs[token], entropy, varentropy, squares))
    return torch.tensor(rows, dtype=torch.float64).unbind(-1)


@given(seed=st.integers(0, 99), temperature=st.sampled_from([0.6, 1.0, 1.2]), chunk=st.integers(1, 9))
@settings(deadline=None, max_examples=25)
def test_equals_the_definition_for_every_chunk(seed, temperature, chunk):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(7, 5, dtype=torch.float64, generator=generator)
    tokens = torch.randint(0, 5, (7,), generator=generator)
    settings = {"temperature": temperature, "chunk": chunk}
    scores = token_scores(logits, torch.nn.Identity(), tokens, squares=True, **settings)
    assert not token_scores(logits, torch.nn.Identity(), tokens, **settings).sum_pi_squared.any()
    for found, expected in zip(vars(scores).values(), literal(logits, tokens, temperature), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("chunk", [2, 100])
@pytest.mark.parametrize("terms", [(1.0, 0.0), (0.0, 1.0), (1.0, 0.3)])
def test_gradient_is_that_of_log_softmax(chunk, terms):
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 6, dtype=torch.float64)
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([0, 5, 2, 2, 1])
    weight = torch.randn(5, dtype=torch.float64)
    scores = token_scores(hidden, head, tokens, temperature=0.7, chunk=chunk)
    table = torch.log_softmax(head(hidden) / 0.7, -1)
    table_values = [table.gather(-1, tokens[:, None])[:, 0], -(table.exp() * table).sum(-1)]
    values = [scores.logprobs, scores.entropy], table_values
    found, expected = (
        torch.autograd.grad(
            torch.stack([t * (weight * v).sum() for t, v in zip(terms, value, strict=True) if t]).sum(),
            [hidden, head.weight, head.bias],
            retain_graph=True,
        )
        for value in values
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_no_more_than_a_chunk_of_logits_exists_at_once():
    sizes = []

    def head(part):
        sizes.append(len(part))
        return part.repeat(1, 2)

    hidden = torch.randn(10, 3, requires_grad=True)
    token_scores(hidden, head, torch.zeros(10, dtype=torch.long), chunk=4).logprobs.sum().backward()
    assert sorted(sizes) == [2, 2, 4, 4, 4, 4]  # once forward, once again in the backward pass


def test_forbidden_tokens_stay_finite():
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    scores = token_scores(logits, torch.nn.Identity(), torch.tensor([0]))
    (scores.logprobs + scores.entropy).sum().backward()
    assert scores.logprobs.item() == pytest.approx(-math.log(2))
    assert scores.entropy.item() == pytest.approx(math.log(2))
    assert scores.varentropy.item() == pytest.approx(0, abs=1e-6)
    assert logits.grad.tolist() == [[pytest.approx(0.5), pytest.approx(-0.5), 0.0]]


def test_half_precision_logits_are_scored_in_float32():
    logits = torch.randn(3, 50, dtype=torch.bfloat16)
    found = token_scores(logits, torch.nn.Identity(), torch.tensor([1, 2, 3])).logprobs
    expected = torch.log_softmax(logits.double(), -1)[torch.arange(3), torch.tensor([1, 2, 3])]
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_token_is_predicted_from_the_position_before_it():
    scored = torch.tensor([[False, True, True, False], [False, False, False, True]])
    assert predictors(scored).tolist() == [0, 1, 6]


def test_a_first_token_has_no_predictor():
    with pytest.raises(AssertionError, match="first token"):
        predictors(torch.tensor([[True, False]]))
