"""Weights that are rounded at random once per step, and their float32 masters."""

import pytest
import torch

from retrain.engines.torch_engine import TorchEngine
from retrain.training.policy import TorchPolicy
from retrain.training.settings import LoraSettings, PolicySettings
from retrain.types import Request, Sampling
from tests.training.small_models import make_batch, make_model, make_objective

pytestmark = pytest.mark.numeric
STOCHASTIC = {"dtype": "bfloat16", "rounding": "stochastic"}


def policy(coarse=True, **changes):
    """A policy whose initial weights are bfloat16 numbers, as those of most models on the hub."""
    model = make_model()
    if coarse:
        for p in model.parameters():
            p.data = p.data.bfloat16().float()
    return TorchPolicy(model, PolicySettings(**{"lr": 1e-3, **STOCHASTIC, **changes}))


def weights(trained):
    return {name: value.clone() for name, value in trained.weights().items()}


def masters(trained):
    return {name: value.clone() for name, value in trained.state_dict()["model"].items()}


def update(trained, steps=1, first=0):
    for step in range(first, first + steps):
        trained.update(make_batch(seed=step), make_objective())
    return trained


def test_weights_are_bfloat16_numbers_and_masters_are_not():
    trained = policy()
    before = weights(trained)
    assert all(torch.equal(value, masters(trained)[name]) for name, value in before.items() if name in masters(trained))
    update(trained, 2)
    found, exact = weights(trained), masters(trained)
    for name, value in found.items():
        assert torch.equal(value.bfloat16().float(), value), name
    for name, value in exact.items():
        assert not torch.equal(value.bfloat16().float(), value), name
        assert bool(((found[name] - value).abs() <= value.abs() / 128 + 1e-30).all()), "a neighbour"


@pytest.mark.slow
def test_an_update_below_the_last_digit_is_seen_on_average_where_nearest_loses_it():
    """The mean over seeds of the rounded change is the change of the masters."""
    first = weights(policy())
    name = "model.layers.0.mlp.up_proj.weight"
    changes, moved = [], []
    for seed in range(40):
        trained = update(policy(lr=1e-6, seed=seed))
        changes.append(weights(trained)[name] - first[name])
        moved.append(masters(trained)[name] - first[name])
    assert all(torch.equal(one, moved[0]) for one in moved), "the masters do not depend on the rounding of step 1"
    change, exact = torch.stack(changes).mean(0), moved[0]
    slope = float((change * exact).sum() / (exact * exact).sum())
    noise = torch.stack(changes).std(0) / 40**0.5
    spread = float((noise * exact).square().sum().sqrt() / (exact * exact).sum())
    assert abs(slope - 1) < 5 * spread
    assert spread < 0.16, "far enough from 0"
    nearest = update(policy(lr=1e-6, rounding="nearest")).weights()[name].bfloat16().float()
    assert float(((nearest - first[name]) * exact).sum() / (exact * exact).sum()) < 0.2


def test_trainer_and_sampler_hold_the_same_weights():
    """In float32 products they agree as exactly as without any rounding of weights."""
    trained = update(policy(coarse=False), 2)
    engine = TorchEngine(trained.model, dtype="float32")
    engine.load_weights(trained.weights(), 2)
    (rows,) = engine.sample([Request((5, 9, 11), 6, 12, 0)], Sampling(seed=1))
    batch = make_batch(rows=6).replace()
    ids = torch.zeros(6, 15, dtype=torch.long)
    mask, logprobs = torch.zeros(6, 15, dtype=torch.bool), torch.zeros(6, 15)
    for row, one in enumerate(rows):
        end = 3 + len(one.ids)
        ids[row, :end] = torch.tensor([5, 9, 11, *one.ids])
        mask[row, 3:end], logprobs[row, 3:end] = True, torch.tensor(one.logprobs)
    batch = batch.replace(input_ids=ids, attention_mask=ids.new_ones(6, 15).bool(), response_mask=mask)
    batch = batch.replace(sampler_logprobs=logprobs, advantages=logprobs * 0)
    with trained.in_float32() as possible:
        found = trained.logprobs(batch)["old_logprobs"]
    assert possible
    assert float((found - logprobs)[mask].abs().max()) < 1e-4


def test_a_resumed_policy_has_the_bits_of_an_uninterrupted_one():
    whole, first, again = policy(), policy(), policy()
    update(whole, 3)
    update(first, 2)
    state = {key: value if key == "step" else dict(value) for key, value in first.state_dict().items()}
    again.load_state_dict(state)
    assert all(torch.equal(value, first.weights()[name]) for name, value in again.weights().items())
    update(again, 1, first=2)
    assert all(torch.equal(value, whole.weights()[name]) for name, value in again.weights().items())
    assert all(torch.equal(value, masters(whole)[name]) for name, value in masters(again).items())


def test_the_weights_of_the_last_check_are_those_that_were_sampled():
    trained, batch = update(policy()), make_batch()
    before = trained.logprobs(batch)["old_logprobs"]
    trained.remember()
    update(trained, 1, first=1)
    assert torch.equal(trained.earlier_logprobs(batch), before)
    assert not torch.equal(trained.logprobs(batch)["old_logprobs"], before)


@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"lora": LoraSettings(r=4)}, {"rounding": "nearest"}])
def test_nothing_is_rounded_where_nothing_is_to_be(changes):
    trained = update(policy(**changes))
    assert not trained.settings.rounds
    parameters = trained.optimizer.parameters
    assert all(parameters[name].data_ptr() == value.data_ptr() for name, value in trained.state_dict()["model"].items())
