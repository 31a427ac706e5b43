"""Tiny random models that vLLM serves on a CPU (heads of at least 32), and a comparison with the trainer."""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf

from retrain.training.model.builtin_model import build_tokenizer
from tests.engines.models import LLAMA3_ROPE, scored

VOCABULARY = 96
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
QWEN3 = SMALL | {"head_dim": 32}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512, "initializer_range": 0.2}
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM, QWEN3 | {"tie_word_embeddings": True}),
    "qwen3-untied": (hf.Qwen3Config, hf.Qwen3ForCausalLM, QWEN3 | {"tie_word_embeddings": False}),
    "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM, SMALL | {"tie_word_embeddings": True}),
    "llama": (hf.LlamaConfig, hf.LlamaForCausalLM, SMALL | {"rope_parameters": LLAMA3_ROPE}),
    "gpt2": (hf.GPT2Config, hf.GPT2LMHeadModel, GPT2),
    "qwen3-moe": (
        hf.Qwen3MoeConfig,
        hf.Qwen3MoeForCausalLM,
        QWEN3 | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
}
# The first is longer than a block of vLLM's cache (128 tokens), so that its keys can be reused.
PROMPTS = [[3 + i % 90 for i in range(150)], [5, 9, 11], [7], [5, 9, 11]]


def tiny(name: str, **changes: Any) -> Any:
    """A model whose distributions are neither flat nor degenerate."""
    config, model, settings = MODELS[name]
    torch.manual_seed(0)
    return model(config(**(settings | changes))).eval()


def worst_error(model: Any, prompts: Any, groups: Any, temperature: float) -> float:
    """Largest difference in nats between completions' log-probs and the trainer's model."""
    return max(
        (scored(model, prompt, row.ids, temperature) - torch.tensor(row.logprobs)).abs().max().item()
        for prompt, group in zip(prompts, groups, strict=True)
        for row in group
    )


def process_state() -> dict[str, Any]:
    """Everything of this process that vLLM changes if it is let."""
    return {
        "python": random.getstate(),
        "numpy": repr(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "dtype": torch.get_default_dtype(),
        "environment": dict(os.environ),
    }


def saved(folder: Path, name: str, **changes: Any) -> Path:
    """A random model with the built-in's tokenizer as a directory."""
    tokenizer = build_tokenizer(f"{i}+{i}={2 * i}\n" for i in range(100))
    tiny(name, vocab_size=128, eos_token_id=2, **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tell_apart(completion: str) -> float:
    """A reward that differs between any two texts, so that every group trains."""
    return zlib.crc32(completion.encode()) / 2**32
