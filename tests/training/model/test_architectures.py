"""The trainer's log-probs are those of the model's own forward, for tiny random models of many architectures.

The model is tested for shortcuts while its weights are those of an untrained model, and compared after they have grown
tenfold: a cap or a leak between rows that was hidden by rounding then shows.
"""

import copy
import dataclasses
import logging
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from retrain.errors import ComponentError
from retrain.training.model.forward import Forward
from retrain.training.model.loading import with_capped_attention
from retrain.training.policy import TorchPolicy
from retrain.training.settings import LoraSettings, PolicySettings
from tests.training.model.test_forward import own_logprobs
from tests.training.small_models import make_batch, make_objective

pytestmark = pytest.mark.numeric

_SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "vocab_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), 48),
    **{"moe_intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_LATENT = {
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16},
}
_GROUPS = {"n_group": 1, "topk_group": 1}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
_LOCAL = {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    **{name: {} for name in (
        "afmoe", "apertus", "arcee", "aria_text", "biogpt", "bitnet", "bloom", "cohere", "cohere2", "cohere2_moe",
        "ctrl", "cwm", "deepseek_v4", "diffllama", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon_mamba",
        "flex_olmo", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox",
        "gpt_oss", "granite", "granite_swa", "granitemoe", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "jamba",
        "jetmoe", "lfm2", "llama", "llama4_text", "mamba", "minimax", "minimax_m2", "ministral", "mistral", "mixtral",
        "modernbert-decoder", "mpt", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmo_hybrid",
        "olmoe", "openai-gpt", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
        "qwen3_5_text", "qwen3_moe", "recurrent_gemma", "rwkv", "seed_oss", "smollm3", "stablelm",
        "starcoder2", "vaultgemma", "xglm", "xlstm",
    )},
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8},
    "deepseek_v2": _LATENT | _GROUPS | {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "deepseek_v3": _LATENT | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "dots1": _GROUPS | {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "falcon": {"head_dim": None, "multi_query": False},
    "falcon with ALiBi": {"head_dim": None, "multi_query": False, "alibi": True},
    "gemma3n_text": _LOCAL | _PER_LAYER | {"laurel_rank": 4, "activation_sparsity_pattern": None},
    "gemma4_text": _LOCAL | _PER_LAYER | {"global_head_dim": 8},
    "glm4_moe_lite": _LATENT | _GROUPS,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": _MAMBA | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"head_dim": 8, "expand": 2, "num_heads": 8, "n_groups": 1, "state_size": 8},
    "minicpm3": _LATENT,
    "mistral with a window": {"sliding_window": 6},
}  # fmt: skip
"""Model type, with what follows it as a remark, and the keys of its configuration beside `_SMALL`."""

NOT_CAUSAL = ("bert", "big_bird", "camembert", "cpmant", "electra", "roberta", "roformer")
FAST = {"gemma2", "olmo_hybrid", "jamba", "bloom", "llama4_text", "bert"}
PACKED = (
    "afmoe", "apertus", "arcee", "aria_text", "biogpt", "bitnet", "ctrl", "cwm", "diffllama", "ernie4_5",
    "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "gemma", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2",
    "gpt_bigcode", "gpt_neox", "llama", "mistral", "mixtral", "nanochat", "olmo", "olmo2", "olmo3", "olmoe", "opt",
    "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
    "starcoder2", "deepseek_v3",
)  # fmt: skip
"""Architectures that must not lose the packed forward, which is faster."""


def tiny(name: str) -> Any:
    """Build the model with random weights, as transformers initialises them."""
    kind = CONFIG_MAPPING[name.split(" ")[0]]
    keys = {field.name for field in dataclasses.fields(kind)} | kind.attribute_map.keys()
    changes = {key: value for key, value in _SMALL.items() if key in keys} | ARCHITECTURES.get(name, {})
    config = kind(**{key: value for key, value in changes.items() if value is not None or key != "head_dim"})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return with_capped_attention(AutoModelForCausalLM.from_config(config)).eval()


def grown(name: str, dtype: str, lora: bool) -> TorchPolicy:
    model = tiny(name)
    if lora:
        model.to(getattr(torch, dtype))
    policy = TorchPolicy(model, PolicySettings(dtype=dtype, lora=LoraSettings(r=4) if lora else None))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for key, p in policy.model.named_parameters():
            if "lora_B" in key:
                p.normal_(0, 0.05)
            elif p.ndim > 1 and "norm" not in key:
                p.mul_(10)
    return policy


def errors(name: str, dtype: str, lora: bool) -> tuple[float, float]:
    """Mean absolute errors, in nats a token, of the trainer's log-probs and of the model's own in `dtype`."""
    policy, batch = grown(name, dtype, lora), make_batch(seed=1, longest=14)
    found, scored = policy.logprobs(batch)["old_logprobs"], batch.response_mask
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        rounded = own_logprobs(policy.model, batch)
    exact = own_logprobs(copy.deepcopy(policy.model).float(), batch)
    return float((found - exact)[scored].abs().mean()), float((rounded - exact)[scored].abs().mean())


def _slow(names: Any) -> list[Any]:
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", _slow(ARCHITECTURES))
def test_logprobs_are_those_of_the_models_own_forward(name):
    for dtype in ("float32", "bfloat16"):
        for lora in (False, True):
            error, rounding = errors(name, dtype, lora)
            # A router that rounds to another expert makes some tokens' errors larger than others'.
            assert error <= 3 * rounding + 2e-5, (dtype, lora)


@pytest.mark.parametrize("name", _slow(NOT_CAUSAL))
def test_a_model_that_sees_later_tokens_is_refused(name):
    with pytest.raises(ComponentError, match="is not causal: later tokens change the logits of earlier ones"):
        Forward(tiny(name), PolicySettings())


@pytest.mark.parametrize("name", _slow(PACKED))
def test_these_architectures_are_packed(name):
    for lora in (False, True):
        assert grown(name, "bfloat16", lora).forward.packed_limit > 0


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("qwen3_moe", "mlp.experts.gate_up_proj, model.layers.*.mlp.experts.down_proj, model.layers.*.mlp.gate.weight"),
        ("mixtral", "model.layers.*.mlp.experts.gate_up_proj"),
        ("deepseek_v3", "model.layers.*.mlp.shared_experts.gate_proj.weight"),
        ("qwen3_next", "model.layers.*.mlp.experts.gate_up_proj"),
        ("llama4_text", "model.layers.*.feed_forward.router.weight (61% of the weights)"),
        ("mamba", "backbone.layers.*.mixer.out_proj.weight"),
        ("nemotron_h", "mixer.out_proj.weight"),
        ("llama", ""),
    ],
)
def test_default_adapters_leave_out_experts_and_routers_and_say_so(name, left_out, caplog):
    with caplog.at_level(logging.WARNING):
        policy = grown(name, "float32", lora=True)
    assert left_out in caplog.text
    assert bool(caplog.text) == bool(left_out)
    assert policy.update(make_batch(), make_objective())["update/changed"] == 1
    assert policy.weights().keys() == tiny(name).state_dict().keys()
