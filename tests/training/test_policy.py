"""The update: gradients against a literal objective, invariances, guards, schedule, exact resume."""

import hashlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.algorithms.graph.objective import Objective
from retrain.errors import UserCodeError
from retrain.registry import Component, find
from retrain.training.policy import TorchPolicy
from retrain.training.settings import PolicySettings
from tests.training.model.test_forward import own_logprobs
from tests.training.small_models import make_batch, make_model, make_objective

pytestmark = pytest.mark.numeric


def policy(kind="qwen3", **changes):
    return TorchPolicy(make_model(kind), PolicySettings(**{"lr": 1e-2, **changes}))


def fingerprint(weights):
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(name.encode() + value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def gradients(batch, objective, **changes):
    """Gradients that one update applies: captured in place of the optimizer's step, before clipping matters."""
    trained = policy(max_grad_norm=1e9, **changes)
    caught = {}

    def catch(step):
        caught.update({name: p.grad.clone() for name, p in trained.optimizer.parameters.items()})
        return 0.0

    trained.optimizer.step = catch
    return trained.update(batch, objective), caught


def test_gradient_is_that_of_a_literal_policy_gradient():
    batch, model = make_batch(), make_model()
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits
    lp = torch.log_softmax(logits[:, :-1], -1).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    loss = -(lp * batch.advantages[:, 1:] * batch.response_mask[:, 1:]).sum() / batch.response_mask.sum()
    loss.backward()
    metrics, found = gradients(batch, make_objective("reinforce"))
    assert metrics["loss/total"] == pytest.approx(loss.item(), rel=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5)


@given(seed=st.integers(0, 30), budget=st.integers(1, 100), reduction=st.sampled_from(["token_mean", "sequence_mean"]))
@settings(deadline=None, max_examples=12)
def test_update_does_not_depend_on_micro_batches_or_row_order(seed, budget, reduction):
    batch, objective = make_batch(seed=seed, dead=2), make_objective("ppo_clip", "entropy", reduction=reduction)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    whole, one = gradients(batch, objective)
    parts, other = gradients(batch.rows(order), objective, micro_batch_tokens=budget)
    for name in ("loss/total", "loss/ppo_clip", "policy/entropy", "mismatch/kl", "grad/norm", "tokens/forwarded"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-5), name
    scale = max(float(g.abs().max()) for g in one.values())
    for name, gradient in one.items():
        torch.testing.assert_close(other[name], gradient, rtol=1e-5, atol=1e-5 * max(1.0, scale))


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("name", ["tis", "mis"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("steps", [{}, {"epochs": 2, "minibatches": 2}], ids=["one step", "several"])
def test_a_correction_in_the_update_is_the_transform_on_a_scored_batch(name, level, steps):
    batch = make_batch(dead=2)
    own = policy().logprobs(batch)["old_logprobs"]
    drift = 0.2 * torch.randn(own.shape, generator=torch.Generator().manual_seed(0))
    batch = batch.replace(sampler_logprobs=own + drift.where(batch.response_mask, 0.0))
    correction = find("transform", name).bind({"level": level})
    scored = batch.replace(**policy().logprobs(batch))
    before = batch.replace(advantages=correction(*(scored.column(column) for column in correction.reads)))
    assert not torch.allclose(before.advantages, batch.advantages, rtol=0.02)
    terms = make_objective("ppo_clip")
    expected = policy(**steps).update(before, terms)
    within = Objective(terms.terms, terms.reduction, [correction])
    found = policy(micro_batch_tokens=20, **steps).update(batch, within)
    for metric in ("loss/total", "grad/norm"):  # means over forwarded rows may differ: those that mis drops are too
        assert found[metric] == pytest.approx(expected[metric], rel=1e-4, abs=1e-6), metric


def test_rows_without_advantage_are_not_forwarded_but_counted():
    batch = make_batch(dead=4)
    metrics, found = gradients(batch, make_objective("reinforce"))
    assert metrics["tokens/forwarded"] == batch.attention_mask[:4].sum()
    alive, expected = gradients(batch.rows(torch.arange(4)), make_objective("reinforce"))
    share = float(batch.response_mask[:4].sum() / batch.response_mask.sum())
    assert metrics["loss/total"] == pytest.approx(alive["loss/total"] * share, rel=1e-4)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient * share, rtol=1e-4, atol=1e-5)


def test_nothing_to_learn_changes_nothing():
    trained = policy()
    trained.update(make_batch(), make_objective())  # momentum exists that a step would apply
    before = fingerprint(trained.weights())
    metrics = trained.update(make_batch(dead=8), make_objective())
    assert metrics["update/skipped"] == 1
    assert (fingerprint(trained.weights()), trained.step) == (before, 1)


def test_ratio_is_one_before_the_first_step_and_not_after():
    seen = []

    class Watch:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def step(self, batch):
            step = self.inner.step(batch)

            def loss(columns, weights):
                seen.append(float((columns["logprobs"] - columns["old_logprobs"]).abs().max().detach()))
                return step.of(columns, weights)

            return step._replace(of=loss)

    batch = make_batch(dead=1)
    policy(epochs=2, micro_batch_tokens=20, minibatches=1).update(batch, Watch(make_objective()))
    half = len(seen) // 2
    assert half > 1
    assert seen[:half] == [0.0] * half
    assert min(seen[half:]) > 0


def test_minibatches_and_epochs_are_optimizer_steps():
    trained = policy(epochs=2, minibatches=4)
    metrics = trained.update(make_batch(), make_objective())
    assert trained.step == 8
    assert metrics["loss/total"] != 0


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_non_finite_loss_leaves_weights_and_optimizer_alone(poison):
    trained, batch = policy(), make_batch()
    trained.update(batch, make_objective("reinforce"))
    state = trained.optimizer.state_dict()
    before = fingerprint(trained.weights()), {name: s["exp_avg"].clone() for name, s in state.items()}
    broken = batch.replace(advantages=batch.advantages.masked_fill(batch.response_mask, poison))
    metrics = trained.update(broken, make_objective("reinforce"))
    assert (metrics["update/nonfinite"], trained.step) == (1, 1)
    assert fingerprint(trained.weights()) == before[0]
    assert all(torch.equal(before[1][name], s["exp_avg"]) for name, s in trained.optimizer.state_dict().items())
    assert trained.update(batch, make_objective("reinforce"))["update/nonfinite"] == 0


def test_mismatch_and_entropy_are_of_the_policy_before_the_step():
    batch, trained = make_batch(), policy()
    exact = own_logprobs(trained.model, batch)
    scored = trained.logprobs(batch, ("entropy",))["entropy"]
    metrics = trained.update(batch.replace(sampler_logprobs=exact), make_objective())
    assert metrics["mismatch/logp_diff_max"] < 1e-4
    assert metrics["mismatch/ess"] == pytest.approx(1)
    assert metrics["policy/entropy"] == pytest.approx(float(scored.sum() / batch.response_mask.sum()), rel=1e-4)


def test_squared_probabilities_are_those_of_the_tempered_distribution():
    batch, trained = make_batch(), policy()
    found = trained.logprobs(batch, ("sum_pi_squared",))["sum_pi_squared"]
    with torch.no_grad():
        logits = trained.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits
    p = torch.softmax(logits.float() / trained.settings.temperature, -1)[:, :-1]
    expected = torch.nn.functional.pad(p.square().sum(-1), (1, 0)).where(batch.response_mask, 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_mismatch_is_not_taken_from_steps_after_the_first():
    batch, trained = make_batch(), policy(minibatches=2)
    odd = torch.arange(len(batch.advantages)) % 2 == 1
    metrics = trained.update(batch.replace(advantages=batch.advantages * odd[:, None]), make_objective())
    assert metrics["update/skipped"] == 0.5
    assert not any(name.startswith("mismatch/") for name in metrics)


def test_an_optimizer_that_changes_no_weight_is_an_error():
    """Whatever replaces its step; without a gradient there is nothing to change."""
    batch, objective = make_batch(), make_objective("reinforce")
    trained = policy()
    trained.optimizer.step = lambda step: 1e-2
    with pytest.raises(UserCodeError, match="changed no weight"):
        trained.update(batch, objective)
    still = trained.update(batch.replace(advantages=torch.zeros_like(batch.advantages)), objective)
    assert still.get("update/changed", 0.0) == 0.0


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "muon"])
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_resume_is_bit_exact(optimizer, kind):
    changes = {"optimizer": optimizer, "warmup_steps": 2, "schedule": "cosine", "total_steps": 8, "weight_decay": 0.1}
    batches = [make_batch(seed=seed) for seed in range(6)]
    straight, first, second = (policy(kind, **changes) for _ in range(3))
    for batch in batches:
        straight.update(batch, make_objective())
    for batch in batches[:3]:
        first.update(batch, make_objective())
    second.load_state_dict(first.state_dict())
    first.update(batches[5], make_objective())  # what was loaded is a copy
    for batch in batches[3:]:
        second.update(batch, make_objective())
    assert fingerprint(second.weights()) == fingerprint(straight.weights())
    assert second.step == 6


@pytest.mark.parametrize(("dtype", "steps", "left"), [("float32", 30, 0.3), ("bfloat16", 20, 0.5)])
def test_supervised_rows_are_learned_and_weights_stay_float32(dtype, steps, left):
    batch = make_batch()
    expert = batch.replace(is_expert=torch.ones(8, dtype=torch.bool), advantages=torch.zeros_like(batch.advantages))
    trained = policy(dtype=dtype, lr=3e-3)
    losses = [trained.update(expert, make_objective("sft"))["loss/sft"] for _ in range(steps)]
    assert losses[-1] < left * losses[0]
    assert {p.dtype for p in trained.model.parameters()} == {torch.float32}


def test_checkpointed_layers_give_the_same_gradients_in_eval_mode():
    batch, objective = make_batch(), make_objective()
    _, plain = gradients(batch, objective)
    _, again = gradients(batch, objective, gradient_checkpointing=True)
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-6)
    dropping = policy("gpt2", gradient_checkpointing=True)
    assert not any(m.training for m in dropping.model.modules() if isinstance(m, torch.nn.Dropout))
    assert dropping.update(batch, objective)["update/nonfinite"] == 0


