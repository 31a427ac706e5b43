"""One step, recomputed from what the run has stored: by plain transformers, without any code of the trainer."""

import gzip
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.small_runs import rows
from tests.smollm2 import FOLDER, needs_smollm2

pytestmark = pytest.mark.numeric
EXACT = ("model.dtype=float32", "torch.dtype=float32", "eval.problems=0", "logging.rollouts_every=1")
SMOLLM2 = (f'model.path="{FOLDER}"', "warmup.steps=0", "training.batch_size=2", "optimizer.max_grad_norm=0.01")
"""A bound below the norm: what is reported is the norm before clipping."""


def recomputed(model, file):
    """Loss and gradient norm of GRPO's policy gradient: -sum A_t / tokens, at a ratio of 1."""
    stored = gzip.decompress(file.read_bytes()).decode().splitlines()
    trained = [row for row in map(json.loads, stored) if "advantages" in row]
    tokens = sum(len(row["completion_ids"]) for row in trained)
    loss = 0.0
    for row in trained:
        prompt, completion = row["prompt_ids"], row["completion_ids"]
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)[torch.arange(len(completion)), torch.tensor(completion)]
        sampled = torch.tensor(row["sampler_logprobs"])
        assert float((logprobs.detach() - sampled).abs().max()) < 1e-3, "prompt, template and weights are the run's"
        part = -(torch.tensor(row["advantages"]) * (logprobs - logprobs.detach()).exp()).sum() / tokens
        part.backward()
        loss += part.item()
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return loss, float(torch.stack(squares).sum().sqrt()), trained


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [pytest.param((), id="builtin:tiny"), pytest.param(SMOLLM2, id="SmolLM2", marks=needs_smollm2)]
)
def test_loss_and_gradient_are_those_of_plain_transformers(train, options):
    start = FOLDER if options else train(*EXACT, "training.max_steps=0", name="start") / "model"
    run = train(*options, *EXACT, "training.max_steps=1")
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).eval()
    loss, norm, trained = recomputed(model, run / "rollouts" / "step-000000.jsonl.gz")
    (found,) = rows(run / "metrics.jsonl")
    assert len({advantage for row in trained for advantage in row["advantages"]}) > 1, "something is learned"
    assert found["loss/total"] == pytest.approx(loss, rel=1e-3, abs=1e-6)
    assert found["grad/norm"] == pytest.approx(norm, rel=1e-3)
