"""LoRA adapters through peft, which is imported here and nowhere else."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from retrain.errors import ComponentError, StorageError
from retrain.functional.seeds import derive_seed
from retrain.protocols import Ranks
from retrain.system.extras import library
from retrain.system.files import staged, writing
from retrain.training.settings import LoraSettings
from retrain.weights import LowRank

POLICY = "default"
"""Name of the policy's own adapter, as peft calls the first one."""
_LAYERS = (nn.Linear, nn.Embedding, Conv1D)
"""Layers whose update is one product of two matrices."""


def inject(model: Any, settings: LoraSettings) -> Any:
    """Put trainable float32 adapters into the model, freeze the rest; returns peft's wrapper of the same model.

    Raises:
        MissingExtraError: peft is not installed.
        ComponentError: no layer has a name in `target_modules`, or one is tied to another.
    """
    peft = library("peft", "lora")
    with _seeded(settings.seed), _shaped(model):
        try:
            wrapper = peft.get_peft_model(model, _config(settings))
        except ValueError as error:
            problem = f"[model.lora] target_modules: {error}"
            raise ComponentError(problem, 'name linear layers, or "all-linear"') from error
    edges = (model.get_input_embeddings(), model.get_output_embeddings())
    if model.config.tie_word_embeddings and any(hasattr(edge, "base_layer") for edge in edges):
        raise ComponentError(
            "[model.lora] target_modules names the embedding or the head, and this model has one matrix for both",
            "leave them out",
        )
    if other := [name for name, layer in _adapted(model) if not isinstance(layer.get_base_layer(), _LAYERS)]:
        raise ComponentError(f"[model.lora] target_modules: {other[0]} is not a linear layer", "leave it out")
    _float(model)
    return wrapper


def add(wrapper: Any, name: str, settings: LoraSettings) -> None:
    """Add a float32 adapter on the same frozen weights; the one in force stays in force."""
    with _seeded(settings.seed):
        wrapper.add_adapter(name, _config(settings))
    with active(wrapper, name):
        _float(wrapper)


@contextmanager
def active(wrapper: Any, name: str) -> Generator[None]:
    """The adapter in force, and the only one that gradients reach, inside this block; without a wrapper, nothing."""
    if wrapper is None or wrapper.active_adapter == name:
        yield
        return
    before = wrapper.active_adapter
    wrapper.set_adapter(name)
    try:
        yield
    finally:
        wrapper.set_adapter(before)


def _config(settings: LoraSettings) -> Any:
    from peft import LoraConfig

    targets = settings.target_modules
    return LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=settings.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )


@contextmanager
def _seeded(seed: int) -> Generator[None]:
    """Random numbers of this seed inside this block; the global generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def _shaped(model: Any) -> Generator[None]:
    """Empty weights stand on the processor inside this block, one number each: peft puts adapters where they are."""
    every = [(module._parameters, name) for module in model.modules() for name in module._parameters]
    empty = [(found, name, found[name]) for found, name in every if found[name] is not None and found[name].is_meta]
    for found, name, p in empty:
        found[name] = nn.Parameter(torch.zeros((), dtype=p.dtype).expand(p.shape), False)
    yield
    for found, name, p in empty:
        found[name] = p.requires_grad_(False)


@contextmanager
def _apart(device: torch.device, ranks: Ranks) -> Generator[None]:
    """Random numbers of each rank's own inside this block; all ranks draw one number from the global generator."""
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(derive_seed(seed, "rank", ranks.rank))
        yield


def _float(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def updates(model: Any, adapter: str) -> dict[str, LowRank]:
    """What this adapter adds, by the names of the base model's weights; views of the parameters."""
    return {f"{name}.weight": _low_rank(layer, adapter) for name, layer in _adapted(model)}


def base_weights(model: Any) -> dict[str, Tensor]:
    """The frozen parameters under the base model's names."""
    state = model.state_dict(keep_vars=True)
    return {key.replace(".base_layer.", "."): value for key, value in state.items() if ".lora_" not in key}


def _adapted(model: Any) -> list[tuple[str, Any]]:
    return [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "get_delta_weight")]


def _low_rank(layer: Any, adapter: str) -> LowRank:
    if adapter in layer.lora_embedding_A:
        down, up = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
    else:
        down, up = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    transposed = isinstance(layer.get_base_layer(), (nn.Embedding, Conv1D))
    return LowRank(up.detach() * layer.scaling[adapter], down.detach(), transposed)


def save(wrapper: Any, path: Path, base: str, card: str = "") -> None:
    """Write the policy's adapter in peft's format, for the base model at `base` (unless empty), with its README.md.

    The folder replaces the last one when it is complete: nobody reads half of one.

    Raises:
        StorageError: it cannot be written; the last one stays, and nothing of this one.
    """
    if base:
        wrapper.peft_config[POLICY].base_model_name_or_path = base
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with staged(path, durable=False) as stage:
            stage.mkdir()
            # The embeddings are frozen; left to itself, peft asks the hub every time whether they have been resized.
            wrapper.save_pretrained(stage, selected_adapters=[POLICY], save_embedding_layers=False)
            (stage / "README.md").unlink()  # peft's is an empty form
            if card:
                (stage / "README.md").write_text(card, encoding="utf-8")


def load(wrapper: Any, path: Path) -> None:
    """Take the policy's adapter from peft's format; StorageError if it cannot be read or is of another shape."""
    from peft import set_peft_model_state_dict

    file = path / "adapter_model.safetensors"
    try:
        report = set_peft_model_state_dict(wrapper, load_file(file), adapter_name=POLICY)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise StorageError(f"{file}: the adapter cannot be read ({error})") from error
    if missing := [name for name in report.missing_keys if f".{POLICY}." in name]:
        raise StorageError(f"{file} has no weights for {', '.join(missing[:3])}")


@contextmanager
def training(model: Any, adapter: str, ranks: Ranks) -> Generator[None]:
    """The adapter's dropout is active inside this block; a model without adapters is left as it is.

    Ranks have other rows, so each drops other units: the global generators are equal on all ranks, and stay so.
    """
    named = (one for name, one in model.named_modules() if name.endswith(f"lora_dropout.{adapter}"))
    dropouts = [one for one in named if isinstance(one, nn.Dropout)]  # without dropout it is an Identity
    for module in dropouts:
        module.train()
    try:
        with _apart(model.device, ranks) if ranks.size > 1 and dropouts else nullcontext():
            yield
    finally:
        for module in dropouts:
            module.eval()
