"""Check which engines work on this machine, for `retrain doctor`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from retrain import registry
from retrain.errors import MissingExtraError
from retrain.protocols import Sampler
from retrain.types import Request, Sampling


def engine_status(name: str) -> str:
    """Sample one token with an engine from a tiny random model, and return the result as text.

    Returns:
        "works (...)" with the engine's description; else the missing extra, the required keys of its table, or
        "broken: ..." with the error.
    """
    component = registry.find("engine", name)
    try:
        component.require_extra()
    except MissingExtraError as error:
        return str(error)
    # Only the user knows a required key, such as the address of a server.
    if required := [key for key, info in component.schema.model_fields.items() if info.is_required()]:
        return f"needs [{component.table}] {', '.join(required)}"
    try:
        return f"works ({_sample(component.bind())})"
    except Exception as error:  # a broken installation may raise any exception
        return f"broken: {error}"


def _sample(engine: registry.Component) -> str:
    """Build the engine, sample one token and return the engine's description."""
    import torch

    from retrain.training.model.builtin_model import build_model, build_tokenizer

    tokenizer = build_tokenizer(["1 + 1 = 2\n"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = build_model(tokenizer).to(device)  # pyright: ignore[reportArgumentType]
    with tempfile.TemporaryDirectory() as folder:
        parts = {"model": model, "tokenizer": tokenizer, "seed": 0, "device": device, "run_dir": Path(folder)}
        parts["trainer_dtype"] = "float32"
        sampler: Sampler = engine.build(parts)
        try:
            sampler.load_weights(model.state_dict(), 0)
            sampler.sample([Request((3,), count=1, max_tokens=1, stream=0)], Sampling())
            return sampler.describe()
        finally:
            sampler.close()
