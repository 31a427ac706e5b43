"""The critic: its loss, what it learns, its state, its checks; and that it leaves the policy alone."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from retrain.registry import find
from retrain.training.auxiliary.critic import explained, value_loss
from retrain.training.policy import TorchPolicy
from retrain.training.settings import LoraSettings, PolicySettings
from tests.training.small_models import make_batch, make_model, make_objective

pytestmark = pytest.mark.numeric

CASE = json.loads((Path(__file__).parents[2] / "data/catalogue.json").read_text())["informational"]["value_clip"][
    "cases"
]
LORA = LoraSettings(r=4, alpha=8)
READS = find("signal", "values").reads


def make_policy(lora=None, **changes):
    return TorchPolicy(make_model(), PolicySettings(lr=1e-2, lora=lora, **changes))


def make_critic(policy, **params):
    bound = find("signal", "values").bind({"lr": 1e-2, **params})
    return bound.build({"policy": policy, "tokenizer": None})


def values_of(critic, batch):
    return critic(*(batch.column(name) for name in READS))


def learned(critic, batch):
    return critic.after(batch.replace(values=values_of(critic, batch)))


def column(value, kind=torch.float64):
    return torch.tensor(json.loads(json.dumps(value).replace("null", "NaN")), dtype=kind)


@pytest.mark.parametrize("case", CASE, ids=lambda case: case["id"])
def test_the_loss_is_that_of_the_field(case):
    columns = {name: column(value) for name, value in case["columns"].items() if name != "response_mask"}
    mask = torch.tensor(case["columns"]["response_mask"])
    new = columns["values"].requires_grad_()
    found = value_loss(new, columns["old_values"], columns["returns"], mask, clip=case["params"]["eps"])
    torch.testing.assert_close(found, column(case["expected"]), rtol=1e-9, atol=1e-9)
    found.sum().backward()
    torch.testing.assert_close(new.grad, column(case["expected_grad"]), rtol=1e-9, atol=1e-9)


def test_without_a_clip_it_is_half_the_squared_error():
    new, old, target = torch.tensor([[2.0]]), torch.tensor([[0.0]]), torch.tensor([[0.5]])
    assert value_loss(new, old, target, torch.tensor([[True]]), clip=None).item() == 0.5 * 1.5**2


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_it_begins_at_zero_and_learns_what_episodes_return(lora):
    critic, batch = make_critic(make_policy(lora), clip="none"), make_batch(8)
    batch = batch.replace(rewards=torch.full((8,), 0.7), turn_ids=None, turn_rewards=None)
    assert not values_of(critic, batch).any()
    first = learned(critic, batch)
    assert first["critic/target_mean"] == pytest.approx(0.7)
    assert first["critic/loss"] == pytest.approx(0.5 * 0.7**2)
    assert "critic/explained_variance" not in first, "all targets are equal"
    for _ in range(60):
        last = learned(critic, batch)
    assert last["critic/loss"] < 0.02 * first["critic/loss"]
    found = values_of(critic, batch)
    assert not found[~batch.response_mask].any()


@pytest.mark.slow
def test_it_learns_which_rows_are_better():
    critic, batch = make_critic(make_policy(), clip="none"), make_batch(8)
    batch = batch.replace(rewards=(torch.arange(8) % 2).float(), turn_ids=None, turn_rewards=None)
    for _ in range(80):
        last = learned(critic, batch)
    assert last["critic/explained_variance"] > 0.6


def test_the_target_has_a_lambda_and_a_discount_of_its_own():
    batch = make_batch(4)
    critic = make_critic(make_policy(), gamma=0.5, lam=0.0)
    values = torch.arange(batch.input_ids.numel()).view(batch.input_ids.shape).float()
    report = critic.after(batch.replace(values=values))
    expected = []
    for row in range(4):
        mine, rewards = values[row][batch.response_mask[row]], batch.turn_rewards[row][batch.response_mask[row]]
        expected += (rewards + 0.5 * torch.cat([mine[1:], torch.zeros(1)])).tolist()
    assert report["critic/target_mean"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_neither_model_sees_the_updates_of_the_other(lora):
    policy, batch = make_policy(lora), make_batch(8)
    critic = make_critic(policy)
    before = policy.logprobs(batch)["old_logprobs"]
    for _ in range(2):
        learned(critic, batch)
    assert torch.equal(policy.logprobs(batch)["old_logprobs"], before)
    values = values_of(critic, batch)
    policy.update(batch, make_objective())
    assert not torch.equal(policy.logprobs(batch)["old_logprobs"], before)
    assert torch.equal(values_of(critic, batch), values)


@pytest.mark.parametrize("budget", [20, 16384])
def test_micro_batches_change_nothing(budget):
    batch = make_batch(8)
    critic = make_critic(make_policy(micro_batch_tokens=budget))
    other = make_critic(make_policy())
    for _ in range(2):
        assert learned(critic, batch)["critic/loss"] == pytest.approx(learned(other, batch)["critic/loss"], rel=1e-4)
    torch.testing.assert_close(values_of(critic, batch), values_of(other, batch), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_its_state_brings_it_back(lora):
    batch = make_batch(8)
    critic = make_critic(make_policy(lora))
    learned(critic, batch)
    state = {name: value.clone() for name, value in critic.state_dict()["model"]["model"].items()}
    assert any(name.startswith("value_head.") for name in state)
    fresh = make_critic(make_policy(lora))
    fresh.load_state_dict(critic.state_dict())
    assert torch.equal(values_of(fresh, batch), values_of(critic, batch))
    assert learned(fresh, batch) == learned(critic, batch)


def test_rows_of_experts_do_not_train_it():
    batch = make_batch(8)
    experts = batch.replace(is_expert=torch.ones(8, dtype=torch.bool))
    critic = make_critic(make_policy())
    assert learned(critic, experts) == {}
    assert critic.model.step == 0


def test_explained_variance_by_hand():
    mask = torch.tensor([[True, True, True, False]])
    targets, values = torch.tensor([[0.0, 1.0, 2.0, 9.0]]), torch.tensor([[0.5, 1.5, 2.5, -9.0]])
    found = explained(values, targets, mask)
    assert found == {"value_mean": 1.5, "target_mean": 1.0, "explained_variance": 1.0}
    assert explained(values * 0, targets, mask)["explained_variance"] == 0.0


def test_the_head_is_exported_beside_the_model(tmp_path, monkeypatch):
    critic = make_critic(make_policy())
    learned(critic, make_batch(8).replace(rewards=torch.ones(8), turn_ids=None, turn_rewards=None))
    monkeypatch.setattr("retrain.training.model.loading.save_model", lambda folder, *_: folder.mkdir())
    critic.export(tmp_path / "values")
    head = load_file(tmp_path / "values" / "value_head.safetensors")
    assert {name: tuple(value.shape) for name, value in head.items()} == {
        "value_head.weight": (1, 32), "value_head.bias": (1,),
    }  # fmt: skip
    assert head["value_head.weight"].any()
