"""Tiny random models that vLLM serves on a CPU (heads of at least 32), and a comparison with the trainer."""

import os
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import tomli
import torch

from retrain.training.model.builtin_model import build_tokenizer
from tests.engines.models import random_model, scored

TABLE: dict[str, Any] = tomli.loads(Path(__file__).with_suffix(".toml").read_text())
MODELS = tuple(TABLE["models"])
# The first is longer than a block of vLLM's cache (128 tokens), so that its keys can be reused.
PROMPTS = [[3 + i % 90 for i in range(150)], [5, 9, 11], [7], [5, 9, 11]]


def tiny(name: str, **changes: Any) -> Any:
    """A model whose distributions are neither flat nor degenerate."""
    torch.manual_seed(0)
    return random_model(TABLE["models"][name] | changes, TABLE["small"])


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
