"""Scores as GPUs compute them, without compiling, against those that CPUs compute; and a compiler that fails."""

import logging
import math

import pytest
import torch

from retrain.functional import fused_scores
from retrain.functional.fused_scores import fused
from retrain.functional.logprobs import FLOOR, token_scores

pytestmark = pytest.mark.numeric


@pytest.fixture
def plain(monkeypatch):
    """Run the functions as they are."""
    monkeypatch.setattr(fused_scores, "_compiled", lambda function: function)
    monkeypatch.setattr(fused_scores, "_compiles", set())
    monkeypatch.setattr(fused_scores, "_failed", [])


def scored(hidden, head, tokens, weights, **options):
    """Results, and the gradients of hidden states and head for an objective of log-probs and entropies."""
    scores = token_scores(hidden, head, tokens, temperature=0.7, squares=True, **options)
    products = [(weight * column).sum() for weight, column in zip(weights, vars(scores).values(), strict=False)]
    objective = torch.stack(products).sum()
    return [*vars(scores).values(), *torch.autograd.grad(objective, [hidden, head.weight])]


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("terms", [(1.0, 0.3), (1.0,), (0.0, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_the_other_computation(dtype, terms):
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 30, bias=False, dtype=dtype)
    hidden = (3 * torch.randn(11, 8)).to(dtype).requires_grad_()
    tokens = torch.randint(0, 30, (11,))
    wide = torch.promote_types(dtype, torch.float32)
    weights = [term * torch.randn(11).to(wide) for term in terms]
    expected, found = (scored(hidden, head, tokens, weights, chunk=4, scorer=scorer) for scorer in (None, fused))
    slack = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=slack, atol=slack)


@pytest.mark.usefixtures("plain")
def test_forbidden_tokens_stay_finite():
    logits = torch.tensor([[0.0, 0.0, -math.inf], [0.0, 0.0, -math.inf]], requires_grad=True)
    scores = token_scores(logits, torch.nn.Identity(), torch.tensor([0, 2]), scorer=fused)
    assert scores.logprobs.tolist() == [pytest.approx(-math.log(2)), FLOOR]
    assert scores.entropy.tolist() == pytest.approx([math.log(2)] * 2)
    (scores.logprobs[0] + scores.entropy.sum()).backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[0].tolist() == [pytest.approx(0.5), pytest.approx(-0.5), 0.0]


def test_without_a_compiler_the_operations_run_one_after_the_other(monkeypatch, caplog):
    def broken(function):
        raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    monkeypatch.setattr(fused_scores, "_compiled", broken)
    monkeypatch.setattr(fused_scores, "_compiles", set())
    monkeypatch.setattr(fused_scores, "_failed", [])
    logits, tokens = torch.randn(5, 9), torch.arange(5)
    with caplog.at_level(logging.WARNING):
        found = [token_scores(logits, torch.nn.Identity(), tokens, scorer=fused) for _ in range(2)]
    [message] = caplog.messages
    assert message.endswith("torch.compile failed (RuntimeError: Failed to find C compiler. Please specify one)")
    expected = token_scores(logits, torch.nn.Identity(), tokens)
    for one in found:
        assert torch.equal(one.logprobs, expected.logprobs)


def test_lack_of_memory_is_not_taken_for_a_missing_compiler(monkeypatch):
    def full(function):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(fused_scores, "_compiled", full)
    monkeypatch.setattr(fused_scores, "_compiles", set())
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        fused_scores.can_fuse(torch.randn(5, 9), torch.arange(5))
    assert not fused_scores._failed
