"""Small random models of several architectures, and batches for them."""

from pathlib import Path
from typing import Any

import tomli
import torch

from retrain.algorithms.graph.objective import Objective
from retrain.registry import find
from retrain.training.policy import TorchPolicy
from retrain.training.settings import LoraSettings, PolicySettings
from retrain.types import Batch
from tests.engines.models import random_model

TABLE: dict[str, Any] = tomli.loads(Path(__file__).with_suffix(".toml").read_text())
VOCABULARY = TABLE["shape"]["vocab_size"]
MODELS = tuple(TABLE["models"])


def make_model(kind: str = "qwen3", seed: int = 0):
    """A model with weights large enough that its distributions are far from uniform."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = random_model(TABLE["models"][kind], TABLE["shape"])
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.data.normal_(0, 0.3)
        return model


def make_batch(rows: int = 8, seed: int = 0, dead: int = 0, longest: int = 9) -> Batch:
    """Random rows in groups of four with one prompt each; the last `dead` rows have no advantage."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    group = torch.arange(rows) // 4
    prompt, response = draw(1, 4, rows)[group], draw(1, longest, rows)
    total = prompt + response
    columns = torch.arange(int(total.max()))[None]
    mask = columns < total[:, None]
    scored = mask & (columns >= prompt[:, None])
    ids = draw(0, VOCABULARY, *mask.shape)
    ids = ids[4 * group].where(columns < prompt[:, None], ids) * mask
    advantages = torch.randn(rows, generator=generator)
    advantages[rows - dead :] = 0
    blank = torch.zeros(mask.shape)
    return Batch(
        input_ids=ids,
        attention_mask=mask,
        response_mask=scored,
        sampler_logprobs=(blank - 3).where(scored, 0.0),
        rewards=torch.zeros(rows),
        correct=torch.zeros(rows, dtype=torch.bool),
        lengths=response,
        group_ids=group,
        is_expert=torch.zeros(rows, dtype=torch.bool),
        advantages=(advantages[:, None] + blank).where(scored, 0.0),
        max_tokens=longest,
    )


def make_objective(*names: str, reduction: str = "token_mean") -> Objective:
    """The named loss terms, each with weight 1."""
    terms = [find("loss", name).bind({"weight": 1.0}) for name in names or ("ppo_clip",)]
    return Objective(terms, find("reduction", reduction).bind({}))


def train_adapter(
    kind: str = "qwen3", lr: float = 1e-5, dtype: str = "bfloat16", steps: int = 20, **lora
) -> TorchPolicy:
    """A policy with LoRA after some updates; its base is held in `dtype`."""
    settings = PolicySettings(lr=lr, dtype=dtype, lora=LoraSettings(**{"r": 4, "alpha": 8, **lora}))
    policy = TorchPolicy(make_model(kind).to(getattr(torch, dtype)), settings)
    for seed in range(20):
        policy.update(make_batch(seed=seed), make_objective())
    return policy


def exact_updates(policy: TorchPolicy) -> dict[str, torch.Tensor]:
    """(alpha / r) B A of every adapted matrix in float64, by its name and in the layout of the state dict."""
    found, lora = {}, policy.settings.lora
    for name, value in policy.state_dict()["model"].items():
        if ".lora_B." in name:
            down = policy.state_dict()["model"][name.replace("lora_B", "lora_A")]
            update = lora.alpha / lora.r * value.double() @ down.double()
            layer = name.split(".lora_B.")[0]
            conv = type(policy.model.get_submodule(layer).get_base_layer()).__name__ == "Conv1D"
            found[f"{layer}.weight"] = update.T if conv else update
    return found


def values_and_gradients(forward, model, batch):
    """The log-probs of a batch, and each parameter's gradient for an objective of log-probs and entropies."""
    with forward.attention(batch.input_ids.shape[1]):
        columns = forward.columns(batch)
        (columns["logprobs"] * batch.advantages + columns["entropy"]).sum().backward()
    found = [columns["logprobs"].detach(), *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    return found
