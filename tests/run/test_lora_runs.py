"""Runs with LoRA: what is sampled, evaluated and exported is the base plus the whole update, in any precision."""

import json
from contextlib import closing
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from retrain.run.evaluate import measure
from retrain.run.reopen import reopen
from retrain.run.session import Resume
from retrain.storage import checkpoint
from tests.commands import invoke
from tests.engines.sampled_matrices import fused_matrix, worst
from tests.small_runs import digest, rows

FOUR = ("model.quantization=nf4", "rollout.parity_every=1")


def opened(target):
    return reopen(target, (), lambda event, details: None)


@pytest.mark.slow(but=1)
@pytest.mark.numeric
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("lr", "more"), [("1e-5", ()), ("1e-3", ()), ("1e-3", FOUR)], ids=["1e-5", "1e-3", "nf4"])
def test_sampled_evaluated_and_exported_is_the_whole_update(train, tmp_path, lr, dtype, more):
    options = (f"model.dtype={dtype}", f"torch.dtype={dtype}", "model.lora={r=4}", f"training.lr={lr}", *more)
    run = train(*options, "training.max_steps=8", "checkpoint.every=8", "eval.every=8")
    last = rows(run / "eval.jsonl")[-1]
    for target in (run, run / "checkpoints" / "step-000008"):
        with closing(opened(target)) as parts:
            assert worst(parts.trained.policy, partial(fused_matrix, parts.sampler, parts.trained.policy)) < 1e-3
            assert measure(parts, 8).row == last, "in the run, and after it"
        out = tmp_path / target.name
        assert invoke("export", str(target), str(out)).exit_code == 0
        for folder in (out, run / "model"):
            merged = load_file(folder / "model.safetensors")
            assert {value.dtype for value in merged.values()} == {torch.float32}
            assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
            assert worst(parts.trained.policy, merged.__getitem__) < 1e-3


@pytest.mark.slow
@pytest.mark.numeric
def test_a_run_on_four_bits_stores_its_adapter_and_resumes_to_the_bit(train, stopped, tmp_path):
    """From a directory, whose matrices are read one by one; where that has gone, the merged model is left."""
    base = train("training.max_steps=0", name="base") / "model"
    options = (f'model.path="{base}"', "model.lora={r=4}", *FOUR, "training.lr=1e-3", "warmup.steps=0")
    whole = train(*options, name="whole")
    stopped(*options, steps=2)
    run = train(*options, resume=Resume("auto"))
    assert digest(run) == digest(whole) != digest(base.parent)
    stored = checkpoint.load(run / "checkpoints" / "step-000002")["policy"]["model"]
    assert all(".lora_" in name for name in stored)
    last = rows(run / "eval.jsonl")[-1]
    base.rename(tmp_path / "elsewhere")
    with closing(opened(run)) as parts:
        assert (parts.trained.policy.adapter, parts.config.model.quantization) == (None, None)
        assert measure(parts, 4).row["accuracy"] == last["accuracy"]
