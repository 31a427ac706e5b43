"""The process reward model: its scores, losses and gradients, when it learns, its state, and adapters."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain import registry
from retrain.errors import StorageError
from retrain.registry import find
from retrain.storage import checkpoint
from retrain.training import prm as prm_module
from retrain.training.memory import ModelShape, estimate_memory
from retrain.training.policy import TorchPolicy
from retrain.training.settings import LoraSettings, PolicySettings
from tests.reference import prime as printed
from tests.training.model.test_forward import own_logprobs
from tests.training.small_models import make_batch, make_model, make_objective

pytestmark = pytest.mark.numeric

CASE = json.loads((Path(__file__).parents[1] / "data/prime.json").read_text())["prime"][0]
READS = find("signal", "process_rewards").reads


def make_policy(lora=None, **changes):
    adapters = LoraSettings(**{"r": 4, "alpha": 8, **lora}) if lora is not None else None
    return TorchPolicy(make_model(), PolicySettings(**{"lr": 1e-2, "lora": adapters, **changes}))


def build(policy, **params):
    bound = find("signal", "process_rewards").bind({"beta": 0.5, "lr": 1e-2, **params})
    return bound.build({"policy": policy, "tokenizer": None})


def judged(rows=8, seed=0, correct=None):
    """Groups of four, answers right and wrong in every one."""
    batch = make_batch(rows, seed)
    right = torch.arange(rows) % 4 % 3 == 0 if correct is None else torch.tensor(correct).bool()
    return batch.replace(correct=right)


def score(prm, batch):
    return prm(*(batch.column(name) for name in READS))


def scored(prm, batch):
    """The batch as credit returns it."""
    return batch.replace(process_rewards=score(prm, batch))


def learn(prm, batch):
    return prm.after(scored(prm, batch))


def weights(model):
    return {name: value.clone() for name, value in model.weights().items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def phi_logprobs(model, batch):
    """[N, T] with gradient, by the model's own padded forward."""
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits
    lp = torch.log_softmax(logits[:, :-1], -1).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    return torch.cat([lp.new_zeros(len(lp), 1), lp], 1).where(batch.response_mask, 0.0)


def caught_gradients(prm, batch):
    """Metrics of one update, and the gradients it applies after clipping, caught in place of the optimizer's step."""
    caught = {}

    def catch(step):
        caught.update({name: p.grad.clone() for name, p in prm.model.optimizer.parameters.items()})
        return 0.0

    prm.model.optimizer.step = catch
    return learn(prm, batch), caught


def moved(prm, batch, steps=2):
    """After some steps phi is no longer its reference."""
    for _ in range(steps):
        learn(prm, batch)
    return prm


def test_rewards_are_scaled_log_ratios_and_zero_at_the_start():
    policy, batch = make_policy(), judged()
    prm = build(policy)
    assert not score(prm, batch).any()
    moved(prm, batch)
    expected = 0.5 * (own_logprobs(prm.model.model, batch) - own_logprobs(make_model(), batch))
    torch.testing.assert_close(score(prm, batch), expected, rtol=1e-4, atol=1e-5)
    assert score(prm, batch)[~batch.response_mask].tolist() == [0.0] * int((~batch.response_mask).sum())


