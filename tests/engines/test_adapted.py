# pyright: reportAttributeAccessIssue=false
"""What the engines sample with LoRA is W + (alpha / r) B A, however small the update is."""

import pytest
import torch

from retrain.engines.embedded.general import unmerged_update
from retrain.engines.generate_engine import GenerateEngine
from retrain.engines.torch_engine import TorchEngine
from retrain.functional.weights import LowRank
from tests.engines.models import Asked, sample, scored
from tests.engines.sampled_matrices import fused_matrix, module_matrix, worst
from tests.training.small_models import train_adapter

pytestmark = pytest.mark.numeric

SAMPLING = Asked(group_size=4, max_tokens=12, seed=4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("lr", [1e-5, 1e-3])
def test_every_engine_samples_base_plus_update(lr, dtype):
    policy = train_adapter("qwen3", lr, dtype)
    fused, general = (TorchEngine(policy.adapter, dtype=dtype, fused=fused) for fused in (True, False))
    generate = GenerateEngine(policy.adapter)
    for engine in (fused, general, generate):
        engine.load_weights(policy.weights(), 1)
    assert worst(policy, lambda name: fused_matrix(fused, policy, name)) < 1e-3
    assert worst(policy, lambda name: module_matrix(vars(general._decoder)["_model"], name)) < 1e-3
    assert worst(policy, lambda name: module_matrix(generate._model, name)) < 1e-3
    # The update waits for `load_weights`, and the next one replaces it.
    before = [sample(engine, [[5, 9]], SAMPLING) for engine in (fused, general, generate)]
    for parameter in policy.optimizer.parameters.values():
        parameter.data += 0.5
    assert [sample(engine, [[5, 9]], SAMPLING) for engine in (fused, general, generate)] == before
    for engine in (fused, general, generate):
        engine.load_weights(policy.weights(), 2)
    assert worst(policy, lambda name: fused_matrix(fused, policy, name)) < 1e-3
    assert worst(policy, lambda name: module_matrix(vars(general._decoder)["_model"], name)) < 1e-3


@pytest.mark.parametrize("lr", [1e-5, 1e-3])
def test_layers_that_hold_in_by_out_matrices_are_sampled_as_faithfully(lr):
    policy = train_adapter("gpt2", lr)
    engine = TorchEngine(policy.adapter, dtype="bfloat16")
    engine.load_weights(policy.weights(), 1)
    assert worst(policy, lambda name: module_matrix(engine._decoder._model, name)) < 1e-3


def test_adapters_on_the_embedding_and_the_head_are_sampled():
    policy = train_adapter("llama", 1e-2, "float32", target_modules=("embed_tokens", "lm_head", "k_proj"))
    engine = TorchEngine(policy.adapter, dtype="float32")
    assert "general" in engine.describe()
    engine.load_weights(policy.weights(), 1)
    row = sample(engine, [[5, 9]], SAMPLING)[0][0]
    assert scored(policy.model, [5, 9], row.ids, 1.0).tolist() == pytest.approx(row.logprobs, abs=1e-4)


def test_what_is_added_is_the_product_for_vectors_and_for_ids():
    up, down = torch.randn(6, 2), torch.randn(2, 5)
    hook = unmerged_update(LowRank(up, down), torch.device("cpu"))
    given, ids = torch.randn(3, 5).bfloat16(), torch.tensor([[4, 0, 1]])
    zero = torch.zeros(3, 6)
    torch.testing.assert_close(hook(torch.nn.Identity(), (given,), zero), given.float() @ (up @ down).T)
    torch.testing.assert_close(hook(torch.nn.Identity(), (ids,), zero[None]), (up @ down).T[ids])
    assert hook(torch.nn.Identity(), (given,), zero.bfloat16()).dtype == torch.bfloat16
