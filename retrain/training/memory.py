"""Memory that training and sampling take, estimated from numbers of a model's config; torch is not imported."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from retrain.training.settings import LOGITS_AT_ONCE, PolicySettings

OF_THE_SAMPLER = frozenset({"sampler_weights", "kv_cache"})
"""Memory of the sampler by purpose; an engine with the trait `remote` takes none."""
_PLAIN_MLP = frozenset({"gpt2", "gpt_neox", "opt", "gptj", "phi"})
_MOMENTS = {"adamw": 8, "adamw8bit": 2, "muon": 4}
"""Bytes of an optimizer's moments for each weight that is trained."""
_LAYERS = 1 << 16
"""More than any model has."""


@dataclass(frozen=True)
class ModelShape:
    """What decides a transformer's memory.

    Attributes:
        vocabulary, width, layers, inner: entries, hidden size, layers, size inside the feed-forward part.
        heads, key_heads, head_width: of attention.
        tied: the output head shares the embedding. gated: the feed-forward part has three matrices, not two.
    """

    vocabulary: int
    width: int
    layers: int
    inner: int
    heads: int
    key_heads: int
    head_width: int
    tied: bool
    gated: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """From a `config.json` as a mapping; understands the names of the Llama and of the GPT-2 family.

        Raises:
            ValueError: it lacks a number, as those of models without attention heads do.
        """

        def first(*names: str, default: int = 0) -> int:
            return next((int(config[name]) for name in names if config.get(name)), default)

        width, heads = first("hidden_size", "n_embd"), first("num_attention_heads", "n_head")
        layers, vocabulary = first("num_hidden_layers", "n_layer"), first("vocab_size")
        if not (width and heads and layers and vocabulary):
            raise ValueError(f"the config of {config.get('model_type')} lacks its width, heads, layers or vocabulary")
        return cls(
            vocabulary=vocabulary,
            width=width,
            layers=layers,
            inner=first("intermediate_size", "n_inner", default=4 * width),
            heads=heads,
            key_heads=first("num_key_value_heads", default=heads),
            head_width=first("head_dim", default=width // heads),
            tied=bool(config.get("tie_word_embeddings", config.get("model_type") == "gpt2")),
            gated=config.get("model_type") not in _PLAIN_MLP,
        )

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of every matrix of one layer."""
        query, key = self.heads * self.head_width, self.key_heads * self.head_width
        attention = [(self.width, query), (self.width, key), (self.width, key), (query, self.width)]
        return attention + [(self.width, self.inner)] * (3 if self.gated else 2)

    @property
    def layer(self) -> int:
        """Weights of the matrices of one layer."""
        return sum(inputs * outputs for inputs, outputs in self.matrices)

    @property
    def parameters(self) -> int:
        """Weights of all matrices; norms and biases are left out."""
        return (1 if self.tied else 2) * self.vocabulary * self.width + self.layers * self.layer


def estimate_memory(
    shape: ModelShape,
    settings: PolicySettings,
    *,
    rows: int,
    tokens: int,
    signal_models: Collection[str] = (),
    ranks: int = 1,
) -> dict[str, int]:
    """Bytes by purpose on one rank; a guide within about a factor of 1.5, and what `explain` prints.

    Args:
        shape: the model.
        settings: how it is trained.
        rows: completions sampled at once.
        tokens: longest prompt and response together.
        signal_models: what signals hold, as their trait `models` names it: "frozen" (they share one copy; with LoRA
            it is the base), "trained" or "averaged". Models of another shape are left to the caller.
        ranks: processes that train together; adapters are whole on each, and other weights spread over them.
    Returns:
        weights, gradients, optimizer, activations (of the largest micro-batch), logits (of one chunk),
        other_models (those of signals), sampler_weights, kv_cache; with ranks or `offload` also gathered (two layers,
        embedding and head while they compute) and offloaded (what waits in the processor's memory instead).
    """
    half = 2 if settings.dtype == "bfloat16" else 4
    rank = settings.lora.r if settings.lora else 0
    # An adapter has rank * (inputs + outputs) weights for each matrix.
    trained = shape.layers * rank * sum(map(sum, shape.matrices)) if rank else shape.parameters
    cells = max(settings.micro_batch_tokens, tokens)
    positions = min(cells, settings.logprob_chunk or max(1, LOGITS_AT_ONCE // shape.vocabulary))
    kept = 1 if settings.gradient_checkpointing else shape.layers
    inputs = shape.layers * shape.width * 4 if settings.gradient_checkpointing else 0
    shards = ranks if settings.shard == "full" else 1
    base, states = (frozen_base(shape, settings) // shards, 1) if rank else (0, shards)
    sizes = {
        "weights": (8 if settings.rounds else 4) * trained // states + base,  # rounded ones beside the masters
        "gradients": 4 * trained // states,
        "optimizer": _MOMENTS[settings.optimizer] * trained // states,
        "activations": cells * (inputs + kept * _activations(shape, half)),
        "logits": 2 * half * positions * shape.vocabulary,
        "other_models": (16 * list(signal_models).count("trained") + 4 * list(signal_models).count("averaged"))
        * trained
        // states
        + (4 * shape.parameters // shards if "frozen" in signal_models and not rank else 0),
        "sampler_weights": half * shape.parameters,
        "kv_cache": 2 * shape.layers * shape.key_heads * shape.head_width * half * -(-rows // ranks) * tokens,
    }
    if shards > 1:
        sizes["gathered"] = half * (shape.parameters - max(0, shape.layers - 2) * shape.layer)
    away = {"none": (), "optimizer": ("optimizer",), "all": ("weights", "gradients", "optimizer") if shards > 1 else ()}
    if waits := away[settings.offload]:
        sizes["offloaded"] = sum(sizes.pop(name) for name in waits)
    return sizes


def layers_that_fit(shape: ModelShape, gigabytes: int, taken: Callable[[ModelShape], int]) -> int:
    """Layers of the largest model of this width that fits a GPU; 0 if one layer does not.

    Args:
        taken: bytes that a model takes there; more layers take more.
    """
    return bisect_right(range(1, _LAYERS), gigabytes * 10**9, key=lambda layers: taken(replace(shape, layers=layers)))


def frozen_base(shape: ModelShape, settings: PolicySettings) -> int:
    """Bytes of a whole base that is not trained."""
    half = 2 if settings.dtype == "bfloat16" else 4
    size = half * shape.parameters
    if settings.quantization:  # a float32 scale for every 64 weights of half a byte
        size -= shape.layers * shape.layer * (16 * half - 9) // 16
    return size


def _activations(shape: ModelShape, half: int) -> int:
    """Bytes that one token keeps in one layer for the backward pass.

    In float32 the residual stream around two norms (5 widths each), in the type of the products what they
    read: normed inputs, attention's heads (before and after rotation, and padded), the feed-forward part.
    """
    heads = (shape.heads + 2 * shape.key_heads) * shape.head_width
    inner = (4 if shape.gated else 3) * shape.inner
    return 4 * (4 * shape.width + 3 * heads) + half * (2 * shape.width + heads + inner)