def test_published_loss_and_gradient():
    rows, beta = CASE["input"], CASE["input"]["beta"]
    phi = torch.tensor(rows["prm"], dtype=torch.float64, requires_grad=True)
    mask = torch.arange(4) < torch.tensor(rows["lens"])[:, None]
    rewards = beta * (phi.detach() - torch.tensor(rows["ref"], dtype=torch.float64))
    correct, group = torch.tensor(rows["acc"]).bool(), torch.zeros(4, dtype=torch.int64)
    scores = prm_module.sequence_scores(rewards, mask)
    assert scores.tolist() == pytest.approx(CASE["expected"]["r_phi_seq"], abs=1e-9)
    weight = find("reduction", "sequence_mean").bind()(mask.double())

    def loss(opposite):
        values = prm_module.outcome_loss(phi, phi.detach(), rewards, correct, opposite, mask, beta=beta)
        return (values * weight).sum()

    cross_entropy = loss(scores.new_zeros(4))
    assert cross_entropy.item() == pytest.approx(CASE["expected"]["ce_loss"], abs=1e-9)
    (gradient,) = torch.autograd.grad(cross_entropy, phi)
    expected = torch.tensor(CASE["expected"]["ce_grad_per_token"]).double()[:, None] * mask
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-9)
    opposite, _ = prm_module.opposite_mean(scores, correct, group)
    assert loss(opposite).item() == pytest.approx(CASE["expected"]["dpo_loss"], abs=1e-6)
    found = prm_module.pair_accuracy(scores, correct, group)
    assert found == {"prm/accuracy": CASE["expected"]["pair_accuracy"]}


def literal_loss(kind, rewards, batch):
    """The loss on process rewards with gradient, a row at a time."""
    scores = [rewards[n][batch.response_mask[n]].sum() for n in range(len(rewards))]
    losses = []
    for n, value in enumerate(scores):
        same = [m for m in range(len(scores)) if batch.group_ids[m] == batch.group_ids[n]]
        opposite = [scores[m].detach() for m in same if batch.correct[m] != batch.correct[n]]
        compared = sum(opposite) / len(opposite) if kind == "dpo" and opposite else 0.0
        if kind == "ce" or opposite:
            losses.append(-torch.log(torch.sigmoid((value - compared) * (1 if batch.correct[n] else -1))))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("kind", ["ce", "dpo"])
@pytest.mark.parametrize("correct", [None, [1, 1, 1, 1, 0, 1, 0, 0]], ids=["mixed", "one group all correct"])
def test_gradient_is_that_of_the_literal_loss(kind, correct):
    batch = judged(correct=correct)
    prm = moved(build(make_policy(), loss=kind, max_grad_norm=1e9), batch)
    model = make_model()
    model.load_state_dict(prm.model.weights())
    reference = phi_logprobs(make_model(), batch).detach()
    loss = literal_loss(kind, 0.5 * (phi_logprobs(model, batch) - reference), batch)
    loss.backward()
    metrics, found = caught_gradients(prm, batch)
    assert metrics["prm/loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-5)


def test_gradients_are_clipped_to_the_norm_of_their_own():
    batch = judged()
    metrics, found = caught_gradients(build(make_policy(), max_grad_norm=1e-3), batch)
    assert metrics["prm/grad_norm"] > 0.1
    assert torch.stack([value.norm() for value in found.values()]).norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_micro_batches_and_row_order_change_nothing():
    batch = judged()
    one, whole = caught_gradients(moved(build(make_policy(), loss="dpo"), batch), batch)
    order = torch.tensor([5, 0, 3, 7, 1, 2, 6, 4])
    small = moved(build(make_policy(micro_batch_tokens=1), loss="dpo"), batch)
    other, parts = caught_gradients(small, batch.rows(order))
    assert other == pytest.approx(one, rel=1e-3, abs=1e-6)
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-3, atol=1e-5)


SCORES = st.lists(
    st.tuples(st.integers(-3, 3).map(lambda n: n / 2), st.booleans(), st.integers(0, 2)), min_size=1, max_size=9
)


@settings(deadline=None, max_examples=80)
@given(SCORES)
def test_losses_and_accuracy_equal_their_definitions(rows):
    scores, correct, groups = (list(column) for column in zip(*rows, strict=True))
    tensors = torch.tensor(scores).double(), torch.tensor(correct), torch.tensor(groups)
    cross_entropy = prm_module.row_loss(tensors[0], tensors[1], torch.zeros(len(rows)).double()).mean()
    assert cross_entropy.item() == pytest.approx(printed.cross_entropy(scores, correct), abs=1e-9)
    opposite, known = prm_module.opposite_mean(*tensors)
    dpo = prm_module.row_loss(tensors[0], tensors[1], opposite)[known]
    expected = printed.dpo(scores, correct, groups)
    assert (dpo.mean().item() if len(dpo) else None) == (expected and pytest.approx(expected, abs=1e-9))
    pairs = [
        (a > b) + 0.5 * (a == b)
        for (a, right, one) in rows
        for (b, other, two) in rows
        if right and not other and one == two
    ]
    found = prm_module.pair_accuracy(*tensors)
    assert found == ({"prm/accuracy": pytest.approx(sum(pairs) / len(pairs))} if pairs else {})


