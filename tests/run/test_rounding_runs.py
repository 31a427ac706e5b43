"""Runs in bfloat16: what is sampled and evaluated is what is saved, exported and opened again."""

import json
from contextlib import closing

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from retrain.run.evaluate import measure
from retrain.run.reopen import reopen
from tests.commands import invoke
from tests.make_checkpoint import make_checkpoint
from tests.small_runs import digest, rows

pytestmark = pytest.mark.numeric
STOCHASTIC = ("model.dtype=bfloat16", "torch.dtype=bfloat16", "model.rounding=stochastic", "training.lr=1e-3")


def exported(run, folder, *options):
    assert invoke("export", str(run), str(folder), *options).exit_code == 0
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())["dtype"]


@pytest.mark.slow
def test_the_rounded_policy_is_what_is_saved_exported_and_opened_again(train, tmp_path):
    run = train(*STOCHASTIC, "checkpoint.every=4")
    last = rows(run / "eval.jsonl")[-1]
    for target in (run, run / "checkpoints" / "step-000004"):
        with closing(reopen(target, (), lambda event, details: None)) as parts:
            assert measure(parts, 4).row == {k: v for k, v in last.items() if k != "time/evaluation_s"}
    saved = load_file(run / "model" / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}
    wide, dtype = exported(run, tmp_path / "wide", "--dtype", "float32")
    assert dtype == "float32"
    assert all(torch.equal(value, saved[name].float()) for name, value in wide.items()), "nothing is lost in bfloat16"
    card = (run / "model" / "README.md").read_text()
    assert "Evaluated in bfloat16 with exactly these weights." in card


@pytest.mark.slow
def test_a_resumed_run_rounds_as_an_uninterrupted_one(train, resumed):
    whole = resumed(*STOCHASTIC)
    assert digest(train(*STOCHASTIC, "training.seed=1", name="other")) != digest(whole)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_by_default_a_base_of_bfloat16_numbers_is_rounded_at_random(train, tmp_path, kind):
    base, said = tmp_path / "base", []
    make_checkpoint(base)
    if kind == torch.bfloat16:
        AutoModelForCausalLM.from_pretrained(base, dtype=kind).save_pretrained(base)
    options = (f'model.path="{base}"', "model.dtype=bfloat16", "warmup.steps=0", "training.lr=1e-6", "eval.problems=0")
    run = train(*options, "training.max_steps=2", observe=lambda event, details: said.append(details.get("text", "")))
    saved = load_file(run / "model" / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {kind}
    assert any("rounded at random" in text for text in said) == (kind == torch.bfloat16)


@pytest.mark.slow
def test_exact_weights_are_saved_and_the_evaluated_ones_can_be(train, tmp_path):
    run = train("model.dtype=bfloat16", "torch.dtype=bfloat16", "training.lr=1e-3")
    card = (run / "model" / "README.md").read_text()
    assert "Evaluated in bfloat16 with rounded weights; these weights are exact" in card
    exact = load_file(run / "model" / "model.safetensors")
    rounded, dtype = exported(run, tmp_path / "out", "--dtype", "bfloat16")
    assert dtype == "bfloat16"
    assert all(torch.equal(value, exact[name].bfloat16()) for name, value in rounded.items())
    assert "with exactly these weights" in (tmp_path / "out" / "README.md").read_text()
    exact = train("model.dtype=float32", "torch.dtype=float32", name="exact")
    assert "Evaluated in float32." in (exact / "model" / "README.md").read_text()


@pytest.mark.slow
def test_an_adapter_is_merged_into_the_base_as_it_is_stored(train, tmp_path):
    """The run computes with the base in bfloat16; what it saves is peft's own merge with the float32 base."""
    base = tmp_path / "base"
    make_checkpoint(base)
    options = (f'model.path="{base}"', "model.lora={r=4}", "warmup.steps=0", "training.lr=1e-2")
    # "auto" is float32 on processors that compute bfloat16 more slowly.
    run = train(*options, "model.dtype=bfloat16", "torch.dtype=bfloat16", "training.max_steps=2", "eval.problems=2")
    stored, merged = load_file(base / "model.safetensors"), load_file(run / "model" / "model.safetensors")
    assert any(not torch.equal(value, value.bfloat16().float()) for value in stored.values()), "the premise"
    name = "model.embed_tokens.weight"
    assert torch.equal(merged[name], stored[name])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    peft = PeftModel.from_pretrained(model, run / "model" / "adapter").eval()
    ids = torch.arange(3, 40)[None]
    expected = peft(ids).logits.log_softmax(-1)
    found = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)(ids).logits.log_softmax(-1)
    assert float((found - expected).detach().abs().max()) < 1e-4
    assert torch.equal(exported(run, tmp_path / "out")[0][name], stored[name])
    card = (run / "model" / "README.md").read_text()
    assert "merged into the base in the base's stored precision" in card
    assert "base_model:" not in card, "nobody else has this directory"
    assert f"`{base}`" not in card
