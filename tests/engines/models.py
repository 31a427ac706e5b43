"""Tiny random models of several architectures, and prompts of unequal length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf

from retrain.types import Request, Sampling

VOCABULARY = 48
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
GROUPED: dict[str, Any] = SMALL | {"num_key_value_heads": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM, GROUPED | {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM, GROUPED | {"tie_word_embeddings": False}),
    "llama": (
        hf.LlamaConfig,
        hf.LlamaForCausalLM,
        GROUPED | {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE},
    ),
    "mistral": (hf.MistralConfig, hf.MistralForCausalLM, GROUPED | {"sliding_window": None}),
    "gpt2": (
        hf.GPT2Config,
        hf.GPT2LMHeadModel,
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
        | {"pad_token_id": 0},
    ),
    "gpt_neox": (hf.GPTNeoXConfig, hf.GPTNeoXForCausalLM, SMALL),
    "qwen3_moe": (
        hf.Qwen3MoeConfig,
        hf.Qwen3MoeForCausalLM,
        GROUPED | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
}
FUSED = ("qwen3", "qwen2", "llama", "mistral")
PROMPTS = [[5, 9, 11], [7], [3, 4, 6, 8, 10, 12, 14], [13, 2]]
EVEN = [[5, 9, 11], [3, 4, 6]]


def tiny(name: str, **changes: Any) -> Any:
    """A model whose distributions are neither flat nor degenerate, with norms and biases that matter."""
    config, model, settings = MODELS[name]
    torch.manual_seed(0)
    built = model(config(**(settings | changes))).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return built


def flat(groups: list[list[Any]]) -> list[Any]:
    """The completions of all groups in one list."""
    return [row for group in groups for row in group]


@torch.no_grad()
def scored(model: Any, prompt: list[int], ids: tuple[int, ...], temperature: float) -> torch.Tensor:
    """Log-probs [len(ids)] of a completion by one unpadded forward of the trainer's model."""
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float()
    return (logits / (temperature or 1.0)).log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


@dataclass(frozen=True)
class Asked(Sampling):
    """A sampling with the same size for every prompt."""

    group_size: int = 1
    max_tokens: int = 1


def ask(prompts, asked):
    """A request for each prompt; its stream is its place."""
    return [Request(tuple(ids), asked.group_size, asked.max_tokens, stream) for stream, ids in enumerate(prompts)]


def sample(engine, prompts, asked):
    """What an engine samples of each prompt."""
    return engine.sample(ask(prompts, asked), asked)
