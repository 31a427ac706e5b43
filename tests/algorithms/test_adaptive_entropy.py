"""The controller of the entropy bonus against vectors, its life cycle, and the term."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from retrain.algorithms.adaptive_entropy import EntropyCoefficient, adaptive_entropy
from retrain.config.load import load
from retrain.errors import ConfigError
from retrain.types import Batch

pytestmark = pytest.mark.numeric

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "catalogue.json").read_text())
MASK = torch.tensor([[False, True, True]])


def batch(value):
    """One row whose response tokens have this mean entropy; the prompt's is not a number."""
    entropy = torch.tensor([[float("nan"), value - 0.05, value + 0.05]], dtype=torch.float64)
    zeros = torch.zeros(1, 3)
    return Batch(
        input_ids=zeros.long(),
        attention_mask=zeros == 0,
        response_mask=MASK,
        sampler_logprobs=zeros,
        rewards=torch.zeros(1),
        correct=torch.zeros(1, dtype=torch.bool),
        lengths=torch.tensor([2]),
        group_ids=torch.tensor([0]),
        is_expert=torch.tensor([False]),
        advantages=zeros,
        extra={"entropy": entropy},
    )


def alphas(component, entropies):
    """alpha of every step."""
    for value in entropies:
        made = batch(value)
        yield component(made.column("entropy"), made.response_mask)[0]
        component.after(made)


@pytest.mark.parametrize("case", VECTORS["informational"]["entropy_controller"]["cases"], ids=lambda case: case["id"])
def test_published_sequences(case):
    params: Any = {{"low": "min", "high": "max"}.get(name, name): value for name, value in case["params"].items()}
    found = list(alphas(EntropyCoefficient(**params), case["columns"]["batch_entropy"]))
    assert found == pytest.approx(case["expected"], abs=1e-12)


def test_a_checkpoint_continues():
    first, second = EntropyCoefficient(delta=0.1), EntropyCoefficient(delta=0.1)
    list(alphas(first, [0.1, 0.1, 0.3]))
    second.load_state_dict(first.state_dict())
    assert list(alphas(second, [0.1, 0.1])) == list(alphas(first, [0.1, 0.1])) == pytest.approx([0.1, 0.2])


def test_a_batch_without_tokens_has_no_low_entropy():
    component = EntropyCoefficient(delta=0.1, initial=0.3)
    made = batch(0.1)
    component.after(made.replace(response_mask=made.response_mask & False))
    assert component.state_dict() == {"value": 0.3}


def test_the_term_is_the_bonus_of_response_tokens():
    entropy = batch(0.2).column("entropy").requires_grad_()
    value = adaptive_entropy(entropy, MASK, 0.5)
    torch.testing.assert_close(value.detach(), torch.tensor([[0.0, -0.075, -0.125]], dtype=torch.float64))
    value.sum().backward()
    assert entropy.grad is not None
    assert entropy.grad.tolist() == [[0.0, -0.5, -0.5]]


def test_a_start_outside_the_bounds_is_refused(tmp_path):
    file = tmp_path / "run.toml"
    terms = '[[loss]]\nname = "ppo_clip"\n[[loss]]\nname = "adaptive_entropy"\n'
    file.write_text(terms + "[entropy_coefficient]\ninitial = 0.1\n")
    assert load(file).pipeline.policy_columns == {"entropy"}
    file.write_text(terms + "[entropy_coefficient]\ninitial = 2.0\n")
    with pytest.raises(ConfigError, match=r"run.toml:6:1: \[entropy_coefficient\] initial: .* not between min = 0"):
        load(file)
