"""Unusual mixtures of advantage, transforms, losses, reduction, uncertainty, optimizer and precision train."""

from math import isfinite

import pytest

from tests.small_runs import rows

ALWAYS = (
    "training.max_steps=2",
    "training.max_tokens=16",
    "eval.problems=0",
    "checkpoint.every=0",
    "logging.rollouts_every=0",
    "rollout.parity_every=1",
    'planning.strategic_grams=["so", "add", "carry"]',
    "sepa.delay_steps=0",
    "sepa.steps=1",
    "sepa.correct_rate_gate=0.0",
    'logging.observe=["planning_mask", "sepa_lambda"]',
)
NAMES = ("advantage_mode", "transform_mode", "uncertainty_kind", "reduction")
COMBINATIONS = [
    # advantage, transforms, uncertainty, reduction, {loss: weight}, everything else
    ("grpo", "none", "surprisal", "token_mean", {"ppo_clip": 1}, ()),
    ("grpo_std", "gtpo", "shannon_entropy", "sequence_mean", {"ppo_clip": 1}, ("training.temperature=0.7",)),
    ("maxrl", ["sepa", "gtpo"], "varentropy", "dr_grpo", {"reinforce": 1, "entropy": 0.01}, ('optimizer.name="muon"',)),
    ("rloo", ["surprisal_mask", "gtpo"], "surprisal", "dr_grpo", {"ppo_clip": 1}, ("surprisal_mask.rho=0.4",)),
    ("reinforce_pp", ["whiten"], "surprisal", "token_mean", {"cispo": 1, "kl": 0.1}, ("training.epochs=2",)),
    ("grpo_lp", ["hicra", "gtpo"], "predictive_variance", "token_mean", {"gspo": 1}, ('model.dtype="bfloat16"',)),
    ("dca", "gtpo_hicra", "shannon_entropy", "sequence_mean", {"cispo": 1}, ("training.minibatches=3",)),
    ("dca_rloo", ["tis", "gtpo"], "surprisal", "token_mean", {"ppo_clip": 1}, ("rollout.engine=transformers",)),
    ("dca_grpo", ["mis", "whiten"], "varentropy", "dr_grpo", {"gspo": 1, "kl": 0.1},
     ("rollout.engine=transformers", 'model.dtype="bfloat16"', "training.epochs=2", "training.minibatches=2")),
    ("grpo", "gtpo_sepa", "predictive_variance", "sequence_mean", {"reinforce": 1, "kl": 0.1, "entropy": 0.01},
     ("rollout.mask_truncated=true", "optimizer.schedule=cosine", "optimizer.warmup_steps=1")),
    ("rloo", ["sepa", "gtpo", "hicra", "whiten"], "shannon_entropy", "token_mean", {"ppo_clip": 1},
     ("model.gradient_checkpointing=true", "rollout.resample=uninformative", "training.micro_batch_tokens=32")),
    ("maxrl", "gtpo_hicra", "surprisal", "token_mean", {"ppo_clip": 1, "entropy": 0.01},
     ("optimizer.schedule=linear", "optimizer.weight_decay=0.1", "rollout.mask_truncated=true",
      "rollout.resample=uninformative", "rollout.engine=transformers", 'model.dtype="bfloat16"')),
]  # fmt: skip


def overrides(combination):
    *named, losses, others = combination
    chosen = [f"algorithm.{key}={value!r}".replace("'", '"') for key, value in zip(NAMES, named, strict=True)]
    terms = ", ".join(f'{{name = "{name}", weight = {float(weight)}}}' for name, weight in losses.items())
    # so lax that an untrained model is right now and then
    rewards = 'rewards=[{name = "number", params = {tolerance = 1.0}}]'
    return [*ALWAYS, *chosen, f"loss=[{terms}]", rewards, *others]


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: f"{c[0]}-{c[1]}-{'+'.join(c[4])}")
def test_a_combination_trains_with_finite_metrics(train, combination):
    steps = rows(train(*overrides(combination)) / "metrics.jsonl")
    assert len(steps) == 2
    assert all(isfinite(value) for step in steps for value in step.values())
    assert not any(step["update/nonfinite"] for step in steps if "update/nonfinite" in step)
    assert any(step.get("grad/norm", 0) > 0 for step in steps)
    assert [step["sepa/lambda"] for step in steps if "sepa/lambda" in step] == [0, 1]
    if "entropy" in combination[4]:
        assert all(step["loss/entropy"] < 0 for step in steps if "loss/entropy" in step)


@pytest.mark.slow
@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if "ppo_clip" in c[4] and "whiten" not in c[1]])
def test_on_policy_the_surrogate_is_minus_the_mean_advantage(train, combination):
    """With one update the ratio is 1: nothing is clipped, and the loss is the advantages under the reduction."""
    step = rows(train(*overrides(combination)) / "metrics.jsonl")[0]
    assert step["policy/clip_fraction"] == step["policy/approx_kl"] == 0
    mean = step["advantage/mean"]
    tokens = step["tokens/sampled"]
    near = 1e-3 if "rollout.engine=transformers" in combination[5] else 1e-5  # tis weighs advantages in the update
    if combination[3] == "token_mean" and step["groups/informative"] == 1:
        assert step["loss/ppo_clip"] == pytest.approx(-mean, abs=near)
    if combination[3] == "dr_grpo":
        rows_and_budget = step["rollout/completions"] * 16
        assert step["loss/ppo_clip"] == pytest.approx(-mean * tokens / rows_and_budget, abs=near)
