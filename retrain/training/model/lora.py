"""LoRA adapters by peft. No other module imports peft."""

from __future__ import annotations

import logging
import re
from collections.abc import Generator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from retrain.errors import ComponentError, StorageError
from retrain.functional.seeds import derive_seed
from retrain.functional.weights import LowRank
from retrain.protocols import Ranks
from retrain.system.extras import library
from retrain.system.files import staged, writing
from retrain.training.model.abilities import InFloat32
from retrain.training.settings import POLICY_ADAPTER, LoraSettings

_LAYERS = (nn.Linear, nn.Embedding, Conv1D)
"""Layer types whose adapter is a product of two matrices."""


def inject(model: Any, settings: LoraSettings) -> Any:
    """Add trainable float32 adapters to a model in place and freeze its other weights.

    Args:
        model: a transformers causal LM.
        settings: rank, scale, dropout and target layers of the adapters.
    Returns:
        peft's wrapper of the model.
    Raises:
        MissingExtraError: peft is not installed.
        ComponentError: `target_modules` names no layer, a layer that is not linear, or one of two tied matrices.
    """
    peft = library("peft", "lora")
    # Looked at before peft replaces the layers by wrappers.
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    # Seeded, so that every rank starts with the same adapters.
    with _seeded(settings.seed), _on_cpu(model):
        try:
            wrapper = peft.get_peft_model(model, _config(model, settings))
        except ValueError as error:
            problem = f"[model.lora] target_modules: {error}"
            raise ComponentError(problem, 'name linear layers, or "all-linear"') from error
    if settings.target_modules == "all-linear" and (rest := _matrices_without_adapter(model)):
        logging.getLogger(__name__).warning('[model.lora] target_modules = "all-linear" leaves out %s', rest)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if tied and any(hasattr(layer, "base_layer") for layer in ends):
        raise ComponentError(
            "[model.lora] target_modules names the embedding or the head, and this model has one matrix for both",
            "remove them from target_modules",
        )
    if other := [name for name, layer in _adapted(model) if not isinstance(layer.get_base_layer(), _LAYERS)]:
        raise ComponentError(f"[model.lora] target_modules: {other[0]} is not a linear layer", "remove it")
    _cast_trainable(model)
    return wrapper


def add(wrapper: Any, name: str, settings: LoraSettings) -> None:
    """Add a second float32 adapter to the same frozen weights; the active adapter does not change.

    Args:
        wrapper: peft's wrapper of the model.
        name: name of the new adapter.
        settings: its settings.
    """
    with _seeded(settings.seed):
        wrapper.add_adapter(name, _config(wrapper.get_base_model(), settings))
    with active(wrapper, name):
        _cast_trainable(wrapper)


@contextmanager
def active(wrapper: Any, name: str) -> Generator[None]:
    """Make this adapter the only active and trainable one inside this block."""
    if wrapper.active_adapter == name:
        yield
        return
    before = wrapper.active_adapter
    wrapper.set_adapter(name)
    try:
        yield
    finally:
        wrapper.set_adapter(before)


def _config(model: Any, settings: LoraSettings) -> Any:
    from peft import LoraConfig

    targets = settings.target_modules
    if targets == "all-linear":
        targets = _linear_layers(model)
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=settings.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )
    if settings.target_modules == "all-linear":
        _keep_linear_layers(config, model)
    return config


def _linear_layers(model: Any) -> list[str]:
    """Return the names of the model's linear layers without the head, also of those that have an adapter."""
    modules = dict(model.named_modules())
    # Layers inside an adapter's wrapper are not layers of the model.
    within = tuple(f"{name}." for name, _ in _adapted(model))
    names: list[str] = []
    for name, module in modules.items():
        layer = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        # A fused Mamba kernel reads the matrix of `out_proj` itself, and would pass by an adapter.
        parent = modules[name.rpartition(".")[0]]
        fused = name.endswith(".out_proj") and hasattr(parent, "conv1d") and hasattr(parent, "in_proj")
        if not isinstance(layer, (nn.Linear, Conv1D)) or module is model.get_output_embeddings() or fused:
            continue
        if not name.startswith(within) and _is_product(layer):
            names.append(name)
    return names


@torch.no_grad()
def _is_product(layer: Any) -> bool:
    """Return True if a layer maps [1, in] to [1, out], unlike Llama 4's router, which is a subclass of nn.Linear."""
    if type(layer) in (nn.Linear, Conv1D):
        return True
    try:
        with InFloat32():
            out = layer(torch.zeros(1, layer.in_features, device=layer.weight.device))
    except Exception:  # the forward of a subclass may take anything
        return False
    return isinstance(out, Tensor) and out.shape == (1, layer.out_features)


def _keep_linear_layers(config: Any, model: Any) -> None:
    """Remove from a config the layers whose names peft takes for those of fused experts.

    Before version 5 of transformers, each expert had linear layers of its own. peft maps their names, such as
    gate_proj, to the fused parameters, for which it has no product of two matrices.
    """
    with suppress(ImportError):  # peft before 0.19 does not do that
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

        convert_peft_config_for_transformers(config, model, conversions=None)
        config.target_parameters, config.rank_pattern, config.alpha_pattern = None, {}, {}