def test_it_learns_to_tell_right_answers_from_wrong_ones():
    prm, batch = build(make_policy()), judged()
    reports = [learn(prm, batch) for _ in range(12)]
    assert reports[0]["prm/accuracy"] == 0.5
    assert reports[0]["prm/loss"] == pytest.approx(0.6931, abs=1e-4)
    assert reports[0]["prm/reward_mean"] == 0.0
    assert reports[-1]["prm/accuracy"] == 1.0
    assert reports[-1]["prm/loss"] < 0.3


def test_when_it_learns():
    batch, policies = judged(), [make_policy() for _ in range(3)]
    after, before, none = (
        build(policy, update=update) for policy, update in zip(policies, ["after", "before", "none"], strict=True)
    )
    start = weights(after.model)
    assert after.before(batch) == none.before(batch) == {}
    assert equal(weights(after.model), start)
    early = before.before(batch)
    assert not equal(weights(before.model), start)
    assert score(before, batch).any()
    assert not score(after, batch).any()
    late = learn(after, batch)
    assert early == late
    assert equal(weights(after.model), weights(before.model))
    assert before.after(scored(before, batch)) == {}
    idle = learn(none, batch)
    assert idle == {name: value for name, value in late.items() if name not in ("prm/grad_norm", "prm/nonfinite")}
    assert equal(weights(none.model), start)


def test_experts_do_not_train_it():
    batch = judged()
    mixed = make_batch(12).replace(is_expert=torch.arange(12) >= 8, correct=torch.ones(12).bool())
    with_experts, without = build(make_policy()), build(make_policy())
    policy_rows = mixed.replace(correct=torch.cat([batch.correct, mixed.correct[8:]]))
    alone = policy_rows.rows(torch.arange(8))
    assert learn(with_experts, policy_rows) == pytest.approx(learn(without, alone), rel=1e-4, abs=1e-6)
    for name, value in weights(without.model).items():
        torch.testing.assert_close(with_experts.model.weights()[name], value, rtol=1e-4, atol=1e-4)
    assert learn(with_experts, policy_rows.rows(torch.arange(8, 12))) == {}


def test_without_an_opposite_there_is_nothing_to_compare():
    prm, batch = build(make_policy(), loss="dpo"), judged(correct=[1, 1, 1, 1, 0, 0, 0, 0])
    start = weights(prm.model)
    assert learn(prm, batch) == {"prm/reward_mean": 0.0}
    assert equal(weights(prm.model), start)


def test_a_loss_that_is_not_finite_changes_nothing():
    prm, batch = build(make_policy()), judged()
    start = weights(prm.model)
    report = prm.after(batch.replace(process_rewards=torch.full(batch.input_ids.shape, torch.nan)))
    assert report["prm/nonfinite"] == 1.0
    assert equal(weights(prm.model), start)


def test_reference_frozen_or_the_policy_of_the_moment():
    batch = judged()
    policies = [make_policy(), make_policy()]
    frozen, following = build(policies[0]), build(policies[1], reference="policy")
    for policy in policies:
        policy.update(batch, make_objective())
    assert not score(frozen, batch).any()
    expected = 0.5 * (own_logprobs(make_model(), batch) - own_logprobs(policies[1].model, batch))
    torch.testing.assert_close(score(following, batch), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {}], ids=["full", "lora"])
