"""Checks of a model's configuration: which engine can serve it, and which weights it expects."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from retrain.errors import EngineError
from retrain.system.model_paths import RANDOM_MODEL, model_location, positions
from retrain.types import Request

if TYPE_CHECKING:
    from torch import Tensor

_FUSED_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_FUSED_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Model types and rotary embeddings that `FusedDecoder` supports."""

UNMERGED_OR_MERGED: Mapping[str | None, str] = {None: "unmerged with a bfloat16 base, merged into a float32 one"}
"""Description of how an engine applies LoRA, by its parameter `lora`; shown by `retrain explain`."""


def base_model(model: Any) -> Any:
    """Return the transformers model without its PEFT wrapper, if it has one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def choose_engine(model: Any) -> tuple[str, str]:
    """Choose the engine for this model under `engine = "auto"`.

    Returns:
        ("torch", reason) if the embedded engine can serve the model, else ("transformers", reason).
    """
    reason = unsupported(model)
    if reason is None:
        return "torch", "the embedded engine serves this architecture"
    return "transformers", f"the embedded engine cannot serve it: {reason}"


def engines_at(path: str) -> tuple[str, ...]:
    """Return the engines that `engine = "auto"` may choose, given only the model's path."""
    return ("torch",) if path == RANDOM_MODEL else ("torch", "transformers")


def choose_engine_at(path: str) -> tuple[str, str] | None:
    """Apply `choose_engine` to the configuration of a local model, without loading its weights.

    The model is `builtin:tiny`, a directory, or in the hub's local cache. Neither code from the
    model's repository nor the network is used.

    Returns:
        The result of `choose_engine`; None if the model's configuration cannot be read.
    """
    if path == RANDOM_MODEL:
        return "torch", "the embedded engine serves builtin:tiny"
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model_location(path), local_files_only=True)
        with torch.device("meta"):
            # The config may name an attention implementation that is code from the hub.
            return choose_engine(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    except Exception:  # loading the model later reports the error
        return None


def unsupported(model: Any) -> str | None:
    """Return the reason why the embedded engine cannot serve this model; None if it can.

    The engine caches one key and one value per token, layer and head, and computes softmax
    attention over all of them. A sliding window at least as long as the model's longest sequence
    is full attention.
    """
    model = base_model(model)
    config = getattr(model, "config", None)
    if not hasattr(model, "get_output_embeddings") or config is None:
        return "it is not a transformers model"
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        return "it is an encoder-decoder or attends to another sequence"
    if config.get_text_config() is not config:
        return "it is multimodal"
    if model.get_output_embeddings() is None:
        return "it has no language-model head"
    if getattr(model, "_is_stateful", False):
        return "it keeps a recurrent state instead of keys and values"
    if not getattr(model, "_supports_attention_backend", False):
        return f"the attention of {config.model_type} cannot be replaced by another function"
    return _unusual_attention(model)


def fusable(model: Any) -> bool:
    """Return True if `FusedDecoder` can compute this model.

    It supports the Llama family with LoRA in the layers, but not in the embedding or the head.
    """
    model = base_model(model)
    if any(hasattr(layer, "base_layer") for layer in (model.get_input_embeddings(), model.get_output_embeddings())):
        return False
    config = model.config
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return (
        type(model).__module__.startswith("transformers.")  # a user's subclass may override the forward
        and config.model_type in _FUSED_FAMILIES
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in _FUSED_ROPE
        and rope.get("partial_rotary_factor", 1.0) == 1.0
    )


def _unusual_attention(model: Any) -> str | None:
    """Return the reason why a model's attention is not softmax attention over all tokens; None if it is."""
    config = model.config
    kinds: set[str] = set(getattr(config, "layer_types", None) or ())
    if other := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"it has layers of kind {', '.join(other)}"
    window = getattr(config, "sliding_window", None)
    # A config without kinds has one window for all layers.
    slides = "sliding_attention" in kinds or not kinds
    if slides and window is not None and window < positions(model):
        return f"its attention slides over {window} tokens"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "it caps its attention scores"
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        return "its attention has sinks"
    return None


def full_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the model's full state dict, without adapters."""
    import torch

    with torch.device("meta"):
        # A copy, because building a model writes into its config.
        bare = type(model)._from_config(copy.deepcopy(model.config))
    return {name: tuple(value.shape) for name, value in bare.state_dict().items()}


def check_weights(expected: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor]) -> None:
    """Raise EngineError if weights are missing, unknown or of another shape than expected."""
    from retrain.functional.weights import as_lazy  # imports torch, and a configuration's check must not

    shapes = as_lazy(weights).shapes
    wrong = [f"{name} is missing" for name in expected if name not in shapes]
    wrong += [f"{name} is unknown" for name in shapes if name not in expected]
    for name, shape in expected.items():
        if name in shapes and shapes[name] != shape:
            wrong.append(f"{name} has shape {list(shapes[name])}, not {list(shape)}")
    if wrong:
        # Another model differs in hundreds of names.
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise EngineError(
            f"these weights do not fit the sampler's model: {'; '.join(wrong[:3])}{more}; "
            "send the full state_dict() of the merged model, tied entries included"
        )


def check_requests(requests: Sequence[Request], version: int | None, limit: float, holder: str, fix: str) -> int:
    """Check that an engine can serve these requests, and return the version of its weights.

    Args:
        requests: the requests.
        version: version of the engine's weights; None if it has none.
        limit: largest number of tokens of a context with its completion.
        holder, fix: what has this limit, and the fix, for the error message.
    Raises:
        EngineError: there are no weights, a context is empty, or a context and its completion are
            longer than `limit`.
    """
    if version is None:
        raise EngineError("the sampler has no weights: call load_weights first")
    if not all(len(request.ids) for request in requests):
        raise EngineError("a prompt has no tokens; check the task and its template")
    longest = max(requests, key=lambda request: len(request.ids) + request.max_tokens, default=None)
    if longest is not None and len(longest.ids) + longest.max_tokens > limit:
        raise EngineError(
            f"a prompt of {len(longest.ids)} tokens and max_tokens = {longest.max_tokens} need "
            f"{len(longest.ids) + longest.max_tokens} positions, but {holder} has {limit:g}; {fix}"
        )
    return version
