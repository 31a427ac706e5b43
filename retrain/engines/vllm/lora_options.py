"""How LoRA's adapters reach vLLM, in this process or in a server's."""

from __future__ import annotations

from typing import Any

from retrain.errors import ComponentError

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for; an adapter takes the next one up."""
MERGE = 'set [vllm] lora = "merged"'
"""What to do where vLLM takes no adapters."""


def adapter_options(rank: int) -> dict[str, Any]:
    """What vLLM is started with besides, to take one adapter of this rank; ComponentError if it takes none so large."""
    room = next((step for step in _RANKS if step >= rank), None)
    if room is None:
        problem = f"vLLM takes adapters of rank {_RANKS[-1]} at most, and [model] lora has r = {rank}"
        raise ComponentError(problem, f"lower it, or {MERGE}")
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}


def by_itself(lora: str | None, dtype: str) -> bool:
    """Whether `[vllm]` `lora` and `dtype` mean that a server gets adapters by themselves.

    float32 does without: what is merged in it keeps the update, and on a GPU vLLM takes no float32 adapters.
    """
    return lora == "adapter" or (lora is None and dtype != "float32")


def is_adapted(model: Any) -> bool:
    """Whether a model has adapters, by peft's wrapper."""
    return hasattr(model, "peft_config")


def adapter_rank(model: Any) -> int:
    """The rank of the adapters that are trained; ComponentError if there are none."""
    if not is_adapted(model):
        problem = '[vllm] lora = "adapter" needs adapters, and this run trains all weights'
        raise ComponentError(problem, f"set [model] lora, or {MERGE}")
    return max(config.r for config in model.peft_config.values())
