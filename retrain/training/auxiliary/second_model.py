"""What every model beside the policy needs: its weights, the policy's tokenizer, and an optimizer of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from retrain.errors import ComponentError
from retrain.functional.seeds import derive_seed
from retrain.protocols import Policy
from retrain.registry import Finding
from retrain.system.model_paths import RANDOM_MODEL, problem_with

if TYPE_CHECKING:
    from retrain.training.settings import PolicySettings


def own_optimizer(policy: Policy, name: str, lr: float, max_grad_norm: float, epochs: int = 1) -> PolicySettings:
    """Return the policy's settings of a forward, with AdamW without decay at a constant rate.

    Args:
        name: of the model; seeds its LoRA adapter.
        epochs: optimizer steps on each batch, every one on all of its rows.
    """
    lora = policy.settings.lora
    return replace(
        policy.settings,
        optimizer="adamw",
        lr=lr,
        weight_decay=0.0,
        warmup_steps=0,
        schedule="constant",
        max_grad_norm=max_grad_norm,
        epochs=epochs,
        minibatches=1,
        lora=lora and replace(lora, seed=derive_seed(lora.seed, name)),
    )


def trained_second_model(  # noqa: PLR0913 - each with its name
    policy: Policy,
    tokenizer: Any,
    name: str,
    settings: PolicySettings,
    path: str | None,
    key: str,
    *,
    has_values: bool = False,
) -> Policy:
    """Return a second model to train: one that starts where the policy started, or the model at a path.

    Args:
        name: of the model, by which LoRA calls its adapter.
        key: of the configuration that gives the path, for errors.
        has_values: it gives values in the place of log-probs.
    Raises:
        ComponentError: the model at the path has another tokenizer.
    """
    if path is None:
        return policy.sibling(name, settings, has_values=has_values)
    from retrain.training.policy import TorchPolicy

    model, source = load_second_model(policy, tokenizer, path, key)
    return TorchPolicy(model, settings, policy.ranks, source, has_values=has_values)


def check_path(path: str | None, config: Any, model: str) -> Iterator[Finding]:
    """Find a path from which no second model can be trained.

    Args:
        model: what it is called in the message.
    """
    if path is None:
        return
    if config.model.lora is not None:
        problem = f"with [model.lora] the {model} is an adapter on the policy's base"
        yield Finding(("path",), problem, "remove it, or train without LoRA")
    elif path == RANDOM_MODEL:
        yield Finding(("path",), f'"{path}" is made, not trained: it knows no more than the policy', "remove it")
    elif problem := problem_with(path):
        yield Finding(("path",), *problem)


def load_second_model(policy: Policy, tokenizer: Any, path: str, key: str, **options: Any) -> tuple[Any, Any]:
    """Return the model at a path, on the policy's device, and the source of its values where weights are sharded.

    Args:
        options: of `load_model`: revision, dtype.
    Raises:
        ComponentError: its tokenizer is not the policy's; the message names the first token that differs.
    """
    from retrain.training.model.loading import load_model

    loaded = load_model(path, empty=policy.ranks.mesh is not None, **options)
    check_vocabulary(tokenizer.get_vocab(), loaded.tokenizer.get_vocab(), f"{key} = {path!r}")
    model: Any = loaded.model
    if loaded.source is None:
        model.to(policy.device)
    return model, loaded.source


def check_vocabulary(own: Mapping[str, int], other: Mapping[str, int], name: str) -> None:
    """ComponentError if two tokenizers give one token different ids; it names the token of the lowest such id."""
    if own == other:
        return
    tokens = {token: min(own.get(token, len(own)), other.get(token, len(other))) for token in own.keys() | other.keys()}
    token = min((one for one in tokens if own.get(one) != other.get(one)), key=lambda one: (tokens[one], one))
    problem = f"{name} has another tokenizer than the policy: token {token!r} has id "
    raise ComponentError(
        f"{problem}{other.get(token, 'none')} there and {own.get(token, 'none')} here",
        "name a model with the policy's tokenizer",
    )
