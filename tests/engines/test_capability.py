"""Which models the embedded engine takes."""

from __future__ import annotations

import pytest
import transformers as hf

from retrain.engines.capability import choose_engine, fusable, unsupported
from tests.engines.models import GROUPED, MODELS, tiny

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("name", list(MODELS))
def test_full_attention_models_are_served(name):
    model = tiny(name)
    assert unsupported(model) is None
    assert choose_engine(model) == ("torch", "the embedded engine serves this architecture")


def test_a_window_no_sequence_outgrows_is_full_attention():
    assert unsupported(tiny("mistral", sliding_window=64)) is None
    assert unsupported(tiny("mistral", sliding_window=63)) == "its attention slides over 63 tokens"


def test_a_window_on_some_layers_counts():
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    assert unsupported(tiny("qwen2", **window)) == "its attention slides over 8 tokens"
    assert unsupported(tiny("qwen2", sliding_window=8)) is None


@pytest.mark.parametrize(
    ("config", "model", "reason"),
    [
        (
            hf.T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2),
            hf.T5ForConditionalGeneration,
            "encoder",
        ),
        (hf.Qwen3Config(**GROUPED), hf.Qwen3Model, "no language-model head"),
        (
            hf.BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=2),
            hf.BloomForCausalLM,
            "bloom cannot be replaced",
        ),
        (
            hf.MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, state_size=4),
            hf.MambaForCausalLM,
            "recurrent",
        ),
        (hf.Gemma2Config(**GROUPED, head_dim=8, layer_types=["full_attention"] * 2), hf.Gemma2ForCausalLM, "caps"),
        (
            hf.GptOssConfig(
                **GROUPED,
                head_dim=8,
                num_local_experts=2,
                layer_types=["full_attention"] * 2,
                rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            ),
            hf.GptOssForCausalLM,
            "sinks",
        ),
        (
            hf.Qwen3NextConfig(
                **GROUPED, head_dim=8, num_experts=2, layer_types=["linear_attention", "full_attention"]
            ),
            hf.Qwen3NextForCausalLM,
            "recurrent|linear_attention",
        ),
    ],
)
def test_the_reason_names_what_is_in_the_way(config, model, reason):
    import re

    built = model(config)
    assert re.search(reason, str(unsupported(built)))
    assert choose_engine(built)[0] == "transformers"


def test_only_the_familys_plain_members_are_fused():
    assert fusable(tiny("llama"))
    assert not fusable(tiny("gpt2"))
    assert not fusable(tiny("llama", hidden_act="gelu"))

    class Changed(hf.LlamaForCausalLM):
        pass

    assert not fusable(Changed(tiny("llama").config))
