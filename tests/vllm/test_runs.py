"""Whole runs with vLLM: they train, resume bit for bit, and stop when vLLM does not hold the trainer's weights."""

import gc
import json
import sys

import pytest
import torch

from retrain.errors import EngineError
from retrain.run.before.engine_check import engine_status
from retrain.run.reopen import stored
from retrain.run.session import Resume
from tests.commands import invoke
from tests.small_runs import digest, rows
from tests.vllm.models import saved

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("options", [("training.lr=1e-3",), ("model.lora={r=4}", "training.lr=1e-2")])
def test_a_run_trains_and_resumed_from_its_middle_it_is_the_same(train, options):
    said = []
    whole = train(*options, name="whole", observe=lambda event, details: said.append(str(details)))
    metrics = rows(whole / "metrics.jsonl")
    assert len(metrics) == 4
    assert all(row["parity/logp_diff_max"] < 1e-4 for row in metrics)
    assert any("vLLM 0." in text and "float32" in text for text in said)

    middle = whole / "checkpoints" / "step-000002"
    parts = train(*options, name="parts", resume=Resume("auto", path=middle))
    assert digest(parts) == digest(whole)
    assert rows(parts / "metrics.jsonl")[-2:] == metrics[-2:]
    assert rows(parts / "eval.jsonl")[-1] == rows(whole / "eval.jsonl")[-1]
    if "model.lora" in options[0]:
        file = "adapter/adapter_model.safetensors"
        assert (whole / file).read_bytes() == (whole / "model" / file).read_bytes()
        assert stored(whole, (), final=True).config.model.lora is not None, "base and adapter stay apart"


def test_a_finished_run_is_evaluated_and_sampled_from_a_temporary_directory(train, tmp_path, monkeypatch):
    run, temporary = train("training.max_steps=2", "training.lr=1e-3"), tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    before = {path: path.is_file() and path.read_bytes() for path in run.rglob("*")}
    evaluated = invoke("eval", str(run), "--json", code=0)
    last = rows(run / "eval.jsonl")[-1]
    found = json.loads(evaluated.stdout)
    assert (found["step"], found["accuracy"], found["avg_tokens"]) == (2, last["accuracy"], last["avg_tokens"])
    sampled = invoke("sample", str(run), "1+1?", "-n", "8", code=0)
    assert sampled.stdout.strip()
    assert {path: path.is_file() and path.read_bytes() for path in run.rglob("*")} == before
    gc.collect()
    assert not list(temporary.glob("retrain-*"))


def test_adapters_are_sampled_merged(train):
    run = train("training.max_steps=2", "model.lora={r=4}", "vllm.lora=merged", "training.lr=1e-2")
    assert not (run / "adapter").exists()
    assert all(row["parity/logp_diff_max"] < 1e-4 for row in rows(run / "metrics.jsonl"))


def of(folder):
    return f'model.path="{folder}"'


def test_experts_that_vllm_gets_wrong_on_a_cpu_end_the_run(train, tmp_path):
    """vLLM's CPU build takes new weights for mixtures of experts without a word, and computes something else."""
    with pytest.raises(EngineError, match="sampler and trainer disagree"):
        train(of(saved(tmp_path / "model", "qwen3-moe")), "warmup.steps=0", "eval.problems=0")


def test_what_vllm_cannot_serve_shows_at_the_start(train, tmp_path):
    with pytest.raises(EngineError, match=r"cannot be started .*head_dim=16"):
        train(of(saved(tmp_path / "model", "qwen3", head_dim=16)), "warmup.steps=0")
    with pytest.raises(EngineError, match="sleep = true releases GPU memory"):
        train("vllm.sleep=true", name="asleep")


def test_a_broken_installation_is_an_error_that_says_what_to_do(train, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)
    with pytest.raises(EngineError, match=r"cannot be started \(ModuleNotFoundError.*retrain doctor"):
        train()


def test_doctor_has_vllm_sample_a_token():
    assert engine_status("vllm").startswith("works (vLLM 0.")
    assert not torch.distributed.is_initialized()


def test_a_run_of_several_turns_trains_on_what_vllm_sampled_and_ends_at_its_context(train):
    game = ('task.name="numbers"', 'environment.name="guess"', "environment.max_turns=4", "environment.turn_tokens=4")
    run = train(*game, "training.max_steps=2", "training.max_tokens=14", "algorithm.transform_mode=turn_returns")
    for row in rows(run / "metrics.jsonl"):
        assert row["parity/logp_diff_max"] < 1e-4
        assert row["env/turns"] > 1
    short = train(*game, "training.max_steps=1", "training.max_tokens=14", "vllm.max_model_len=16", name="short")
    assert rows(short / "metrics.jsonl")[0]["env/ended_context"] > 0
