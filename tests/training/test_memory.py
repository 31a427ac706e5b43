"""Estimates against real models: their parameters, and the tensors that a real forward keeps."""

import pytest
import torch

from retrain.training.memory import ModelShape, estimate_memory
from retrain.training.model.forward import Forward
from retrain.training.policy import TorchPolicy
from retrain.training.settings import LoraSettings, PolicySettings
from tests.training.small_models import make_batch, make_model


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "gpt2", "neox"])
def test_parameters_are_those_of_the_model_without_norms_and_biases(kind):
    model = make_model(kind)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "wpe" not in name)
    assert ModelShape.of(model.config.to_dict()).parameters == matrices


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_activations_are_near_what_a_forward_keeps(kind):
    model, batch = make_model(kind), make_batch(rows=64, longest=20)
    settings = PolicySettings(micro_batch_tokens=int(batch.attention_mask.sum()))
    forward, kept = Forward(model, settings), {}
    parameters = {p.data_ptr() for p in model.parameters()}

    def keep(tensor):
        if tensor.data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), forward.attention(1):
        forward.columns(batch)
    found = estimate_memory(ModelShape.of(model.config.to_dict()), settings, rows=1, tokens=1)
    assert 0.5 < found["activations"] / sum(kept.values()) < 1.5


def test_training_state_is_what_the_policy_holds():
    model = make_model()
    shape = ModelShape.of(model.config.to_dict())
    full = estimate_memory(shape, PolicySettings(), rows=4, tokens=10)
    assert (full["weights"], full["gradients"], full["optimizer"]) == tuple(n * shape.parameters for n in (4, 4, 8))
    assert full["kv_cache"] == 4 * 10 * (2 * 2 * 2 * 8) * 4  # rows, tokens, 2 x layers x kv heads x width, float32
    settings = PolicySettings(lora=LoraSettings(r=4))
    adapters = TorchPolicy(model, settings).optimizer.parameters
    small = estimate_memory(shape, settings, rows=4, tokens=10)
    assert small["gradients"] == 4 * sum(p.numel() for p in adapters.values())


def test_ranks_share_what_is_sharded_and_hold_adapters_whole():
    shape = ModelShape.of(make_model().config.to_dict())

    def of(ranks, **changes):
        return estimate_memory(
            shape, PolicySettings(**changes), rows=4, tokens=10, signal_models=["trained", "frozen"], ranks=ranks
        )

    one, four = of(1), of(4)
    assert all(four[name] == one[name] // 4 for name in ("weights", "gradients", "optimizer", "other_models"))
    assert (four["activations"], four["sampler_weights"]) == (one["activations"], one["sampler_weights"])
    assert four["gathered"] == 4 * shape.parameters  # of two layers all are gathered
    assert of(4, shard="none") == {**one, "kv_cache": one["kv_cache"] // 4}
    assert of(4, lora=LoraSettings(r=4))["gradients"] == of(1, lora=LoraSettings(r=4))["gradients"]
    away = of(4, offload="optimizer")
    assert away["offloaded"] == four["optimizer"]
    assert of(4, offload="all")["offloaded"] == sum(four[name] for name in ("weights", "gradients", "optimizer"))
    assert "offloaded" not in of(1, offload="all")


def test_options_that_save_memory_do():
    shape = ModelShape.of(make_model().config.to_dict())

    def total(**changes):
        return estimate_memory(shape, PolicySettings(**changes), rows=4, tokens=10)

    assert total(gradient_checkpointing=True)["activations"] < total()["activations"]
    assert total(logprob_chunk=10)["logits"] == 2 * 4 * 10 * shape.vocabulary
    assert total(optimizer="muon")["optimizer"] < total()["optimizer"]
    assert total(optimizer="adamw8bit")["optimizer"] * 4 == total()["optimizer"]
    half, lora = {"dtype": "bfloat16", "lora": LoraSettings(r=1)}, total(dtype="bfloat16", lora=LoraSettings(r=1))
    saved = lora["weights"] - total(**half, quantization="nf4")["weights"]
    assert saved == shape.layers * shape.layer * (2 - 0.5 - 4 / 64)
    assert total(dtype="bfloat16")["kv_cache"] * 2 == total()["kv_cache"]
