"""Which models the embedded engine takes."""

import re

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


FULL = {"layer_types": ["full_attention"] * 2, "head_dim": 8}
SMALLEST = {"vocab_size": 8, "hidden_size": 8}
SINKS = {"num_local_experts": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
LINEAR = {"head_dim": 8, "num_experts": 2, "layer_types": ["linear_attention", "full_attention"]}
T5 = {"vocab_size": 8, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}


@pytest.mark.parametrize(
    ("family", "head", "settings", "reason"),
    [
        ("T5", "ForConditionalGeneration", T5, "encoder"),
        ("Qwen3", "Model", GROUPED, "no language-model head"),
        ("Bloom", "ForCausalLM", SMALLEST | {"n_layer": 1, "n_head": 2}, "bloom cannot be replaced"),
        ("Mamba", "ForCausalLM", SMALLEST | {"num_hidden_layers": 1, "state_size": 4}, "recurrent"),
        ("Gemma2", "ForCausalLM", GROUPED | FULL, "caps"),
        ("GptOss", "ForCausalLM", GROUPED | FULL | SINKS, "sinks"),
        ("Qwen3Next", "ForCausalLM", GROUPED | LINEAR, "recurrent|linear_attention"),
    ],
)
def test_the_reason_names_what_is_in_the_way(family, head, settings, reason):
    built = getattr(hf, f"{family}{head}")(getattr(hf, f"{family}Config")(**settings))
    assert re.search(reason, str(unsupported(built)))
    assert choose_engine(built)[0] == "transformers"


def test_only_the_familys_plain_members_are_fused():
    assert fusable(tiny("llama"))
    assert not fusable(tiny("gpt2"))
    assert not fusable(tiny("llama", hidden_act="gelu"))

    class Changed(hf.LlamaForCausalLM):
        pass

    assert not fusable(Changed(tiny("llama").config))
