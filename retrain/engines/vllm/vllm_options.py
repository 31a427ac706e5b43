"""What vLLM is started with, asked for and answers, in this process or in a server's."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from retrain.engines.capability import check_requests
from retrain.errors import ComponentError, EngineError
from retrain.functional.seeds import derive_seed
from retrain.registry import Finding
from retrain.system.files import writing
from retrain.system.http_client import address_mistakes
from retrain.types import Completion, Request, Sampling

_CPU_CACHE_MB = 256
_LEAST_TEMPERATURE = 0.01

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
    """Whether `[vllm]` `lora` and `dtype` mean that a server gets adapters as files instead of merged weights.

    float32 does without: what is merged in it keeps the update, and on a GPU vLLM takes no float32 adapters.
    """
    return lora == "adapter" or (lora is None and dtype != "float32")


def is_adapted(model: Any) -> bool:
    """Whether a model has adapters, by peft's wrapper."""
    return hasattr(model, "peft_config")


def adapter_rank(model: Any) -> int:
    """The rank of the adapters that are trained."""
    return max(config.r for config in model.peft_config.values())


def engine_options(table: Mapping[str, Any], model: str, seed: int, cpu: bool) -> dict[str, Any]:
    """What vLLM is started with, in this process or in a server's.

    Args:
        table: `[vllm]` with its defaults.
        model: directory or hub name that vLLM reads the architecture from.
        seed: of vLLM's own generators.
        cpu: vLLM runs on a CPU, without compilation.
    """
    dtype, cache = table["dtype"], table["kv_cache_mb"] or (_CPU_CACHE_MB if cpu else None)
    return {
        "model": model,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # a model's own would change every field that a request leaves out
        "logprobs_mode": "processed_logprobs",
        "seed": seed % 2**31,
        "dtype": ("float32" if cpu else "bfloat16") if dtype == "auto" else dtype,
        "gpu_memory_utilization": table["gpu_memory_utilization"],
        "kv_cache_memory_bytes": None if cache is None else cache << 20,
        "max_model_len": table["max_model_len"] or -1,
        "tensor_parallel_size": table["tensor_parallel_size"],
        "enforce_eager": table["enforce_eager"] or cpu,
        # A seeded draw cannot be taken back on a CPU, as vLLM does after each part of a prompt.
        "enable_chunked_prefill": False if cpu else None,
        "quantization": table["quantization"],
    }


def flags(options: Mapping[str, Any]) -> list[str]:
    """vLLM's options as a server's command line has them; what is off by default or left to vLLM is not named."""
    off = [f"no_{name}" for name, value in options.items() if value is False and name.startswith("enable_")]
    named = {name: value for name, value in options.items() if value not in (None, False)} | dict.fromkeys(off, True)
    flagged = {f"--{name.replace('_', '-')}": value for name, value in named.items()}
    return [flag if value is True else f"{flag}={value}" for flag, value in flagged.items()]


def check(requests: Sequence[Request], sampling: Sampling, version: int | None, room: float) -> int:
    """The version of vLLM's weights; EngineError for what vLLM would refuse, or do otherwise than asked.

    Args:
        version: None if there are no weights.
        room: tokens that vLLM has room for, of a prompt with its completion.
    """
    if 0 < sampling.temperature < _LEAST_TEMPERATURE:
        raise EngineError(
            f"vLLM samples at temperature {_LEAST_TEMPERATURE} and above, or greedily at 0; "
            f"{sampling.temperature} is between"
        )
    fix = "lower max_tokens, or raise [vllm] max_model_len or its memory"
    return check_requests(requests, version, room, "vLLM", fix)


def request_fields(request: Request, sampling: Sampling) -> dict[str, Any]:
    """vLLM's sampling parameters for a request, every field explicit; completion k draws from the seed + k.

    Streams of one sampling seed share no seed of vLLM's as long as their requests have one count.
    """
    greedy = sampling.temperature == 0
    return {
        "n": 1 if greedy else request.count,
        "temperature": sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": 0 if greedy else sampling.top_k,
        "min_p": 0.0,
        "seed": derive_seed(sampling.seed, "vllm") % 2**62 + request.stream * request.count,
        "max_tokens": request.max_tokens,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,  # stop_token_ids say it all
        "logprobs": 0,  # the sampled token's alone
        "flat_logprobs": True,
        "detokenize": False,
    }


def write_config(model: Any, folder: Path) -> str:
    """Write the model's configuration for vLLM to read; returns the folder.

    Raises:
        StorageError: it cannot be written.
    """
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(folder)
    return str(folder)


def completions(
    rows: Iterable[tuple[Sequence[int], Sequence[float], str]], request: Request, sampling: Sampling, version: int
) -> list[Completion]:
    """vLLM's (ids, log-probs, finish_reason) for one request; greedy ones are sampled once and repeated.

    Raises:
        ValueError: they are not what the request asks for.
    """
    found: list[Completion] = []
    for ids, logprobs, reason in rows:
        stops = [token in sampling.stop_ids for token in ids]
        ended = stops.index(True) == len(ids) - 1 if any(stops) else len(ids) == request.max_tokens
        if len(ids) != len(logprobs) or not ended or reason != ("stop" if any(stops) else "length"):
            limit = f"max_tokens = {request.max_tokens}"
            raise ValueError(f"{len(ids)} tokens with {len(logprobs)} log-probs, ended by {reason}, {limit}")
        found.append(Completion(tuple(ids), tuple(logprobs), "stop" if any(stops) else "length", version))
    found *= request.count if sampling.temperature == 0 else 1
    if len(found) != request.count:
        raise ValueError(f"{len(found)} completions instead of {request.count}")
    return found
