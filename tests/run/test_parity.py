"""The parity gate compares the sampler with the policy, and with the policy without its update."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from retrain.engines.torch_engine import TorchEngine
from retrain.errors import EngineError
from retrain.run.parity import check_parity
from retrain.training.policy import TorchPolicy
from retrain.training.settings import PolicySettings
from tests.make_checkpoint import make_checkpoint
from tests.small_runs import digest, rows
from tests.training.small_models import make_batch, make_model, make_objective

pytestmark = pytest.mark.numeric

EXACT = ("model.dtype=float32", "torch.dtype=float32", "rollout.parity_every=1", "eval.problems=0")
LORA = ("model.lora={}", "training.lr=3e-6", "training.max_tokens=24", "warmup.steps=0")


@pytest.fixture
def coarse(tmp_path):
    """A model whose weights are bfloat16 numbers, so that rounding the merged ones changes the update alone."""
    make_checkpoint(tmp_path / "coarse")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "coarse", dtype=torch.bfloat16)
    model.float().save_pretrained(tmp_path / "coarse")
    return f'model.path="{tmp_path / "coarse"}"'


def loads(monkeypatch, change):
    """Have the embedded engine load what `change` makes of the weights and the step."""
    real = TorchEngine.load_weights
    monkeypatch.setattr(TorchEngine, "load_weights", lambda self, w, step: real(self, change(w, step), step))


@pytest.mark.slow
def test_lora_merged_in_bfloat16_is_caught(train, coarse, tmp_path, monkeypatch):
    train(*EXACT, *LORA, coarse, name="faithful")
    loads(monkeypatch, lambda weights, step: {name: value.bfloat16().float() for name, value in weights.items()})
    with pytest.raises(EngineError, match=r"sampler is stale: .* those of the base without LoRA's adapter"):
        train(*EXACT, *LORA, coarse, name="rounded")
    checks = rows(tmp_path / "runs" / "rounded" / "metrics.jsonl")
    assert all(row["parity/logp_diff_mean"] < 1e-5 for row in checks), "a hundredth of the tolerance: of no help"


@pytest.mark.parametrize("lr", ["1e-6", "1e-3"])
@pytest.mark.parametrize("behind", [1, 4])
def test_a_sampler_that_is_some_steps_behind_is_caught(train, monkeypatch, lr, behind):
    """At the tiny rate its log-probs are off by less than the tolerance."""
    kept = []

    def older(weights, step):
        kept.append({name: value.clone() for name, value in weights.items()})
        return kept[max(0, len(kept) - 1 - behind)]

    loads(monkeypatch, older)
    problem = "sampler is stale: .* those of the weights of the last check" if lr == "1e-6" else "sampler"
    with pytest.raises(EngineError, match=problem):
        train(*EXACT, f"training.lr={lr}", "training.max_steps=6")


@pytest.mark.parametrize("stale", [False, True])
def test_a_sampler_in_float32_is_judged_in_float32(stale):
    """Each weight lies halfway between two bfloat16 numbers: the least update tips it."""
    model = make_model()
    for p in model.parameters():
        p.data = ((p.data.view(torch.int32) & -65536) + 32768).view(torch.float32)
    policy = TorchPolicy(model, PolicySettings(lr=1e-6, dtype="bfloat16"))
    batch = make_batch(rows=8, longest=40)

    def exact():
        with policy.in_float32() as possible:
            assert possible
            return policy.logprobs(batch)["old_logprobs"]

    policy.remember()
    old = exact()
    policy.update(batch, make_objective("reinforce"))
    sampled = batch.replace(sampler_logprobs=old if stale else exact())
    with pytest.raises(EngineError, match="or the two round weights differently"):
        check_parity(policy, sampled, 1.0)  # takes both for stale
    if stale:
        with pytest.raises(EngineError, match="sampler is stale"):
            check_parity(policy, sampled, 1.0, exact=True)
    else:
        assert check_parity(policy, sampled, 1.0, exact=True)["parity/logp_diff_mean"] < 0.2


@pytest.mark.parametrize("fixed", [8, 100])
def test_a_difference_beyond_the_fixed_rotary_frequencies_is_blamed_on_them(fixed):
    policy = TorchPolicy(make_model(), PolicySettings())
    policy.model.config.rope_parameters = {"rope_type": "dynamic", "original_max_position_embeddings": fixed}
    cause = "beyond 8 tokens the rotary frequencies" if fixed == 8 else "does not hold the trainer's weights"
    with pytest.raises(EngineError, match=cause):
        check_parity(policy, make_batch(rows=8, longest=40), 1e-3)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("sampler", ["float32", "bfloat16"])
def test_rounded_weights_pass_the_gate(train, coarse, rounding, sampler):
    options = ("model.dtype=bfloat16", f"torch.dtype={sampler}", f"model.rounding={rounding}", "warmup.steps=0")
    run = train(*options, coarse, "rollout.parity_every=1", "eval.problems=0", "training.max_steps=6")
    assert max(row["parity/logp_diff_mean"] for row in rows(run / "metrics.jsonl")) < 0.02


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lr", ["1e-3", "1e-6", "1e-9"])
def test_a_sampler_that_follows_is_not(train, lr, dtype):
    """The update is below the rounding of log-probs, about as large, and far above."""
    options = (f"model.dtype={dtype}", f"torch.dtype={dtype}", "rollout.parity_every=1", "eval.problems=0")
    train(*options, f"training.lr={lr}", "training.max_steps=6")


@pytest.mark.slow
def test_comparing_leaves_the_training_as_it_was(train):
    often, never = (train("training.lr=1e-3", f"rollout.parity_every={n}", name=f"every-{n}") for n in (1, 0))
    assert digest(often) == digest(never)
