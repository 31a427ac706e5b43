"""How LoRA's adapters reach vLLM, in this process or in a server's, and what else `[vllm]` demands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from retrain.errors import ComponentError
from retrain.registry import Finding
from retrain.system.http_client import address_mistakes

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for; an adapter takes the next one up."""
MERGE = 'set [vllm] lora = "merged"'
"""What to do where vLLM takes no adapters."""
ADAPTERS = {
    **dict.fromkeys((None, "adapter"), "beside the base, if vLLM can for this architecture"),
    "merged": "merged; in bfloat16, updates smaller than a weight's last digit are lost",
}
"""What becomes of adapters, by `[vllm] lora`, for `retrain explain`."""


def check_table(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    """What `[vllm]` and the model demand of each other, and addresses that no server can have."""
    lora, adapts = params["lora"], config.model.lora is not None
    if lora == "adapter" and not adapts:
        yield Finding(("lora",), "this run trains all weights: there is no adapter", "set [model.lora]")
    if lora == "merged" and adapts and params["dtype"] != "float32":
        problem = "merged in bfloat16, updates smaller than a weight's last digit are lost: the sampler stays behind"
        fix = 'remove it, where vLLM takes adapters; or set dtype = "float32"'
        yield Finding(("lora",), problem, fix, fatal=False)
    # Also for a run that samples otherwise: `retrain serve` reads the addresses of the same file.
    for index, problem, fix in address_mistakes(params.get("urls", ()), params.get("allow_remote", False)):
        yield Finding(("urls", index), problem, fix)


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
