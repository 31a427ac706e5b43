"""A model shared by two processes: weights reach both of them."""

import pytest
import torch

from retrain.engines.vllm.in_process import VllmEngine
from tests.engines.models import Asked, sample
from tests.vllm.models import PROMPTS, tiny, worst_error

pytestmark = pytest.mark.vllm


def test_two_processes_share_a_model(tmp_path):
    model = tiny("qwen3", num_attention_heads=4, num_key_value_heads=2)
    engine = VllmEngine(model, 0, torch.device("cpu"), tmp_path, "float32", tensor_parallel_size=2)
    try:
        for version in range(2):
            with torch.no_grad():
                model.model.norm.weight.mul_(1.1)
            engine.load_weights(model.state_dict(), version)
            assert (
                worst_error(model, PROMPTS, sample(engine, PROMPTS, Asked(group_size=3, max_tokens=12, seed=4)), 1.0)
                < 2e-5
            )
    finally:
        engine.close()
