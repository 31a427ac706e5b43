"""Read models and tokenizers from directories and from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from retrain.errors import ComponentError, StorageError
from retrain.functional.weights import ParameterReader
from retrain.system.files import check_sums, expanded
from retrain.system.model_paths import model_location, packaged, problem_with
from retrain.system.records import read_json

_KERNELS = (
    *(None, "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "grouped_mm", "batched_mm"),
)
"""Attention implementations of transformers itself or of packages that the user installs."""


def read(
    path: str, revision: str | None = None, dtype: str = "float32", trust_remote_code: bool = False, empty: bool = False
) -> tuple[Any, Any, ParameterReader | None]:
    """Return model and tokenizer, and a reader of the model's values if it is empty; see `load_model`."""
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    location = _checked(path)
    try:
        if not trust_remote_code:
            _refuse_kernels(path, PreTrainedConfig.get_config_dict(location, revision=revision)[0])
        tokenizer: Any = AutoTokenizer.from_pretrained(location, **options)
        if empty and (read_model := _empty(location, dtype, options)) is not None:
            return read_model[0], tokenizer, read_model[1]
        loading: Any = AutoModelForCausalLM.from_pretrained
        model, report = loading(location, dtype=getattr(torch, dtype), output_loading_info=True, **options)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise _explained(path, error) from error
    except Exception as error:  # safetensors has its own class for truncated or altered files
        if type(error).__module__.split(".")[0] not in {"safetensors_rust", "safetensors", "builtins", "_pickle"}:
            raise
        why = str(error).partition(". ")[0]  # torch then suggests an unsafe way to load pickles
        raise StorageError(f"{path}: the weights cannot be read ({why}); copy or download the model again") from error
    _store_tie(model)
    if report["missing_keys"]:
        # transformers only warns, and uses random numbers.
        raise StorageError(f"{path} has no weights for {', '.join(sorted(report['missing_keys'])[:3])}")
    return model, tokenizer, None


def _store_tie(model: PreTrainedModel) -> None:
    """Write into the config if embedding and head share their weights.

    A file may hold a head of its own although its config calls it tied. transformers then keeps both, and the next
    program that loads the saved model would drop the trained head.
    """
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if embedding is not None and head is not None:
        tied = head.weight is embedding.weight
        for config in {id(config): config for config in (model.config, model.config.get_text_config())}.values():
            config.tie_word_embeddings = tied


def stored_weights(path: str, held: torch.dtype, **options: Any) -> Mapping[str, Tensor] | None:
    """Return a model's stored weights in float32; None if the weights in memory are the same.

    Args:
        held: dtype of the weights in memory.
        options: see `load_model`.
    """
    location = model_location(path)
    config: Any = AutoConfig.from_pretrained(location, **options)
    if held in (torch.float32, config.dtype):
        return None
    return read(path, **options)[0].state_dict()


def _checked(path: str) -> str:
    """Check a model's files against their hashes, if there are any, and return its location."""
    if problem := problem_with(path):
        raise ComponentError(*problem)
    location, model = model_location(path), packaged(path)
    for index in Path(location).glob("*.index.json"):  # transformers would follow a path out of the directory
        files = read_json(index).get("weight_map")
        if isinstance(files, dict) and "/" in str([*files.values()]):
            raise StorageError(f"{index} names weights in another directory; export or download the model again")
    check_sums(Path(location), "export the model again" if model is None else f"run `retrain model fetch {model.name}`")
    return location


def _refuse_kernels(path: str, config: Mapping[str, Any]) -> None:
    """Raise ComponentError if a config.json names code on the hub, which transformers would run."""
    for key, value in config.items():
        if isinstance(value, Mapping) and not key.endswith("_implementation"):
            _refuse_kernels(path, value)
        for name in value.values() if isinstance(value, Mapping) else [value]:
            if key.strip("_").endswith(("_implementation", "_implementation_internal")) and name not in _KERNELS:
                raise ComponentError(
                    f'{path}: its config.json sets {key} = "{name}", which is code from the hub',
                    "read it, then set [model] trust_remote_code = true; or remove the key",
                )


def _empty(path: str, dtype: str, options: dict[str, Any]) -> tuple[Any, ParameterReader] | None:
    """Build a model on the meta device, and return it with a reader of its values.

    Returns None if the files have other parameter names or shapes.
    """
    config: Any = AutoConfig.from_pretrained(path, **options)
    kind: Any = AutoModelForCausalLM
    with _without_values():
        made = kind.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=options["trust_remote_code"])
    with suppress(OSError):  # a model may have no generation_config
        made.generation_config = GenerationConfig.from_pretrained(path, revision=options["revision"])
    local, patterns = expanded(path), ["*.safetensors", "*.json"]
    folder = local if local.is_dir() else snapshot_download(path, revision=options["revision"], allow_patterns=patterns)
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            names = list(opened.keys())
            files |= dict.fromkeys(names, file)
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in names}

    def source(name: str) -> Tensor:
        with safe_open(files[name], "pt") as opened:
            return opened.get_tensor(name)

    parameters = {name: p for name, p in made.named_parameters()}
    # A file may hold a tied parameter under both names, with different values: `load_model` compares them.
    twice = any(name in shapes and name not in parameters for name, _ in made.named_parameters(remove_duplicate=False))
    fits = not twice and all(shapes.get(name) == tuple(p.shape) for name, p in parameters.items())
    return (made, source) if fits else None


@contextmanager
def _without_values() -> Generator[None]:
    """Create parameters on the meta device inside this block, but buffers with their values."""
    register = nn.Module.register_parameter

    def empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # a meta parameter is tied to an earlier one
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = empty
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _explained(path: str, error: Exception) -> ComponentError | StorageError:
    """Convert an error of transformers into one line with a fix."""
    text = " ".join(str(error).split())
    # Some of these messages are pages long.
    first = text[:300]
    if "trust_remote_code" in text:
        return ComponentError(
            f"{path} needs its own Python code", "read that code, then set [model] trust_remote_code = true"
        )
    if any(sign in text for sign in ("offline", "couldn't connect", "Max retries", "Connection", "resolve")):
        return StorageError(
            f"there is no directory {path}, and the hub cannot be reached ({first}); set [model] path to a directory"
        )
    if any(sign in text for sign in ("not a valid model identifier", "not a local folder", "gated", "404", "401")):
        problem = f"there is no directory {path}, and no such model on the hub ({first})"
        return ComponentError(problem, "check the name, revision and access")
    if isinstance(error, (OSError, RuntimeError)):
        return StorageError(f"{path}: the model cannot be read ({first})")
    problem = f"{path} cannot be loaded as a causal language model ({first})"
    return ComponentError(problem, "use an architecture that transformers supports")


def is_here(path: str, revision: str | None) -> bool:
    """Return True if a model is in this directory or in the hub's local cache, without a request."""
    if (Path(model_location(path)) / "config.json").is_file():
        return True
    with suppress(ValueError):  # a deleted directory may not be a valid hub name
        return isinstance(try_to_load_from_cache(path, "config.json", revision=revision), str)
    return False