def test_gradients_are_clipped_to_the_norm():
    trained = policy(max_grad_norm=1e-3)
    norms = []
    take = trained.optimizer.step

    def watch(step):
        norms.append(float(torch.stack([p.grad.norm() for p in trained.optimizer.parameters.values()]).norm()))
        return take(step)

    trained.optimizer.step = watch
    assert trained.update(make_batch(), make_objective())["grad/norm"] > 1e-3
    assert norms == [pytest.approx(1e-3, rel=1e-2)]


def weight_of(ratio, mask):
    """One over the effective sample size of the tokens in the mask, the same for every row."""
    kept = ratio[mask]
    return float(kept.square().sum() * mask.sum() / kept.sum() ** 2)


def step_cap(logprobs, sampler_logprobs, response_mask):
    cap = weight_of((logprobs - sampler_logprobs).where(response_mask, 0.0).exp(), response_mask)
    return cap, {"ess/cap": cap}


def capped(logprobs, sampler_logprobs, advantages, response_mask, step_cap):
    ratio = (logprobs - sampler_logprobs).where(response_mask, 0.0).exp()
    return -ratio.clamp(max=step_cap) * advantages


@pytest.mark.parametrize("steps", [{}, {"minibatches": 2, "epochs": 2}], ids=["one step", "several"])
def test_a_signal_that_reads_logprobs_is_that_of_the_whole_step(steps):
    cap = Component("signal", "step_cap", step_cap, "step_cap", "columns", None, "dotted path").bind()
    term = Component("loss", "capped", capped, "capped", "columns", None, "dotted path").bind({"weight": 1.0})
    objective = Objective([term], find("reduction", "token_mean").bind(), signal={"step_cap": cap}.get)
    assert "step_cap" not in objective.signals
    batch = make_batch(dead=2)
    own = policy().logprobs(batch)["old_logprobs"]
    drift = 0.4 * torch.randn(own.shape, generator=torch.Generator().manual_seed(0))
    batch = batch.replace(sampler_logprobs=(own + drift).where(batch.response_mask, 0.0))
    whole = policy(micro_batch_tokens=10_000, **steps).update(batch, objective)
    parts = policy(micro_batch_tokens=20, **steps).update(batch, objective)
    for name in ("ess/cap", "loss/total", "grad/norm"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-4), name
    if not steps:
        ratio = (own - batch.sampler_logprobs).where(batch.response_mask, 0.0).exp()
        assert whole["ess/cap"] == pytest.approx(weight_of(ratio, batch.response_mask), rel=1e-4)
        assert whole["ess/cap"] > 1.02, "a weight that every micro-batch would compute alike shows nothing"
