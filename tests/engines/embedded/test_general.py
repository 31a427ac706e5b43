"""The sampler's own instance of a model."""

import pytest
import torch

from retrain.engines.embedded.general import HalfLinear, own_instance
from tests.engines.models import tiny

pytestmark = pytest.mark.numeric


def test_tied_embeddings_stay_one_tensor():
    assert tiny("qwen3").config.tie_word_embeddings
    own = own_instance(tiny("qwen3"), torch.float32)
    assert own.lm_head.weight is own.model.embed_tokens.weight


def test_half_precision_on_a_cpu_is_for_the_layers_products():
    own = own_instance(tiny("llama"), torch.bfloat16)
    half = {name for name, parameter in own.named_parameters() if parameter.dtype is torch.bfloat16}
    linear = {
        f"{name}.{part}"
        for name, module in own.named_modules()
        if isinstance(module, HalfLinear)
        for part, _ in module.named_parameters()
    }
    assert half == linear
    assert len(half) == 2 * 7 * 2
    assert own.lm_head.weight.dtype is torch.float32
