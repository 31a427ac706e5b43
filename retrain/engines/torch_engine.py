"""The embedded engine: samples in the trainer's process, optimised for groups of completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from retrain.engines.capability import UNMERGED_OR_MERGED, base_model, check_requests, fusable, unsupported
from retrain.errors import ComponentError
from retrain.protocols import Sampler, tolerance_of
from retrain.registry import engine
from retrain.system.model_paths import positions
from retrain.types import Completion, Request, Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from retrain.engines.embedded.decoder import Decoder
    from retrain.engines.embedded.prefix_cache import CachedPrefix, PrefixCache


@engine("torch", exact=True, concurrent=True, adapters=UNMERGED_OR_MERGED)
class TorchEngine(Sampler):
    """Samples in the trainer's process, one token per step for all completions of a chunk.

    A prompt is computed once, and its keys and values are repeated for the completions of its
    group. Finished completions are removed from the batch. The weights are a copy: optimizer steps
    reach the sampler only through `load_weights`.

    The log-prob of a token is log_softmax(logits / temperature)[token] in float32. At temperature 0
    tokens are greedy, and the log-probs are those of temperature 1. top_k, then top_p, truncate the
    tempered distribution, and the log-probs are those of the truncated distribution.

    Args:
        model: a transformers causal LM with full attention (see `unsupported`).
        dtype: data type of the matrix products. "auto" is the model's dtype on an accelerator. On a
            CPU it is bfloat16 if the hardware multiplies bfloat16 (twice as fast; log-probs within
            about 0.02), else float32. On a CPU only the layers' matrix products have this type, and
            in the fused decoder a head above 1 MB; all other operations are float32.
        fused: use `FusedDecoder` if it supports the model (Llama, Mistral, Qwen2, Qwen3).
        memory_mb: limit on keys, values, logits and prefill activations; prompts that do not fit
            together are sampled one chunk after the other. With an environment, also the limit on
            the keys and values that are cached for the next turns of a worker's episodes.

    Attributes:
        version: version of the weights in use; None before the first `load_weights`. A model without
            adapters is loaded by the constructor, one with adapters is not.
        tolerance: largest mean difference per token from the trainer's log-probs, in nats, that
            rounding can explain.
    """

    def __init__(
        self,
        model: Any,
        *,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        fused: bool = True,
        memory_mb: Annotated[int, Field(gt=0)] = 2048,
    ) -> None:
        if reason := unsupported(model):
            raise ComponentError(f"engine 'torch' cannot serve this model: {reason}", 'use engine = "transformers"')
        self._model = base_model(model)
        self._dtype = _resolve(dtype, self._model)
        first: Any = next(self._model.parameters())
        self._device = first.device
        fused = fused and fusable(self._model)
        self._decoder = _decoder(self._model, self._dtype, fused)
        # A decode step launches hundreds of small kernels; on a GPU it is replayed as one CUDA graph.
        self._graphs = fused and self._device.type == "cuda"
        if self._graphs:
            from retrain.engines.embedded.static import StaticSlots

            self._decoder.kind = StaticSlots
        self._budget, self._limit = memory_mb << 20, positions(self._model)
        self._cache: PrefixCache | None = None
        self.tolerance = tolerance_of(self._dtype)
        self.version: int | None = None
        # With adapters, the state dict does not have the base model's names. A whole copy of sharded weights (torch's
        # DTensor) may not fit: `load_weights` gathers them one by one.
        if self._model is model and not hasattr(first, "full_tensor"):
            self.load_weights(model.state_dict(), 0)

    def describe(self) -> str:
        """Describe the decoder, dtype and device in one line."""
        graphs = ", CUDA graphs" if self._graphs else ""
        return f"torch engine, {self._decoder.name} decoder, {str(self._dtype)[6:]} products on {self._device}{graphs}"

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy a full state dict.

        Raises:
            EngineError: names or shapes do not fit the model; the old weights stay in use.
        """
        self._decoder.load(weights)
        self._cache = None
        self.version = version

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return the completions of every request, in the order of the requests.

        In a continued sampling, keys and values of contexts from earlier calls are reused. In other
        calls, contexts of which one is a prefix of the other are computed once.
        """
        from retrain.engines.embedded import decoder, prefix_cache

        fix = "lower [training] max_tokens or drop long prompts"
        check_requests(requests, self.version, self._limit, "the model", fix)
        cache = None
        if sampling.continued:
            cache = self._cache or prefix_cache.PrefixCache(self._budget)
            cache.begin(sampling)
        self._cache = cache
        prefixes = cache.known(requests) if cache else {}
        contexts = {} if cache else prefix_cache.longest_contexts(requests)
        fresh = [index for index in range(len(requests)) if index not in prefixes and index not in contexts]
        results = self._sample(requests, sampling, fresh)
        results |= self._sample(requests, sampling, [*prefixes], prefixes)
        # Only for `chunks`, which splits requests by the memory that they need.
        longest = [Request(ids, 1, 1, 0) for ids in dict.fromkeys(contexts.values())]
        # Half of the memory for the shared contexts, half for the requests that reuse them.
        for chunk in decoder.chunks(longest, self._budget // 2, self._bytes):
            chunk_contexts = [tuple(longest[index].ids) for index in chunk]
            computed = prefix_cache.computed_contexts(self._decoder, chunk_contexts, contexts, self._device)
            # Each request starts from as much of the longest context as is its own.
            shared = {index: (prefix, len(requests[index].ids)) for index, prefix in computed.items()}
            results |= self._sample(requests, sampling, [*shared], shared, self._budget // 2)
        if cache:
            cache.end(prefix for prefix, _ in prefixes.values())
        return [results[index] for index in range(len(requests))]

    def _sample(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        chosen: Sequence[int],
        prefixes: Mapping[int, tuple[CachedPrefix, int]] = MappingProxyType({}),
        budget: int | None = None,
    ) -> dict[int, list[Completion]]:
        """Sample some of the requests, and return their completions by index.

        Args:
            requests: all requests of the call.
            sampling: sampling parameters.
            chosen: indices of the requests to sample.
            prefixes: index of a request -> (cached context, length of their common prefix); for all requests of
                `chosen`, or empty.
            budget: memory limit in bytes; None: the engine's.
        """
        from retrain.engines.embedded import decoder, prefix_cache

        results: dict[int, list[Completion]] = {}
        for chunk in decoder.chunks([requests[index] for index in chosen], budget or self._budget, self._bytes):
            indices = [chosen[index] for index in chunk]
            chunk_requests = [requests[index] for index in indices]
            start = prefix_cache.start_from([prefixes[i] for i in indices], chunk_requests) if prefixes else None
            ids, logprobs, parts = decoder.sample_chunk(self._decoder, chunk_requests, sampling, self._device, start)
            rows = decoder.completions(ids, logprobs, chunk_requests, sampling, self.version or 0)
            if sampling.continued and self._cache:
                self._cache.add(parts, chunk_requests, rows)
            results.update(zip(indices, rows, strict=True))
        return results

    def _bytes(self, prompts: int, rows: int, length: int, max_tokens: int) -> int:
        """Estimate the memory of a chunk, in bytes, with every tensor in float32.

        Args:
            prompts, rows: numbers of prompts and of their completions.
            length: number of tokens of the longest prompt.
            max_tokens: number of tokens of the longest completion.
        """
        config = self._model.config
        hidden, heads = config.hidden_size, config.num_attention_heads
        size = getattr(config, "head_dim", None) or hidden // heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        slots = 2 * config.num_hidden_layers * key_heads * size * (length + max_tokens)
        inner = getattr(config, "intermediate_size", None) or 4 * hidden
        prefill = length * (8 * hidden + 4 * inner + 2 * length)
        return 4 * (rows * (slots + 4 * config.vocab_size) + prompts * prefill)


def _decoder(model: Any, dtype: Any, fused: bool) -> Decoder:
    """Return the fused or the general decoder, importing only the module that is needed."""
    if fused:
        from retrain.engines.embedded.fused import FusedDecoder

        return FusedDecoder(model, dtype)
    from retrain.engines.embedded.general import GeneralDecoder

    return GeneralDecoder(model, dtype)


def _resolve(dtype: str, model: Any) -> Any:
    """Return the torch dtype of the parameter `dtype`."""
    import torch

    from retrain.functional.devices import matmul_dtype

    if dtype != "auto":
        return getattr(torch, dtype)
    parameter = next(model.parameters())
    return matmul_dtype(parameter.device) if parameter.device.type == "cpu" else parameter.dtype
