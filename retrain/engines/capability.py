"""What an engine reads off a model's configuration: whether it can serve the model, and the weights to expect."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from retrain.errors import EngineError
from retrain.protocols import shapes_of
from retrain.system.model_paths import RANDOM_MODEL, model_location
from retrain.types import Request

if TYPE_CHECKING:
    from torch import Tensor

_FUSED_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_FUSED_ROPE = frozenset({"default", "linear", "llama3", "yarn"})

BESIDE_OR_MERGED = {None: "beside a bfloat16 base, merged into a float32 one"}
"""How an engine computes LoRA's update, by the value of its parameter `lora`, for `retrain explain`."""


def base_model(model: Any) -> Any:
    """The transformers model itself, with a PEFT wrapper taken off."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def choose_engine(model: Any) -> tuple[str, str]:
    """The engine that `engine = "auto"` means for this model, and why.

    Returns:
        ("torch", why) if the embedded engine can serve it, else ("transformers", why not).
    """
    reason = unsupported(model)
    if reason is None:
        return "torch", "the embedded engine serves this architecture"
    return "transformers", f"the embedded engine cannot serve it: {reason}"


def engines_at(path: str) -> tuple[str, ...]:
    """Every engine that `engine = "auto"` may choose for a model, judged by its path alone."""
    return ("torch",) if path == RANDOM_MODEL else ("torch", "transformers")


def choose_engine_at(path: str) -> tuple[str, str] | None:
    """`choose_engine` of `builtin:tiny`, or of a model in a directory or in the hub's local cache, without its weights.

    Runs no code that the model brings along and asks no network. None: it is not known.
    """
    if path == RANDOM_MODEL:
        return "torch", "the embedded engine serves builtin:tiny"
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model_location(path), local_files_only=True)
        with torch.device("meta"):
            return choose_engine(AutoModelForCausalLM.from_config(config))
    except Exception:  # loading the model reports what is wrong with it
        return None


def unsupported(model: Any) -> str | None:
    """Why the embedded engine cannot serve this transformers model; None if it can.

    It keeps one key and one value per token, layer and head, and computes softmax attention over all of them.
    A sliding window that is never shorter than the model's longest sequence is full attention.
    """
    model = base_model(model)
    config = getattr(model, "config", None)
    if not hasattr(model, "get_output_embeddings") or config is None:
        return "it is not a transformers model"
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        return "it is an encoder-decoder or attends to another sequence"
    if config.get_text_config() is not config:
        return "it sees more than text"
    if model.get_output_embeddings() is None:
        return "it has no language-model head"
    if getattr(model, "_is_stateful", False):
        return "it keeps a recurrent state instead of keys and values"
    if not getattr(model, "_supports_attention_backend", False):
        return f"the attention of {config.model_type} cannot be replaced by another function"
    return _unusual_attention(model)


def fusable(model: Any) -> bool:
    """Whether the rewritten forward of the Llama family computes this model, with LoRA in its layers alone."""
    model = base_model(model)
    if any(hasattr(edge, "base_layer") for edge in (model.get_input_embeddings(), model.get_output_embeddings())):
        return False
    config = model.config
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return (
        type(model).__module__.startswith("transformers.")  # a subclass may compute something else
        and config.model_type in _FUSED_FAMILIES
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in _FUSED_ROPE
        and rope.get("partial_rotary_factor", 1.0) == 1.0
    )


def positions(model: Any) -> float:
    """Tokens of prompt and completion together that the model knows; inf if it sets no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf


def _unusual_attention(model: Any) -> str | None:
    config = model.config
    kinds: set[str] = set(getattr(config, "layer_types", None) or ())
    if other := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"it has layers of kind {', '.join(other)}"
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds or not kinds
    if slides and window is not None and window < positions(model):
        return f"its attention slides over {window} tokens"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "it caps its attention scores"
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        return "its attention has sinks"
    return None


def full_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the full state dict of this model without its adapters."""
    import torch

    with torch.device("meta"):
        bare = type(model)._from_config(copy.deepcopy(model.config))
    return {name: tuple(value.shape) for name, value in bare.state_dict().items()}


def check_weights(expected: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor]) -> None:
    """EngineError naming what is missing, unknown or of another shape."""
    found = shapes_of(weights)
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name} is unknown" for name in found if name not in expected]
    for name, shape in expected.items():
        if name in found and found[name] != shape:
            wrong.append(f"{name} has shape {list(found[name])}, not {list(shape)}")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise EngineError(
            f"these weights are not the sampler's: {'; '.join(wrong[:3])}{more}; "
            "send the full state_dict() of the merged model, tied entries included"
        )


def check_requests(requests: Sequence[Request], version: int | None, limit: float, holder: str, fix: str) -> int:
    """The version of an engine's weights, which can serve these requests.

    Raises:
        EngineError: there are no weights, or a context is empty, or with its completion longer than the `limit`
            tokens that the holder has room for.
    """
    if version is None:
        raise EngineError("the sampler has no weights: call load_weights first")
    if not all(len(request.ids) for request in requests):
        raise EngineError("a prompt has no tokens: there is nothing to continue; check the task and its template")
    longest = max(requests, key=lambda request: len(request.ids) + request.max_tokens, default=None)
    if longest is not None and len(longest.ids) + longest.max_tokens > limit:
        raise EngineError(
            f"a prompt of {len(longest.ids)} tokens and max_tokens = {longest.max_tokens} need "
            f"{len(longest.ids) + longest.max_tokens} positions, but {holder} has {limit:g}; {fix}"
        )
    return version
