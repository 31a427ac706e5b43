"""Runs with a critic: the policy waits for it, both are resumed, and what cannot work is said."""

import pytest
import torch
from safetensors.torch import load_file

from retrain.config.load import load
from retrain.run.session import Resume
from tests.small_runs import digest, rows

PPO = ('algorithm.transform_mode=["gae", "whiten"]', "critic.lr=1e-3", "warmup.warmup_steps=2")
QUIET = ("eval.problems=0", "checkpoint.every=0", "logging.rollouts_every=0")


@pytest.mark.slow
@pytest.mark.parametrize("lora", [(), ("model.lora={r = 2}", "model.dtype=float32")], ids=["full", "lora"])
def test_a_resumed_run_equals_an_uninterrupted_one(train, stopped, lora):
    options = (*PPO, "critic.epochs=2", *lora)
    whole = train(*options, name="whole")
    stopped(*options, name="cut")
    cut = train(*options, name="cut", resume=Resume("auto"))
    assert digest(cut) == digest(whole)
    assert rows(cut / "metrics.jsonl") == rows(whole / "metrics.jsonl")
    heads = [load_file(run / "model" / "values" / "value_head.safetensors") for run in (cut, whole)]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[1])


@pytest.mark.slow
def test_the_policy_waits_for_the_critic(train):
    run = train(*PPO, *QUIET, "critic.warmup_steps=2", "training.max_steps=3")
    steps = rows(run / "metrics.jsonl")
    assert [step["update/skipped"] for step in steps] == [1.0, 1.0, 0.0]
    assert all("critic/loss" in step for step in steps)


@pytest.mark.slow
def test_one_completion_per_prompt_is_enough(train):
    run = train(*PPO, *QUIET, "training.group_size=1", "training.batch_size=8", "training.max_steps=2")
    assert all(step["update/skipped"] == 0 for step in rows(run / "metrics.jsonl"))


def test_it_is_in_order(toml):
    assert load(toml, [*PPO, "training.group_size=1", "gae.gamma=0.9", "critic.gamma=0.9"]).warnings == ()
