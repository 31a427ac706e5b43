"""LoRA's adapter as vLLM's own, beside a base that is sent once: log-probs, refusals, and whole runs."""

import json
from dataclasses import replace
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from retrain.engines.vllm.in_process import VllmEngine
from retrain.engines.vllm.vllm_options import adapter_options
from retrain.errors import ComponentError, EngineError
from retrain.training.policy import TorchPolicy
from retrain.training.settings import LoraSettings, PolicySettings
from tests.engines.models import Asked, flat, sample
from tests.vllm.models import PROMPTS, process_state, tiny, worst_error

pytest.importorskip("peft")
pytestmark = pytest.mark.vllm

CPU = torch.device("cpu")
SAMPLING = Asked(group_size=2, max_tokens=12, stop_ids=(2, 5), seed=4)
ROUNDING = 2e-5
TARGETS = {
    "qwen3": "all-linear",
    "qwen2": ("q_proj", "down_proj"),
    "qwen3-untied": ("lm_head", "embed_tokens", "k_proj"),
}


def trainable(name):
    return TorchPolicy(
        tiny(name), PolicySettings(lora=LoraSettings(r=4, target_modules=TARGETS.get(name, "all-linear")))
    )


@pytest.fixture(scope="module", params=TARGETS)
def served(request, tmp_path_factory):
    """(policy with adapters, engine with its base)."""
    policy = trainable(request.param)
    engine = VllmEngine(policy.adapter, 0, CPU, tmp_path_factory.mktemp("run"), "float32", lora="adapter")
    engine.load_weights(policy.reference_weights(), 0)
    yield policy, engine
    engine.close()


ONE = pytest.mark.parametrize("served", ["qwen3"], indirect=True)
"""For what does not depend on the architecture."""


def stepper(policy):
    """One step of real training on random tokens, every time it is called."""
    trained = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)

    def step():
        tokens = torch.randint(0, 90, (4, 32))
        policy.model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def give(policy, engine, folder, version):
    policy.save_adapter(folder)
    engine.load_adapter(folder, version)


def test_logprobs_are_the_trainers_after_each_of_twenty_adapters(served, tmp_path):
    policy, engine = served
    torch.manual_seed(0)
    step = stepper(policy)
    for version in range(20):
        step()
        give(policy, engine, tmp_path, version)
        for temperature in (0.6, 1.0, 1.2):
            sampling = replace(SAMPLING, temperature=temperature, seed=version, max_tokens=6)
            groups = sample(engine, PROMPTS[:2], sampling)
            assert worst_error(policy.model, PROMPTS[:2], groups, temperature) < ROUNDING
            assert {row.weights_version for row in flat(groups)} == {version}
    with policy.adapter.disable_adapter():
        assert worst_error(policy.model, PROMPTS[:2], groups, 1.2) > 0.01


def shifted(policy, scale=0.1):
    """An adapter some way off; of the same size every time, for with it grows what rounding does."""
    with torch.no_grad():
        for name, parameter in policy.adapter.named_parameters():
            if "lora_" in name:
                parameter.copy_(scale * torch.randn_like(parameter))


def right(policy, engine, version):
    """The engine samples from the policy's weights, and says so."""
    groups = sample(engine, PROMPTS, SAMPLING)
    return worst_error(policy.model, PROMPTS, groups, 1.0) < ROUNDING and {
        row.weights_version for row in flat(groups)
    } == {version}


@ONE
def test_keys_of_an_older_adapter_are_never_used(served, tmp_path, monkeypatch):
    """vLLM knows cached keys by the adapter's name, which stays the same."""
    policy, engine = served
    give(policy, engine, tmp_path, 1)
    assert right(policy, engine, 1)
    shifted(policy)
    give(policy, engine, tmp_path, 2)
    assert right(policy, engine, 2)
    shifted(policy)
    give(policy, engine, tmp_path, 3)
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm, "reset_prefix_cache", lambda: True)
        assert worst_error(policy.model, PROMPTS, sample(engine, PROMPTS, SAMPLING), 1.0) > 0.01
    give(policy, engine, tmp_path, 3)
    assert right(policy, engine, 3)


@ONE
def test_loading_an_adapter_changes_nothing_else_in_the_process(served, tmp_path):
    policy, engine = served
    policy.save_adapter(tmp_path)
    before = process_state()
    engine.load_adapter(tmp_path, 1)
    sample(engine, PROMPTS, SAMPLING)
    assert [name for name, value in process_state().items() if value != before[name]] == []


