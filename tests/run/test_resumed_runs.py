"""A run that was interrupted and resumed has the metrics, evaluations and weights of one that was not, bit for bit."""

import pytest

from docs.measure import ROOT
from tests.small_runs import rows

PRIME = (
    'algorithm.transform_mode=["process_rloo", "whiten"]',
    "prime.lr=1e-3",
    # so lax that an untrained model is right now and then
    'rewards=[{name = "number", params = {tolerance = 1.0}}]',
)
PPO = ('algorithm.transform_mode=["gae", "whiten"]', "critic.lr=1e-3", "warmup.warmup_steps=2", "critic.epochs=2")
SDPO = "algorithm.algorithm_mode=sdpo"
TEACHER = "teacher={{source = 'hindsight', threshold = -1.0, weights = '{}'}}"
LORA = "model.lora={r = 2}"
BAND = (
    *("training.curriculum=band", "addition.min_digits=1", "addition.max_digits=1", "training.max_steps=6"),
    *("band.candidates=3", "reward_pool.workers=1", "logging.rollouts_every=1"),
)
AHEAD = ("rollout.overlap=1", "reward_pool.workers=1")
EXPERT = ROOT / "configs" / "data" / "addition_expert.jsonl"
SEPA = ("algorithm.transform_mode=gtpo_sepa", "sepa.delay_steps=0", "sepa.steps=3", "sepa.correct_rate_gate=0.0")
RUNS = {
    "sepa": (SEPA, "sepa/lambda", 2),
    "prime": (PRIME, "prm/grad_norm", 2),
    "prime, lora before dpo": (
        (*PRIME, LORA, "training.lr=1e-2", "prime.update=before", "prime.loss=dpo"),
        *("prm/grad_norm", 2),
    ),
    "prime, reference policy": ((*PRIME, "prime.reference=policy", "training.epochs=2"), "prm/grad_norm", 2),
    "prime, every epoch": (
        (*PRIME, "prime.every=epoch", "training.epochs=2", "training.minibatches=2"),
        *("prm/grad_norm", 2),
    ),
    "critic": (PPO, "critic/loss", 4),
    "critic, lora": ((*PPO, LORA, "model.dtype=float32"), "critic/loss", 4),
    **{
        f"hindsight, {weights} weights{', lora' * bool(lora)}": (
            (SDPO, TEACHER.format(weights), *lora),
            *("teacher/hints", 4),
        )
        for weights in ("current", "ema", "initial")
        for lora in ((), (LORA,))
    },
    "curriculum": (BAND, "curriculum/known", 1),
    "curriculum, ahead": ((*BAND, "rollout.overlap=1"), "curriculum/known", 1),
    "oracle": (("algorithm.algorithm_mode=oracle", "oracle.continuations=2"), "grad/norm", 4),
    "vine": (("algorithm.algorithm_mode=vine", "vine.continuations=2"), "grad/norm", 4),
    "remax, ahead": (("algorithm.advantage_mode=remax", *AHEAD), "grad/norm", 1),
    "sepa, ahead": ((*SEPA, *AHEAD), "sepa/lambda", 2),
    "resampling, ahead": (
        ("algorithm.filter=accuracy_band", "rollout.resample=uninformative", "rollout.max_resample=2", *AHEAD),
        *("rollout/completions", 4),
    ),
    "expert, ahead": (
        (f"expert={{path='{EXPERT}', ratio=0.3}}", 'loss=[{name = "ppo_clip"}, {name = "sft"}]', *AHEAD),
        *("loss/sft", 4),
    ),
}
"""Overrides; a metric that shows the method at work, and in how many steps it is above 0 at least."""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_equals_an_uninterrupted_one(resumed, name):
    overrides, metric, least = RUNS[name]
    run = resumed(*overrides)
    assert sum(row.get(metric, 0) > 0 for row in rows(run / "metrics.jsonl")) >= least
    prm = {str(path.relative_to(run)) for path in run.glob("model/process_rewards/**/model.safetensors")}
    if name.startswith("prime"):
        assert ("model/process_rewards/reference/model.safetensors" in prm) == (name != "prime, reference policy")


QUIET = ("eval.problems=0", "checkpoint.every=0", "logging.rollouts_every=0")


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
