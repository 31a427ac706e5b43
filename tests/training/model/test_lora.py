"""Adapters: merged weights, state, peft's format, reference without a copy."""

import sys
from pathlib import Path

import pytest
import torch

from retrain.errors import ComponentError, MissingExtraError, StorageError
from retrain.training.policy import TorchPolicy
from retrain.training.settings import LoraSettings, PolicySettings
from tests.training.model.test_forward import own_logprobs
from tests.training.small_models import exact_updates, make_batch, make_model, make_objective, train_adapter

pytestmark = pytest.mark.numeric


def policy(kind="qwen3", seed=0, **changes):
    settings = PolicySettings(lr=1e-2, lora=LoraSettings(**{"r": 4, "alpha": 8, **changes}))
    return TorchPolicy(make_model(kind, seed), settings)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_merged_weights_are_the_adapted_model_under_base_names(kind):
    trained, batch = policy(kind), make_batch()
    for _ in range(3):
        trained.update(batch, make_objective())
    base = make_model(kind)
    untouched = own_logprobs(base, batch)
    state = {name: value.clone() for name, value in trained.state_dict()["model"].items()}
    base.load_state_dict(trained.weights(), strict=True)
    adapted = own_logprobs(trained.model, batch)
    assert (adapted - untouched).abs().max() > 1e-2
    torch.testing.assert_close(own_logprobs(base, batch), adapted, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(value, state[name]) for name, value in trained.state_dict()["model"].items())


def test_only_adapters_are_trained_and_stored_and_resume_is_exact():
    batches = [make_batch(seed=seed) for seed in range(4)]
    straight, first, second = policy(), policy(), policy()
    for batch in batches:
        straight.update(batch, make_objective())
    for batch in batches[:2]:
        first.update(batch, make_objective())
    state = first.state_dict()
    assert all("lora_" in name for name in state["model"])
    assert state["optimizer"].keys() == state["model"].keys()
    second.load_state_dict(state)
    for batch in batches[2:]:
        second.update(batch, make_objective())
    merged = straight.weights()
    assert all(torch.equal(value, merged[name]) for name, value in second.weights().items())


def test_reference_is_the_base_model_with_adapters_off():
    trained, batch = policy(), make_batch()
    reference = trained.reference()
    trained.update(batch, make_objective())
    torch.testing.assert_close(reference(batch), own_logprobs(make_model(), batch), rtol=1e-4, atol=1e-5)
    assert (trained.logprobs(batch)["old_logprobs"] - reference(batch)).abs().max() > 1e-4


def test_an_adapter_that_cannot_be_written_leaves_the_last_one_whole(tmp_path, monkeypatch):
    import peft.peft_model
    from safetensors import SafetensorError

    trained, folder = policy(), tmp_path / "adapter"
    trained.save_adapter(folder)
    first = {file.name: file.read_bytes() for file in folder.iterdir()}

    def fills(tensors, file, **options):
        """Write a half, as a disk that is full does."""
        Path(file).write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    trained.update(make_batch(), make_objective())
    monkeypatch.setattr(peft.peft_model, "safe_save_file", fills)
    with pytest.raises(StorageError, match=r"adapter cannot be written: .*No space left.*; free some space"):
        trained.save_adapter(folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == first
    assert list(tmp_path.iterdir()) == [folder]


def test_dropout_acts_in_the_update_only():
    trained, batch = policy(dropout=0.5), make_batch()
    for _ in range(2):
        trained.update(batch, make_objective())
    torch.testing.assert_close(trained.logprobs(batch), trained.logprobs(batch), rtol=0, atol=0)
    losses = {trained.update(batch, make_objective("reinforce"))["loss/total"] for _ in range(2)}
    assert len(losses) == 2
    assert not any(module.training for module in trained.model.modules())


def test_unknown_layers_are_a_user_error():
    with pytest.raises(ComponentError, match="target_modules"):
        policy(target_modules=("no_such_layer",))


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"\[lora\]"):
        policy()


def test_a_frozen_bfloat16_base_gets_float32_adapters():
    model = make_model().bfloat16()
    trained = TorchPolicy(model, PolicySettings(lr=1e-2, dtype="bfloat16", lora=LoraSettings(r=4)))
    assert {p.dtype for p in trained.optimizer.parameters.values()} == {torch.float32}
    assert trained.update(make_batch(), make_objective())["update/nonfinite"] == 0
    assert {value.dtype for value in trained.reference_weights().values()} == {torch.bfloat16}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("lr", [1e-5, 1e-3])
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_merged_weights_keep_the_update_whatever_the_base_is_held_in(kind, lr, dtype):
    trained = train_adapter(kind, lr, dtype)
    base, merged = trained.reference_weights(), trained.weights()
    found = exact_updates(trained)
    assert len(found) == (14 if kind == "qwen3" else 8)
    for name, update in found.items():
        assert merged[name].dtype == torch.float32
        assert (merged[name].double() - base[name].double() - update).norm() < 1e-3 * update.norm(), name
    assert all(merged[name].data_ptr() == base[name].data_ptr() for name in base.keys() - found.keys())
