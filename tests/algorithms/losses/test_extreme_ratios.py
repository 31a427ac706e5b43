"""Losses with a soft gate where the two policies are far apart, against their formula in Python's numbers."""

import math

import pytest
import torch

from retrain.algorithms.losses.sampler_ratios import vespo
from retrain.algorithms.losses.soft_gates import sapo

pytestmark = pytest.mark.numeric

FAR = (-1000.0, -40.0, -19.0, -5.0, -0.1, 0.0, 0.1, 5.0, 19.0, 40.0, 1000.0)


def loss_and_gradient(loss, anchor, log_ratio, advantage, **params):
    """Value and derivative of one response token, in float32; -1 is its log-prob."""
    new = torch.tensor([[-1.0]], requires_grad=True)
    columns = {"logprobs": new, anchor: torch.tensor([[-1.0 - log_ratio]])}
    mask = torch.tensor([[True]])
    value, _ = loss(**columns, advantages=torch.tensor([[advantage]]), response_mask=mask, **params)
    value.sum().backward()
    return value.item(), new.grad.item()


@pytest.mark.parametrize("log_ratio", FAR)
@pytest.mark.parametrize(("k", "rate"), [(2.0, 3.0), (0.0, 3.0), (2.0, 0.0), (0.0, 0.0), (5.0, 0.0)])
@pytest.mark.parametrize("advantage", [0.5, -0.5, 0.0])
def test_vespo_is_its_formula_and_finite(log_ratio, k, rate, advantage):
    params = {"k_pos": k, "lambda_pos": rate, "k_neg": k, "lambda_neg": rate}
    value, gradient = loss_and_gradient(vespo, "sampler_logprobs", log_ratio, advantage, **params)
    bounded = min(max(log_ratio, math.log(1e-8)), 20.0)
    phi = math.exp(min(80.0, rate + k * bounded - rate * math.exp(bounded)))
    assert value == pytest.approx(phi * advantage, rel=1e-4, abs=1e-12)
    assert gradient == pytest.approx(-phi * advantage, rel=1e-4, abs=1e-12)
    assert math.isfinite(value)


@pytest.mark.parametrize("log_ratio", FAR)
@pytest.mark.parametrize(("advantage", "tau"), [(0.5, 1.0), (-0.5, 1.05)])
def test_sapo_is_its_formula_and_finite(log_ratio, advantage, tau):
    value, gradient = loss_and_gradient(sapo, "old_logprobs", log_ratio, advantage)
    ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
    gate = 1 / (1 + math.exp(-min(tau * (ratio - 1), 700.0)))
    assert value == pytest.approx(-4 / tau * gate * advantage, rel=1e-4)
    slope = -advantage * ratio * 4 * gate * (1 - gate) if abs(log_ratio) <= 20 else 0.0
    assert gradient == pytest.approx(slope, rel=1e-3, abs=1e-6)
