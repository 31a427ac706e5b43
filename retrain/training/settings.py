"""How the policy is trained, as plain numbers; importing this does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LOGITS_AT_ONCE = 1 << 27
"""Logits that exist at once unless `logprob_chunk` says otherwise: 256 MB of bfloat16."""


Shard = Literal["full", "none"]
"""With several ranks: weights are spread over them, or each holds all."""


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters instead of full training (Hu et al., arXiv:2106.09685): W + (alpha / r) B A.

    Attributes:
        r: rank, >= 1.
        alpha: scale; the update is multiplied by alpha / r.
        dropout: on the adapter's input while training, in [0, 1).
        target_modules: names of the linear layers that get one, or "all-linear".
        seed: of the adapters' initial values.
    """

    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: str | tuple[str, ...] = "all-linear"
    seed: int = 0


@dataclass(frozen=True)
class PolicySettings:
    """Settings of `TorchPolicy`.

    Attributes:
        temperature: of sampling, > 0; training log-probs are taken at it.
        micro_batch_tokens: most cells (rows x longest row) of one forward; changes memory and speed, not results.
        optimizer: "adamw", "adamw8bit", or "muon" for the hidden matrices with AdamW for the rest.
        lr: peak learning rate. betas, eps: of AdamW. weight_decay: decoupled, on matrices only.
        warmup_steps: optimizer steps of linear warm-up from lr / warmup_steps.
        schedule: after warm-up, "constant" or a decay to 0 at total_steps.
        total_steps: optimizer steps of the whole run; 0 is allowed for "constant".
        max_grad_norm: gradients are scaled down to this norm.
        dtype: of the matrix products; master weights, logits and the loss stay float32.
        gradient_checkpointing: compute each layer's activations again in the backward pass.
        epochs, minibatches: passes over a batch, and optimizer steps per pass.
        logprob_chunk: positions whose logits exist at once; 0 chooses by vocabulary (256 MB of bfloat16).
        rounding: how float32 weights become bfloat16 where dtype is that and all weights are trained: to "nearest" in
            every product, or "stochastic", once per step for trainer and sampler alike.
        seed: of the rounding.
        lora: train adapters on frozen weights; None trains everything.
        quantization: "nf4" if the linear layers that LoRA freezes hold 4 bits a weight, else None.
        shard: with several ranks, spread the weights over them, or hold all of them on each.
        offload: "optimizer" keeps the optimizer's moments in the processor's memory, "all" whatever is sharded.
    """

    temperature: float = 1.0
    micro_batch_tokens: int = 16384
    optimizer: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    eps: float = 1e-8
    warmup_steps: int = 0
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    total_steps: int = 0
    max_grad_norm: float = 1.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0
    gradient_checkpointing: bool = False
    epochs: int = 1
    minibatches: int = 1
    logprob_chunk: int = 0
    lora: LoraSettings | None = None
    quantization: Literal["nf4"] | None = None
    shard: Shard = "full"
    offload: Literal["none", "optimizer", "all"] = "none"

    @property
    def rounds(self) -> bool:
        """The weights in force are a rounding of float32 masters."""
        return self.rounding == "stochastic" and self.dtype == "bfloat16" and self.lora is None
