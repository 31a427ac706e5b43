"""The embedded engine: sampling in the trainer's process, built for groups of completions of one prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from retrain.engines.capability import BESIDE_OR_MERGED, base_model, check_requests, fusable, positions, unsupported
from retrain.errors import ComponentError
from retrain.protocols import Sampler, tolerance_of
from retrain.registry import engine
from retrain.types import Completion, Request, Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from retrain.engines.embedded.decoder import Decoder
    from retrain.engines.embedded.kept import Kept


@engine("torch", exact=True, concurrent=True, adapters=BESIDE_OR_MERGED)
class TorchEngine(Sampler):
    """Samples with the trainer's own forward, and no per-token bookkeeping.

    A prompt is computed once and its keys and values repeated for the group; finished rows are compacted away.
    The weights are a copy: optimizer steps do not reach the sampler before `load_weights`.

    The log-prob of a token is log_softmax(logits / temperature)[token] in float32. At temperature 0 tokens are
    greedy and log-probs those of temperature 1. top_k, then top_p, truncate the tempered distribution, and the
    log-probs are the truncated one's.

    Args:
        model: a transformers causal LM with full attention (see `unsupported`).
        dtype: of the matrix products. "auto" is the model's own dtype on an accelerator; on a CPU bfloat16 if it
            multiplies bfloat16 in hardware (twice as fast; log-probs within about 0.02), else float32.
            On a CPU all but the layers' matrix products is float32, and so is the head unless it fits no cache.
        fused: use the rewritten forward where there is one (Llama, Mistral, Qwen2, Qwen3).
        graphs: on a GPU replay the rewritten forward's decode step as a CUDA graph.
        memory_mb: bound on keys, values, logits and prefill activations; more prompts than fit are sampled in turn.
            With an environment, bound also on the keys and values that wait for the next turns of a worker's episodes.

    Attributes:
        version: of the weights in force; None until there are any (an adapter model's must be loaded merged).
        tolerance: mean difference per token from the trainer's log-probs, in nats, that is still rounding.
    """

    def __init__(
        self,
        model: Any,
        *,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        fused: bool = True,
        graphs: bool = True,
        memory_mb: Annotated[int, Field(gt=0)] = 2048,
    ) -> None:
        from retrain.engines.embedded.fused import FusedDecoder
        from retrain.engines.embedded.general import GeneralDecoder

        if reason := unsupported(model):
            raise ComponentError(f"engine 'torch' cannot serve this model: {reason}", 'use engine = "transformers"')
        self._model = base_model(model)
        self._dtype = _resolve(dtype, self._model)
        self._device = next(self._model.parameters()).device
        kind = FusedDecoder if fused and fusable(self._model) else GeneralDecoder
        self._decoder: Decoder = kind(self._model, self._dtype)
        self._graphs = graphs and kind is FusedDecoder and self._device.type == "cuda"
        if self._graphs:
            from retrain.engines.embedded.static import StaticSlots

            self._decoder.kind = StaticSlots
        self._budget, self._limit = memory_mb << 20, positions(self._model)
        self._kept: Kept | None = None
        self.tolerance = tolerance_of(self._dtype)
        self.version: int | None = None
        if self._model is model:  # else its adapters are not in the state dict by the base model's names
            self.load_weights(model.state_dict(), 0)

    def describe(self) -> str:
        """The path, type and device in use, in words."""
        graphs = ", CUDA graphs" if self._graphs else ""
        return f"torch engine, {self._decoder.name} decoder, {str(self._dtype)[6:]} products on {self._device}{graphs}"

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy a full state dict; EngineError, with the old weights still in force, if it does not fit."""
        self._decoder.load(weights)
        self._kept = None
        self.version = version

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """The completions of every request, in the requests' order.

        Requests that extend contexts of the calls before, in a continued sampling, compute what is new of them.
        """
        from retrain.engines.embedded import decoder

        fix = "lower [training] max_tokens or drop long prompts"
        version = check_requests(requests, self.version, self._limit, "the model", fix)
        results: dict[int, list[Completion]] = {}
        kept = self._kept = self._keeping(sampling) if sampling.continued else None
        known = kept.known(requests) if kept else {}
        for fresh in (True, False):
            ours = [index for index in range(len(requests)) if (index not in known) == fresh]
            for chunk in decoder.chunks([requests[index] for index in ours], self._budget, self._bytes):
                places = [ours[index] for index in chunk]
                some = [requests[index] for index in places]
                start = kept.start([known[index] for index in places], some) if kept and not fresh else None
                ids, logprobs, parts = decoder.sample_chunk(self._decoder, some, sampling, self._device, start)
                rows = decoder.completions(ids, logprobs, some, sampling, version)
                if kept:
                    kept.add(parts, some, rows)
                results.update(zip(places, rows, strict=True))
        if kept:
            kept.end(one for one, _ in known.values())
        return [results[index] for index in range(len(requests))]

    def _keeping(self, sampling: Sampling) -> Kept:
        from retrain.engines.embedded.kept import Kept

        kept = self._kept or Kept(self._budget)
        kept.begin(sampling)
        return kept

    def _bytes(self, prompts: int, rows: int, length: int, max_tokens: int) -> int:
        """Memory of prompts of this length with rows of completions, in bytes (float32 throughout)."""
        config = self._model.config
        hidden, heads = config.hidden_size, config.num_attention_heads
        size = getattr(config, "head_dim", None) or hidden // heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        slots = 2 * config.num_hidden_layers * key_heads * size * (length + max_tokens)
        inner = getattr(config, "intermediate_size", None) or 4 * hidden
        prefill = length * (8 * hidden + 4 * inner + 2 * length)
        return 4 * (rows * (slots + 4 * config.vocab_size) + prompts * prefill)


def _resolve(dtype: str, model: Any) -> Any:
    import torch

    from retrain.functional.devices import matmul_dtype

    if dtype != "auto":
        return getattr(torch, dtype)
    parameter = next(model.parameters())
    return matmul_dtype(parameter.device) if parameter.device.type == "cpu" else parameter.dtype
