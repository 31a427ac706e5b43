"""Second models, such as critics and teachers: their weights, optimizer settings and checks of the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from retrain.errors import ComponentError
from retrain.functional.seeds import derive_seed
from retrain.registry import Finding
from retrain.system.model_paths import RANDOM_MODEL, problem_with

if TYPE_CHECKING:
    from retrain.training.policy import TorchPolicy
    from retrain.training.settings import PolicySettings


def own_optimizer(policy: TorchPolicy, name: str, lr: float, max_grad_norm: float, epochs: int = 1) -> PolicySettings:
    """Return the policy's settings, with AdamW without weight decay at a constant rate as optimizer.

    Args:
        policy: the policy.
        name: name of the model, from which the seed of its LoRA adapter derives.
        lr: learning rate.
        max_grad_norm: limit of the gradient norm.
        epochs: optimizer steps on each batch; each uses all rows.
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


def trained_second_model(  # noqa: PLR0913 - four of them only pass through to the model
    policy: TorchPolicy,
    tokenizer: Any,
    name: str,
    settings: PolicySettings,
    path: str | None,
    key: str,
    *,
    has_values: bool = False,
) -> TorchPolicy:
    """Create a second trainable model, from the policy's current weights or from the model at a path.

    Args:
        policy: the policy, before its first update.
        tokenizer: the policy's tokenizer.
        name: name of the model's LoRA adapter.
        settings: settings of the model, such as those of `own_optimizer`.
        path: directory or hub name of the model; None: the policy's weights.
        key: configuration key of the path, for errors.
        has_values: the model computes values instead of log-probs.
    Raises:
        ComponentError: the model at the path has another tokenizer than the policy.
    """
    if path is None:
        return policy.sibling(name, settings, has_values=has_values)
    from retrain.training.policy import TorchPolicy

    model, source = load_second_model(policy, tokenizer, path, key)
    return TorchPolicy(model, settings, policy.ranks, source, has_values=has_values)


def check_path(path: str | None, config: Any, model: str) -> Iterator[Finding]:
    """Yield a finding if no second model can be trained from this path.

    Args:
        path: directory or hub name of the model; None: the policy's weights.
        config: the configuration of the run.
        model: name of the model in the message, such as "critic".
    """
    if path is None:
        return
    if config.model.lora is not None:
        problem = f"with [model.lora] the {model} is an adapter on the policy's base"
        yield Finding(("path",), problem, "remove it, or train without LoRA")
    elif path == RANDOM_MODEL:
        yield Finding(("path",), f'"{path}" has random weights: it is not a trained model', "remove it")
    elif problem := problem_with(path):
        yield Finding(("path",), *problem)


def load_second_model(policy: TorchPolicy, tokenizer: Any, path: str, key: str, **options: Any) -> tuple[Any, Any]:
    """Load the model at a path.

    Args:
        policy: the policy, whose device the model is moved to.
        tokenizer: the policy's tokenizer.
        path: directory or hub name of the model.
        key: configuration key of the path, for errors.
        options: `revision` and `dtype` of `load_model`.
    Returns:
        The model and None; or, with sharded weights, a model on the meta device and the source of its values.
    Raises:
        ComponentError: the model has another tokenizer than the policy.
    """
    from retrain.training.model.loading import load_model

    loaded = load_model(path, empty=policy.ranks.mesh is not None, **options)
    check_vocabulary(tokenizer.get_vocab(), loaded.tokenizer.get_vocab(), f"{key} = {path!r}")
    model: Any = loaded.model
    if loaded.source is None:
        model.to(policy.device)
    return model, loaded.source


def check_vocabulary(ours: Mapping[str, int], other: Mapping[str, int], name: str) -> None:
    """Compare the vocabularies, {token: id}, of two tokenizers.

    Args:
        ours: vocabulary of the policy. other: vocabulary of the other model.
        name: description of the other model, with which the error begins.
    Raises:
        ComponentError: a token has different ids; the message names the one with the lowest id.
    """
    if ours == other:
        return
    # The lowest id shows where the vocabularies begin to differ.
    tokens = {t: min(ours.get(t, len(ours)), other.get(t, len(other))) for t in ours.keys() | other.keys()}
    token = min((t for t in tokens if ours.get(t) != other.get(t)), key=lambda t: (tokens[t], t))
    problem = f"{name} has another tokenizer than the policy: token {token!r} has id "
    raise ComponentError(
        f"{problem}{other.get(token, 'none')} there and {ours.get(token, 'none')} here",
        "name a model with the policy's tokenizer",
    )
