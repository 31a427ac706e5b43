"""Tiny random models of several architectures, and prompts of unequal length."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli
import torch
import transformers as hf

from retrain.types import Request, Sampling

TABLE: dict[str, Any] = tomli.loads(Path(__file__).with_suffix(".toml").read_text())
VOCABULARY = TABLE["small"]["vocab_size"]
GROUPED: dict[str, Any] = TABLE["small"] | {"num_key_value_heads": 2}
MODELS = tuple(TABLE["models"])
FUSED = ("qwen3", "qwen2", "llama", "mistral")
PROMPTS = [[5, 9, 11], [7], [3, 4, 6, 8, 10, 12, 14], [13, 2]]
EVEN = [[5, 9, 11], [3, 4, 6]]


def random_model(settings: dict[str, Any], shape: dict[str, Any]) -> Any:
    """A model of a family of transformers: its configuration is the shape, GPT-2's apart, and what is set beside it."""
    values = {key: None if value == "none" else value for key, value in settings.items()}  # TOML has no null
    family = values.pop("family")
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    config = getattr(hf, f"{family}Config")(**({} if family == "GPT2" else shape) | values)
    return getattr(hf, f"{family}{head}")(config).eval()


def tiny(name: str, **changes: Any) -> Any:
    """A model whose distributions are neither flat nor degenerate, with norms and biases that matter."""
    torch.manual_seed(0)
    built = random_model(TABLE["models"][name] | changes, TABLE["small"])
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
