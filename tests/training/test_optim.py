"""Schedules by hand; which parameters each optimizer gets."""

import copy

import pytest
import torch

from retrain.training.optim import Optimizer, lr_factor
from retrain.training.settings import PolicySettings
from tests.training.small_models import make_model

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ("cosine", [0.5, 1, 1, 0.853553, 0.5, 0.146447, 0]),
    ],
)
def test_warm_up_then_schedule(schedule, factors):
    settings = PolicySettings(warmup_steps=2, schedule=schedule, total_steps=6)
    assert [lr_factor(step, settings) for step in range(7)] == pytest.approx(factors, abs=1e-6)


def test_first_adamw_step_moves_every_weight_by_the_learning_rate():
    model = make_model()
    optimizer = Optimizer(model, PolicySettings(lr=0.1, eps=1e-12))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert optimizer.step(0) == 0.1
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(before[name] - parameter, torch.full_like(parameter, 0.1), rtol=1e-3, atol=1e-3)


def test_weight_decay_is_for_matrices():
    model = make_model()
    optimizer = Optimizer(model, PolicySettings(lr=0.1, weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if parameter.ndim == 2 else 1.0))


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_eight_bit_moments_are_those_of_adamw_in_bytes_and_go_on_from_their_state(offload):
    """64 x 128 weights have moments of bytes, 128 biases of float32; the state comes back to the bit."""
    torch.manual_seed(0)
    first = torch.nn.Linear(128, 64)
    models = {name: copy.deepcopy(first) for name in ("adamw", "adamw8bit", "resumed")}
    kinds = {"adamw": "adamw", "adamw8bit": "adamw8bit", "resumed": "adamw8bit"}
    settings = {name: PolicySettings(lr=1e-3, optimizer=kind, offload=offload) for name, kind in kinds.items()}
    found = {name: Optimizer(model, settings[name]) for name, model in models.items()}

    def steps(seeds, *names):
        for seed in seeds:
            gradients = [
                torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) for p in first.parameters()
            ]
            for name in names:
                for p, gradient in zip(models[name].parameters(), gradients, strict=True):
                    p.grad = gradient.clone()
                found[name].step(seed)

    steps(range(4), "adamw", "adamw8bit")
    models["resumed"].load_state_dict(models["adamw8bit"].state_dict())
    state = found["adamw8bit"].state_dict()
    assert {value.dtype for value in (state["weight"]["state1"], state["weight"]["state2"])} == {torch.uint8}
    assert state["bias"]["state1"].dtype == torch.float32
    found["resumed"].load_state_dict(state)
    steps(range(4, 8), *models)
    for name, value in models["adamw8bit"].named_parameters():
        assert torch.equal(value, dict(models["resumed"].named_parameters())[name])
        moved = dict(models["adamw"].named_parameters())[name] - dict(first.named_parameters())[name]
        error = (value - dict(models["adamw"].named_parameters())[name]).norm() / moved.norm()
        assert error < (0.03 if name == "weight" else 1e-5), error


def test_muon_gets_hidden_matrices_only():
    optimizer = Optimizer(make_model("llama"), PolicySettings(optimizer="muon"))
    names = {id(p): name for name, p in optimizer.parameters.items()}
    muon = {names[id(p)] for group in optimizer.optimizers[1].param_groups for p in group["params"]}
    assert "model.layers.0.mlp.up_proj.weight" in muon
    assert not any("embed" in name or "lm_head" in name or "norm" in name for name in muon)
    adamw = {names[id(p)] for group in optimizer.optimizers[0].param_groups for p in group["params"]}
    assert adamw | muon == set(optimizer.parameters)
