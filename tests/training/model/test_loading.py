import json
import pickle
import re
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from retrain.engines.capability import choose_engine_at
from retrain.errors import ComponentError, StorageError
from retrain.training.model.loading import load_model, save_model
from retrain.training.policy import TorchPolicy
from retrain.training.settings import LoraSettings, PolicySettings
from retrain.types import Problem
from tests.make_checkpoint import make_checkpoint
from tests.storage.test_checkpoint import Canary

pytestmark = pytest.mark.numeric

PROBLEMS = [Problem(id=str(i), prompt=f"{i}+1?\n", answer=str(i + 1), solution=f"so {i + 1}") for i in range(30)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    make_checkpoint(root / "llama", "llama", chat=True)
    make_checkpoint(root / "gpt2", "gpt2", pad=False)
    return root


@pytest.fixture
def llama(checkpoints, tmp_path):
    return shutil.copytree(checkpoints / "llama", tmp_path / "llama")


def test_directory_loads_with_its_weights_and_every_stop_id(llama):
    model = AutoModelForCausalLM.from_pretrained(llama)
    GenerationConfig(eos_token_id=[5, 1], temperature=0.1, do_sample=True).save_pretrained(llama)
    loaded = load_model(str(llama))
    assert loaded.stop_ids == (1, 2, 5)  # config 1, tokenizer 2, generation_config 1 and 5
    assert not loaded.model.training
    assert loaded.model.dtype is torch.float32
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.model.parameters(), strict=True))


def test_missing_pad_token_is_filled_in(checkpoints):
    loaded = load_model(str(checkpoints / "gpt2"), dtype="bfloat16")
    assert loaded.tokenizer.pad_token == "<|eos|>"
    assert loaded.stop_ids == (1,)
    assert loaded.model.dtype is torch.bfloat16


def test_builtin_needs_texts_and_has_a_name():
    loaded = load_model("builtin:tiny", problems=PROBLEMS)
    assert loaded.stop_ids == (2,)
    assert loaded.name == "builtin:tiny"
    assert loaded.tokenizer.decode(loaded.chat.prompt("7+8?\n").ids) == "7+8?\n"
    with pytest.raises(ComponentError, match="got none"):
        load_model("builtin:tiny")
    with pytest.raises(
        ComponentError, match=re.escape('no builtin model is called "builtin:small"; use builtin:tiny or')
    ):
        load_model("builtin:small", problems=PROBLEMS)


def change_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda d: (d / "config.json").unlink(), ComponentError, "no config.json"),
        (lambda d: (d / "model.safetensors").write_bytes(b"x" * 99), StorageError, "weights cannot be read"),
        (
            lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../x.safetensors"}}'),
            StorageError,
            "names weights in another directory",
        ),
        (lambda d: change_config(d, num_hidden_layers=3), StorageError, r"no weights for model\.layers\.2"),
        (
            lambda d: change_config(d, model_type="own", auto_map={"AutoConfig": "x.C", "AutoModelForCausalLM": "x.M"}),
            ComponentError,
            "trust_remote_code = true",
        ),
    ],
)
def test_broken_directory_is_explained(llama, damage, error, message):
    damage(llama)
    with pytest.raises(error, match=message):
        load_model(str(llama))


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/model", "a/b/c", "~/no-such-model", ":", "a:b", "--", "a/"])
def test_missing_directory_never_asks_the_hub(path):
    with pytest.raises(ComponentError, match="there is no directory"):
        load_model(path)


@pytest.mark.parametrize("dump", [pickle.dump, torch.save])
def test_pickled_weights_execute_nothing(llama, tmp_path, dump):
    (llama / "model.safetensors").unlink()
    with (llama / "pytorch_model.bin").open("wb") as file:
        dump({"w": Canary(tmp_path / "canary")}, file)
    with pytest.raises(
        StorageError, match=r"the weights cannot be read \(Weights only load failed\); copy or download"
    ):
        load_model(str(llama))
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "named",
    [
        {"_attn_implementation": "kernels-community/flash-attn"},
        {"attn_implementation": "paged|me/kernel"},
        {"text_config": {"_attn_implementation": "me/kernel@main:forward"}},
        {"experts_implementation": {"text_config": "me/experts"}},
    ],
    ids=lambda named: next(iter(named)),
)
def test_code_of_the_hub_that_a_configuration_names_is_refused(llama, named):
    file = llama / "config.json"
    plain = json.loads(file.read_text())
    file.write_text(json.dumps(plain | named))
    with pytest.raises(ComponentError, match="which is code from the hub"):
        load_model(str(llama))
    file.write_text(json.dumps(plain | {"_attn_implementation": "eager"}))
    assert load_model(str(llama)).model.config._attn_implementation == "eager"


