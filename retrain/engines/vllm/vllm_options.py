"""vLLM's options, sampling parameters and results, for both vLLM engines."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from retrain.engines.capability import check_requests
from retrain.errors import ComponentError, EngineError
from retrain.functional.seeds import derive_seed
from retrain.registry import Finding
from retrain.registry.method_checks import completion_mistake
from retrain.system.files import writing
from retrain.system.http_client import address_mistakes, key_mistakes
from retrain.types import Completion, Request, Sampling

_CPU_CACHE_MB = 256
"""Default size of the key-value cache on a CPU."""
_LEAST_TEMPERATURE = 0.01
"""Smallest temperature other than 0 that vLLM supports."""

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM can be started with; an adapter of another rank uses the next larger one."""
MERGE = 'set [vllm] lora = "merged"'
"""Fix for messages about adapters that vLLM does not support."""
ADAPTERS: Mapping[str | None, str] = {
    **dict.fromkeys((None, "adapter"), "unmerged, if vLLM can for this architecture"),
    "merged": "merged; in bfloat16, updates smaller than a weight's last digit are lost",
}
"""Description of how vLLM applies adapters, by `[vllm] lora`; shown by `retrain explain`."""


def check_table(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    """Check `[vllm]` against `[model]`, and its addresses; yield the problems."""
    lora, adapts = params["lora"], config.model.lora is not None
    if lora == "adapter" and not adapts:
        yield Finding(("lora",), "this run trains all weights: there is no adapter", "set [model.lora]")
    # Also checked for runs with another engine, because `retrain serve` reads these addresses too.
    for index, problem, fix in address_mistakes(params.get("urls", ()), params.get("allow_remote", False)):
        yield Finding(("urls", index), problem, fix)
    for mistake in key_mistakes(params.get("api_key_env", "")):
        yield Finding(("api_key_env",), *mistake)


def adapter_options(rank: int) -> dict[str, Any]:
    """Return the vLLM options for one adapter of this rank.

    Raises:
        ComponentError: the rank is larger than vLLM supports.
    """
    largest = next((supported for supported in _RANKS if supported >= rank), None)
    if largest is None:
        problem = f"vLLM supports adapters of rank {_RANKS[-1]} at most, and [model.lora] has r = {rank}"
        raise ComponentError(problem, f"lower r, or {MERGE}")
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": largest}


def by_itself(lora: str | None, dtype: str, kind: str, cpu: bool) -> bool:
    """Return True if a server gets adapters as files, False if it gets merged weights.

    Weights in float32 are merged, because that is exact, and because vLLM does not support float32
    adapters on a GPU.

    Args:
        lora, dtype: values of `[vllm]`.
        kind: the resolved dtype.
        cpu: True if the server runs on a CPU.
    """
    exact = dtype == "float32" or (kind == "float32" and not cpu)
    return lora == "adapter" or (lora is None and not exact)


def is_adapted(model: Any) -> bool:
    """Return True if the model has PEFT adapters."""
    return hasattr(model, "peft_config")


def adapter_rank(model: Any) -> int:
    """Return the largest rank of the model's adapters."""
    return max(config.r for config in model.peft_config.values())


def resolved(dtype: str, trainer_dtype: str) -> str:
    """Return the dtype of vLLM's weights and products. "auto" is the trainer's, so that both round alike."""
    return trainer_dtype if dtype == "auto" else dtype


def engine_options(table: Mapping[str, Any], model: str, seed: int, cpu: bool) -> dict[str, Any]:
    """Return the options that vLLM is started with, in this process or as a server.

    Args:
        table: `[vllm]` with its defaults, `dtype` resolved.
        model: directory or hub name of the model whose architecture vLLM reads.
        seed: seed of vLLM's own generators.
        cpu: True if vLLM runs on a CPU, without compilation.
    """
    cache = table["kv_cache_mb"] or (_CPU_CACHE_MB if cpu else None)
    return {
        "model": model,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # a model's own config would change the defaults of fields that a request lacks
        "logprobs_mode": "processed_logprobs",
        "seed": seed % 2**31,
        "dtype": table["dtype"],
        "gpu_memory_utilization": table["gpu_memory_utilization"],
        "kv_cache_memory_bytes": None if cache is None else cache << 20,
        "max_model_len": table["max_model_len"] or -1,
        "tensor_parallel_size": table["tensor_parallel_size"],
        "enforce_eager": table["enforce_eager"] or cpu,
        # With chunked prefill, vLLM undoes a seeded draw after each chunk, which fails on a CPU.
        "enable_chunked_prefill": False if cpu else None,
        "quantization": table["quantization"],
    }


def flags(options: Mapping[str, Any]) -> list[str]:
    """Convert vLLM options to command-line flags; options left at vLLM's default are omitted."""
    # vLLM has switches of its own for options that are on by default.
    off = [f"no_{name}" for name, value in options.items() if value is False and name.startswith("enable_")]
    named = {name: value for name, value in options.items() if value not in (None, False)} | dict.fromkeys(off, True)
    flagged = {f"--{name.replace('_', '-')}": value for name, value in named.items()}
    return [flag if value is True else f"{flag}={value}" for flag, value in flagged.items()]


def check(requests: Sequence[Request], sampling: Sampling, version: int | None, max_model_len: float) -> int:
    """Check that vLLM can serve these requests exactly, and return the version of its weights.

    Args:
        requests: the requests.
        sampling: sampling parameters.
        version: version of vLLM's weights; None if it has none.
        max_model_len: largest number of tokens of a prompt with its completion.
    Raises:
        EngineError: vLLM would reject a request, or sample at another temperature.
    """
    if 0 < sampling.temperature < _LEAST_TEMPERATURE:
        raise EngineError(
            f"vLLM cannot sample at temperature {sampling.temperature}; "
            f"set it to 0 (greedy) or to at least {_LEAST_TEMPERATURE}"
        )
    fix = "lower max_tokens, or raise [vllm] max_model_len or its memory"
    return check_requests(requests, version, max_model_len, "vLLM", fix)


def request_fields(request: Request, sampling: Sampling) -> dict[str, Any]:
    """Return vLLM's sampling parameters for a request, with every field set explicitly.

    Completion k of a request uses vLLM's seed + k. Requests of one sampling seed have disjoint vLLM
    seeds if all of them have the same count.
    """
    greedy = sampling.temperature == 0
    return {
        "n": 1 if greedy else request.count,
        "temperature": sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": 0 if greedy else sampling.top_k,
        "min_p": 0.0,
        # Multiples of the count, so that the seeds of two requests do not overlap. The stream of an episode's turn has
        # 63 bits, and a server of vLLM takes a signed number of 64.
        "seed": (derive_seed(sampling.seed, "vllm") % 2**62 + request.stream * request.count) % 2**63,
        "max_tokens": request.max_tokens,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,  # stop_token_ids include it if it ends a completion
        "logprobs": 0,  # only the sampled token's
        "flat_logprobs": True,
        "detokenize": False,
    }


def write_config(model: Any, folder: Path) -> str:
    """Write the model's configuration for vLLM and return the folder.

    Raises:
        StorageError: the configuration cannot be written.
    """
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(folder)
    return str(folder)


def completions(
    rows: Iterable[tuple[Sequence[int], Sequence[float], Any]],
    request: Request,
    sampling: Sampling,
    version: int | Sequence[Sequence[int]],
) -> list[Completion]:
    """Convert vLLM's (ids, log-probs, finish_reason) rows of one request to completions.

    A greedy completion is sampled once and repeated.

    Args:
        version: of the weights that sampled all tokens, or that of every token of every row.
    Raises:
        ValueError: the rows do not fit the request.
    """
    completions: list[Completion] = []
    for index, (ids, logprobs, reason) in enumerate(rows):
        each = [version] * len(ids) if isinstance(version, int) else version[index]
        mixed = tuple(each) if len({*each}) > 1 else ()
        completion = Completion(tuple(ids), tuple(logprobs), reason, min(each, default=0), mixed)
        wrong = completion_mistake(completion, request, sampling)
        if wrong or (reason == "length" and len(ids) < request.max_tokens):
            raise ValueError(wrong or f"it was ended by length after {len(ids)} of {request.max_tokens} tokens")
        completions.append(completion)
    # Greedy completions of one prompt are equal.
    completions *= request.count if sampling.temperature == 0 else 1
    if len(completions) != request.count:
        raise ValueError(f"{len(completions)} completions instead of {request.count}")
    return completions