def changed(folder, **fields):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def renamed(folder):
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({name.replace("q_proj", "qq_proj"): value for name, value in weights.items()}, folder / FILE)


def misshapen(folder):
    """Only the last layer does not fit: by then the first one has the new adapter."""
    weights = load_file(folder / FILE)
    name = next(name for name in weights if "layers.1.mlp.down_proj.lora_A" in name)
    save_file(weights | {name: torch.zeros(4, 200)}, folder / FILE)


FILE = "adapter_model.safetensors"
BROKEN = {
    "a rank above the engine's": (lambda folder: changed(folder, r=16), "rank 16 is greater than max_lora_rank 8"),
    "DoRA": (lambda folder: changed(folder, use_dora=True), "DoRA"),
    "modules_to_save": (lambda folder: changed(folder, modules_to_save=["lm_head"]), "modules_to_save"),
    "a layer that is not there": (renamed, "qq_proj"),
    "no file": (lambda folder: (folder / FILE).unlink(), "contain tensors"),
    "a shape": (misshapen, "size"),
}


@ONE
@pytest.mark.parametrize("defect", BROKEN)
def test_an_adapter_that_fails_leaves_no_weights_until_one_is_loaded(served, tmp_path, defect):
    policy, engine = served
    spoil, said = BROKEN[defect]
    give(policy, engine, tmp_path / "good", 1)
    shifted(policy)
    policy.save_adapter(tmp_path / "bad")
    spoil(tmp_path / "bad")
    with pytest.raises(EngineError, match=f"adapter of step 2 .*({said})"):
        engine.load_adapter(tmp_path / "bad", 2)
    with pytest.raises(EngineError, match="no weights"):
        sample(engine, PROMPTS, SAMPLING)
    give(policy, engine, tmp_path / "good", 3)
    assert right(policy, engine, 3)


@ONE
def test_a_base_alone_is_not_sampled_from_and_a_new_one_takes_its_adapter(served, tmp_path):
    policy, engine = served
    give(policy, engine, tmp_path, 1)
    with torch.no_grad():
        policy.model.model.norm.weight.mul_(1.1)
    engine.load_weights(policy.reference_weights(), 2)
    with pytest.raises(EngineError, match="no weights"):
        sample(engine, PROMPTS, SAMPLING)
    give(policy, engine, tmp_path, 2)
    assert right(policy, engine, 2)


@ONE
def test_an_adapter_is_loaded_into_an_engine_that_is_awake(served, tmp_path, monkeypatch):
    """What is loaded while vLLM sleeps on a GPU would be overwritten as it wakes."""
    policy, engine = served
    order, add = [], engine._llm.llm_engine.add_lora
    monkeypatch.setattr(engine._llm, "wake_up", lambda: order.append("wake up"))
    monkeypatch.setattr(engine._llm.llm_engine, "add_lora", lambda request: order.append("load") or add(request))
    monkeypatch.setattr(engine, "_asleep", True)
    give(policy, engine, tmp_path, 1)
    assert order == ["wake up", "load"]
    assert right(policy, engine, 1)


@ONE
def test_an_adapter_without_a_base_is_refused(served, tmp_path):
    policy, engine = served
    policy.save_adapter(tmp_path)
    engine.close()
    with pytest.raises(EngineError, match="no base"):
        engine.load_adapter(tmp_path, 1)
    engine.load_weights(policy.reference_weights(), 1)
    engine.load_adapter(tmp_path, 1)
    assert right(policy, engine, 1)


def test_room_is_made_in_vllms_own_steps():
    from vllm.config.lora import MaxLoRARanks

    for step, more in zip(get_args(MaxLoRARanks), get_args(MaxLoRARanks)[1:], strict=False):
        assert adapter_options(step)["max_lora_rank"] == step
        assert adapter_options(step + 1)["max_lora_rank"] == more
    with pytest.raises(ComponentError, match=r"rank 512 at most.* r = 513; lower r"):
        adapter_options(max(get_args(MaxLoRARanks)) + 1)


def test_a_model_that_vllm_takes_no_adapters_for_shows_at_the_start(tmp_path):
    policy = trainable("gpt2")
    engine = VllmEngine(policy.adapter, 0, CPU, tmp_path, "float32")
    assert not engine.takes_adapters, "unless it is asked for"
    assert "LoRA merged and rounded to float32" in engine.describe()
    engine.close()
    with pytest.raises(EngineError, match=r'does not support LoRA.*set \[vllm\] lora = "merged"'):
        VllmEngine(policy.adapter, 0, CPU, tmp_path, "float32", lora="adapter")