def test_choosing_an_engine_loads_no_code_of_the_hub(llama):
    file = llama / "config.json"
    plain = choose_engine_at(str(llama))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"_attn_implementation": "kernels-community/flash-attn"}))
    assert choose_engine_at(str(llama)) == plain is not None


def test_an_adapter_that_names_another_model_is_refused(llama):
    (llama / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "somebody/else"}))
    with pytest.raises(ComponentError, match="holds an adapter"):
        load_model(str(llama))


def test_unreachable_hub_is_a_storage_error(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(StorageError, match=r"there is no directory nobody-here.* the hub cannot be reached"):
        load_model("nobody-here/no-such-model")


def held(model):
    """Type and values of all parameters and buffers, by name; the rotary embedding's frequencies are a buffer."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: (value.dtype, value.tolist()) for name, value in tensors}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("source", ["llama", "gpt2", "builtin:tiny"])
def test_saved_model_loads_again(checkpoints, tmp_path, source, dtype):
    path = source if ":" in source else str(checkpoints / source)
    loaded = load_model(path, problems=PROBLEMS, dtype=dtype)
    save_model(tmp_path / "model", loaded.model, loaded.tokenizer, loaded.model.state_dict())
    again = load_model(str(tmp_path / "model"), dtype=dtype)
    assert again.stop_ids == loaded.stop_ids
    assert again.chat.prompt("1+2?") == loaded.chat.prompt("1+2?")
    assert again.model.state_dict().keys() == loaded.model.state_dict().keys()
    assert held(again.model) == held(loaded.model)
    ids = torch.arange(20)[None]
    assert torch.equal(again.model(ids).logits, loaded.model(ids).logits)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == [
        type(loaded.model).__name__
    ]
    assert not list((tmp_path / "model").glob("*.bin"))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_adapters_are_saved_merged_and_apart(tmp_path, family):
    loaded = load_model(str(make_checkpoint(tmp_path / "base", family)))
    policy = TorchPolicy(loaded.model, PolicySettings(lora=LoraSettings(r=2)))
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)
    save_model(tmp_path / "model", policy.model, loaded.tokenizer, policy.weights())
    policy.save_adapter(tmp_path / "adapter")
    ids = torch.arange(10)[None]
    expected = policy.model(ids).logits
    assert not torch.allclose(expected, load_model(str(tmp_path / "base")).model(ids).logits, atol=1e-2)
    assert torch.allclose(expected, load_model(str(tmp_path / "model")).model(ids).logits, atol=1e-3)
    adapted = PeftModel.from_pretrained(load_model(str(tmp_path / "base")).model, tmp_path / "adapter")
    assert torch.allclose(expected, adapted(ids).logits, atol=1e-3)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("empty", [True, False])
def test_a_head_of_its_own_under_a_tied_config_stays_untied(tmp_path, same, empty):
    """A file with another `lm_head` is trained untied, so the saved model must say so."""
    make_checkpoint(tmp_path / "in", "qwen2")
    weights = load_file(tmp_path / "in" / "model.safetensors")
    head = weights["model.embed_tokens.weight"] + (0 if same else 1)
    save_file(weights | {"lm_head.weight": head}, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    loaded = load_model(str(tmp_path / "in"), empty=empty)
    save_model(tmp_path / "out", loaded.model, loaded.tokenizer, loaded.model.state_dict())
    again = load_model(str(tmp_path / "out")).model
    assert again.config.tie_word_embeddings == same
    assert torch.equal(again.get_output_embeddings().weight, head)
