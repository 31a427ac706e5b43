"""The shapes that the benchmarks measure: model and batch of one step; torch is imported when a model is built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPT = 8
"""Tokens of a prompt, about."""


@dataclass(frozen=True)
class Shape:
    """A model of the Llama family with tied embeddings, and a step of it.

    Attributes:
        layers, width, heads, key_heads, head_width, inner, vocabulary: of the model.
        prompts, group, tokens: prompts of a step, completions of each, and their longest length.
    """

    layers: int
    width: int
    heads: int
    key_heads: int
    head_width: int
    inner: int
    vocabulary: int
    prompts: int
    group: int
    tokens: int

    def model(self) -> Any:
        """The model with random weights; head norms (Qwen3) in the smallest only, which is the built-in one."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        make, config = (Qwen3ForCausalLM, Qwen3Config) if self.layers == 2 else (LlamaForCausalLM, LlamaConfig)
        return make(
            config(
                num_hidden_layers=self.layers,
                hidden_size=self.width,
                num_attention_heads=self.heads,
                num_key_value_heads=self.key_heads,
                head_dim=self.head_width,
                intermediate_size=self.inner,
                vocab_size=self.vocabulary,
                max_position_embeddings=4096,
                tie_word_embeddings=True,
            )
        )

    def save(self, folder: Path) -> Path:
        """The model with a tokenizer that has an entry for every id, in transformers format."""
        import json

        from tokenizers import Tokenizer

        from retrain.data.addition import Addition
        from retrain.training.model.builtin_model import build_tokenizer

        task = Addition(0)
        tokenizer: Any = build_tokenizer([str(task.problem(index).prompt) for index in range(500)])
        made = json.loads(tokenizer.backend_tokenizer.to_str())
        words = made["model"]["vocab"]
        made["model"]["vocab"] = words | {f"<{index}>": index for index in range(len(words), self.vocabulary)}
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(made))
        self.model().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder


SHAPES = {
    "1.4M": Shape(2, 256, 8, 1, 32, 704, 128, prompts=16, group=8, tokens=64),
    "20M": Shape(10, 384, 6, 2, 64, 1152, 8192, prompts=8, group=8, tokens=64),
    "135M": Shape(30, 576, 9, 3, 64, 1536, 49152, prompts=2, group=8, tokens=128),
}


def spread(completion: str) -> float:
    """A reward that differs between nearly all random completions, so that every row is live."""
    return sum(map(ord, completion)) % 1000 / 1000