def _matrices_without_adapter(model: Any) -> str:
    """Return the frozen matrices that get no adapter, apart from embedding and head, with their share of the weights.

    Layers of different numbers count as one; the result is "" if there are no such matrices.
    """
    covered = (nn.Embedding, *(type(layer) for _, layer in _adapted(model)))
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, covered) or module is model.get_output_embeddings() or ".base_layer" in name:
            continue
        for leaf, p in module.named_parameters(recurse=False):
            if p.ndim > 1 and ".lora_" not in name:
                # The same matrix of every layer is one entry of the warning.
                pattern = re.sub(r"\.\d+(?=\.)", ".*", f"{name}.{leaf}")
                sizes[pattern] = sizes.get(pattern, 0) + p.numel()
    share = sum(sizes.values()) / sum(p.numel() for p in model.parameters())
    return f"{', '.join(sizes)} ({share:.0%} of the weights)" if sizes else ""


@contextmanager
def _seeded(seed: int) -> Generator[None]:
    """Seed torch's CPU generator inside this block, and restore its state after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def _on_cpu(model: Any) -> Generator[None]:
    """Move weights from the meta device to the CPU inside this block, because peft creates adapters on their device.

    Each weight is a single 0 that is expanded to the weight's shape, so it takes no memory.
    """
    named = [(module._parameters, name) for module in model.modules() for name in module._parameters]
    empty = [
        (tensors, name, tensors[name]) for tensors, name in named if tensors[name] is not None and tensors[name].is_meta
    ]
    for tensors, name, p in empty:
        tensors[name] = nn.Parameter(torch.zeros((), dtype=p.dtype).expand(p.shape), False)
    yield
    for tensors, name, p in empty:
        tensors[name] = p.requires_grad_(False)


@contextmanager
def _own_random_numbers(device: torch.device, ranks: Ranks) -> Generator[None]:
    """Give each rank its own random numbers inside this block; after it, all ranks have equal generators again."""
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(derive_seed(seed, "rank", ranks.rank))
        yield


def _cast_trainable(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def updates(model: Any, adapter: str) -> dict[str, LowRank]:
    """Return the low-rank updates of an adapter by the names of the base model's weights; tensors may be views."""
    return {f"{name}.weight": _low_rank(layer, adapter) for name, layer in _adapted(model)}


def base_weights(model: Any) -> dict[str, Tensor]:
    """Return the frozen parameters by the base model's names."""
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
    """Write the policy's adapter in peft's format.

    The new folder replaces an earlier one when it is complete, so that readers never see a partial adapter.

    Args:
        wrapper: peft's wrapper of the model.
        path: the folder.
        base: path or name of the base model to record; "" keeps the recorded one.
        card: text of the README.md; "" writes none.
    Raises:
        StorageError: the folder cannot be written; an earlier one stays unchanged.
    """
    if base:
        wrapper.peft_config[POLICY_ADAPTER].base_model_name_or_path = base
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with staged(path, durable=False) as stage:
            stage.mkdir()
            # The embeddings are frozen. With peft's default it requests the hub, to see if they were resized.
            wrapper.save_pretrained(stage, selected_adapters=[POLICY_ADAPTER], save_embedding_layers=False)
            (stage / "README.md").unlink()  # peft writes an empty template
            if card:
                (stage / "README.md").write_text(card, encoding="utf-8")


def load(wrapper: Any, path: Path) -> None:
    """Load the policy's adapter from a folder in peft's format.

    Raises:
        StorageError: the file cannot be read, lacks weights, or has weights of other shapes.
    """
    from peft import set_peft_model_state_dict

    file = path / "adapter_model.safetensors"
    try:
        report = set_peft_model_state_dict(wrapper, load_file(file), adapter_name=POLICY_ADAPTER)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise StorageError(f"{file}: the adapter cannot be read ({error})") from error
    if missing := [name for name in report.missing_keys if f".{POLICY_ADAPTER}." in name]:
        raise StorageError(f"{file} has no weights for {', '.join(missing[:3])}")


@contextmanager
def training(model: Any, adapter: str, ranks: Ranks) -> Generator[None]:
    """Turn on the adapter's dropout inside this block; a model without adapters is unchanged.

    Every rank drops other units, because its rows differ. The generators of all ranks stay equal.
    """
    named = (module for name, module in model.named_modules() if name.endswith(f"lora_dropout.{adapter}"))
    dropouts = [module for module in named if isinstance(module, nn.Dropout)]  # with probability 0 it is an Identity
    for module in dropouts:
        module.train()
    try:
        with _own_random_numbers(model.device, ranks) if ranks.size > 1 and dropouts else nullcontext():
            yield
    finally:
        for module in dropouts:
            module.eval()