def test_resume_is_bit_exact_through_a_checkpoint(lora, tmp_path):
    batches = [judged(seed=seed) for seed in range(4)]
    straight, first, second = (build(make_policy(lora)) for _ in range(3))
    for batch in batches:
        learn(straight, batch)
    for batch in batches[:2]:
        learn(first, batch)
    saved = checkpoint.save(tmp_path, 2, {"prm": first.state_dict()}, 1)
    second.load_state_dict(checkpoint.load(saved)["prm"])
    reports = [[learn(prm, batch) for batch in batches[2:]] for prm in (first, second)]
    assert reports[0] == reports[1]
    assert equal(weights(second.model), weights(straight.model))


def test_resume_with_another_initial_model_is_refused():
    one = build(make_policy())
    other = build(TorchPolicy(make_model(seed=1), PolicySettings()))
    with pytest.raises(StorageError, match="initial model changed"):
        other.load_state_dict(one.state_dict())


# With LoRA: two adapters, one base.


def test_policy_is_bit_identical_with_and_without_a_process_reward_model_beside_it():
    batches = [judged(seed=seed) for seed in range(3)]
    alone, beside = make_policy({"dropout": 0.1}), make_policy({"dropout": 0.1})
    prm = build(beside)
    found = []
    for policy in (alone, beside):
        scores = []
        for batch in batches:
            torch.manual_seed(7)
            scores.append(policy.logprobs(batch)["old_logprobs"])
            if policy is beside:
                with torch.random.fork_rng(devices=[]):
                    rewards = score(prm, batch)
            policy.update(batch, make_objective())
            if policy is beside:
                with torch.random.fork_rng(devices=[]):
                    prm.after(batch.replace(process_rewards=rewards))
        found.append(scores)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    assert equal(weights(alone), weights(beside))
    assert equal(alone.reference_weights(), beside.reference_weights())
    assert alone.state_dict()["model"].keys() == beside.state_dict()["model"].keys()
    assert prm.model.step == 3
    assert not equal(weights(prm.model), prm.model.reference_weights())
    assert not any(module.training for module in beside.model.modules())


def test_scores_of_the_adapter_are_those_of_its_merged_weights():
    policy, batch = make_policy({}), judged()
    prm = build(policy)
    for _ in range(3):
        rewards = score(prm, batch)
        policy.update(batch, make_objective())
        prm.after(batch.replace(process_rewards=rewards))
    merged = make_model()
    merged.load_state_dict(prm.model.weights(), strict=True)
    expected = 0.5 * (own_logprobs(merged, batch) - own_logprobs(make_model(), batch))
    torch.testing.assert_close(score(prm, batch), expected, rtol=1e-3, atol=1e-4)
    assert score(prm, batch).abs().max() > 0.01


def test_saved_adapter_of_the_policy_is_its_own_alone(tmp_path):
    import peft

    policy, batch = make_policy({}), judged()
    prm = moved(build(policy), batch)
    policy.update(batch, make_objective())
    policy.save_adapter(tmp_path)
    assert not (tmp_path / "prm").exists()
    loaded = peft.PeftModel.from_pretrained(make_model(), str(tmp_path)).base_model.model
    expected = policy.logprobs(batch)["old_logprobs"]
    torch.testing.assert_close(own_logprobs(loaded, batch), expected, rtol=1e-4, atol=1e-4)
    assert prm.model.step == 2


@pytest.mark.parametrize("lora", [None, {}], ids=["full", "lora"])
def test_the_memory_that_explain_counts_is_what_it_holds(lora):
    policy = make_policy(lora)
    prm, shape = build(policy), ModelShape.of(policy.model.config.to_dict())
    traits = registry.signal.traits_of(find("signal", "process_rewards"))
    found = estimate_memory(shape, policy.settings, rows=1, tokens=1, signal_models=traits.models)["other_models"]
    trained = sum(p.numel() for p in prm.model.optimizer.parameters.values() if p.ndim == 2)
    frozen = 0 if lora is not None else shape.parameters
    assert found == 16 * trained + 4 * frozen
    assert estimate_memory(shape, policy.settings, rows=1, tokens=1)["other_models"] == 0
