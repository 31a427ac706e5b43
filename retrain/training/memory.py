"""Estimates of the memory of training and sampling, from a model's config. This module does not import torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from retrain.training.settings import LOGITS_AT_ONCE, PolicySettings

OF_THE_SAMPLER = frozenset({"sampler_weights", "kv_cache"})
"""Entries of `estimate_memory` that the sampler uses. With a remote engine, the caller removes them."""
_PLAIN_MLP = frozenset({"gpt2", "gpt_neox", "opt", "gptj", "phi"})
"""Values of `model_type` with two matrices in the feed-forward part."""
_MOMENTS = {"adamw": 8, "adamw8bit": 2, "muon": 4}
"""Bytes of an optimizer's moments per trained weight."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes that determine a transformer's memory.

    Attributes:
        vocabulary: entries of the vocabulary.
        width: hidden size.
        layers: number of layers.
        inner: size of the feed-forward part's inner activations.
        heads, key_heads: number of query heads, and of key (and value) heads.
        head_width: size of one head.
        tied: True if the output head shares the weights of the embedding.
        gated: True if the feed-forward part has three matrices (gate, up, down) instead of two.
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
        """Read the sizes from the contents of a `config.json`, with the key names of the Llama or the GPT-2 family.

        Raises:
            ValueError: a size is missing, as in models without attention heads.
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
        """(inputs, outputs) of every weight matrix of one layer; the down projection is listed transposed."""
        query, key = self.heads * self.head_width, self.key_heads * self.head_width
        attention = [(self.width, query), (self.width, key), (self.width, key), (query, self.width)]
        return attention + [(self.width, self.inner)] * (3 if self.gated else 2)

    @property
    def layer(self) -> int:
        """Number of weights in the matrices of one layer."""
        return sum(inputs * outputs for inputs, outputs in self.matrices)

    @property
    def parameters(self) -> int:
        """Number of weights in all matrices, without norms and biases."""
        return (1 if self.tied else 2) * self.vocabulary * self.width + self.layers * self.layer


def estimate_memory(  # noqa: PLR0913 - two inputs and five keys
    shape: ModelShape,
    settings: PolicySettings,
    *,
    rows: int,
    tokens: int,
    signal_models: Collection[str] = (),
    ranks: int = 1,
    device: Literal["cpu", "cuda"] = "cuda",
) -> dict[str, int]:
    """Estimate the bytes that one rank uses for each purpose. The error is about a factor of 1.5.

    Args:
        shape: sizes of the model.
        settings: settings of its training.
        rows: number of completions that are sampled at once.
        tokens: length of the longest prompt with its response, in tokens.
        signal_models: an entry "trained", "averaged" or "frozen" for each model of a signal, such as a reference. All
            frozen models share one copy; with LoRA this is the base of the policy. The caller adds models that have
            another shape.
        ranks: world size. Weights are sharded if `settings.shard` is "full". Adapters are never sharded.
        device: kind of device that trains.
    Returns:
        Bytes of `weights`, `gradients`, `optimizer`, `activations` (of the largest micro-batch), `logits` (of one
        chunk), `other_models` (of signals), `sampler_weights` and `kv_cache`. With sharded weights, `gathered` is the
        memory of the parts that a rank gathers for use: two layers, embedding and head. With `settings.offload`,
        `offloaded` is the CPU memory of the offloaded entries, which are then left out.
    """
    half = 2 if settings.dtype == "bfloat16" else 4
    rank = settings.lora.r if settings.lora else 0
    # An adapter has rank * (inputs + outputs) weights for each matrix.
    trained = shape.layers * rank * sum(map(sum, shape.matrices)) if rank else shape.parameters
    # A row that is longer than the limit is a micro-batch of its own.
    cells = max(settings.micro_batch_tokens, tokens)
    positions = min(cells, settings.logprob_chunk or max(1, LOGITS_AT_ONCE[device] // shape.vocabulary))
    kept = 1 if settings.gradient_checkpointing else shape.layers
    inputs = shape.layers * shape.width * 4 if settings.gradient_checkpointing else 0
    shards = ranks if settings.shard == "full" else 1
    # With LoRA the base is sharded and the adapters, with their optimizer, are whole on every rank.
    base, states = (frozen_base(shape, settings) // shards, 1) if rank else (0, shards)
    sizes = {
        "weights": (8 if settings.rounds else 4) * trained // states + base,  # `rounds` keeps rounded copies
        # Gradients and masters are float32 in every dtype of the products.
        "gradients": 4 * trained // states,
        "optimizer": _MOMENTS[settings.optimizer] * trained // states,
        "activations": cells * (inputs + kept * _activations(shape, half)),
        # Twice: the logits and their gradient.
        "logits": 2 * half * positions * shape.vocabulary,
        # A trained model has weights, gradients and two moments in float32; an average has weights only.
        "other_models": (16 * list(signal_models).count("trained") + 4 * list(signal_models).count("averaged"))
        * trained
        // states
        + (4 * shape.parameters // shards if "frozen" in signal_models and not rank else 0),
        "sampler_weights": half * shape.parameters,
        # Keys and values; each rank samples its share of the rows, rounded up.
        "kv_cache": 2 * shape.layers * shape.key_heads * shape.head_width * half * -(-rows // ranks) * tokens,
    }
    if shards > 1:
        # Everything but the layers, and the two layers that are gathered at a time.
        sizes["gathered"] = half * (shape.parameters - max(0, shape.layers - 2) * shape.layer)
    away = {"none": (), "optimizer": ("optimizer",), "all": ("weights", "gradients", "optimizer") if shards > 1 else ()}
    if waits := away[settings.offload]:
        sizes["offloaded"] = sum(sizes.pop(name) for name in waits)
    return sizes


def frozen_base(shape: ModelShape, settings: PolicySettings) -> int:
    """Bytes of a frozen base model that is not sharded."""
    half = 2 if settings.dtype == "bfloat16" else 4
    size = half * shape.parameters
    if settings.quantization:  # half a byte per weight and a float32 scale per 64 weights: 9/16 bytes
        size -= shape.layers * shape.layer * (16 * half - 9) // 16
    return size


def _activations(shape: ModelShape, half: int) -> int:
    """Bytes that one token keeps in one layer for the backward pass.

    4 (4 width + 3 heads) + half (2 width + heads + m inner)

    Here, heads is the size of query, key and value together, and m is 4 for a gated feed-forward part, otherwise 3.

    The first term counts values in float32: the input of each of the two norms before and after its division by the
    root mean square, and three copies of query, key and value, which attention rotates and pads. The second term
    counts values of `half` bytes, in the dtype of the matrix products: the outputs of the two norms, one more copy of
    query, key and value, and the activations of the feed-forward part.
    """
    heads = (shape.heads + 2 * shape.key_heads) * shape.head_width
    inner = (4 if shape.gated else 3) * shape.inner
    return 4 * (4 * shape.width + 3 * heads) + half * (2 * shape.width + heads + inner)
