"""Settings of the policy's training. Importing this does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LOGITS_AT_ONCE = {"cpu": 1 << 27, "cuda": 1 << 29}
"""Default limit of the logits that exist at once, in numbers, by kind of device: 256 MiB and 1 GiB in bfloat16.

See `logprob_chunk`. Each chunk adds the gradient of the whole output head to that of the chunks before it, so on a GPU
small ones take longer.
"""


Shard = Literal["full", "none"]
"""With several ranks: "full" shards the weights over them, "none" keeps whole weights on each."""


POLICY_ADAPTER = "default"
"""Name of the policy's adapter; it is peft's name for the first one."""


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters on frozen weights: W + (alpha / r) B A (Hu et al., LoRA, arXiv:2106.09685).

    Attributes:
        r: rank of the adapters, >= 1.
        alpha: scale of the adapters, which are multiplied by alpha / r.
        dropout: dropout probability of the adapter's input in updates, in [0, 1).
        target_modules: names of the linear layers that get an adapter, or "all-linear".
        seed: seed of the adapters' initial values.
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
        temperature: sampling temperature, > 0; log-probs in training are those of the tempered distribution.
        micro_batch_tokens: limit of the cells (rows x longest row) of one forward pass; changes memory and speed, but
            not results.
        optimizer: "adamw", "adamw8bit", or "muon" for the hidden matrices with AdamW for the rest.
        lr: peak learning rate.
        betas, eps: parameters of AdamW.
        weight_decay: decoupled weight decay, on matrices only.
        warmup_steps: optimizer steps of the linear warm-up, which begins at lr / warmup_steps.
        schedule: after the warm-up, "constant", or a "linear" or "cosine" decay to 0 at total_steps.
        total_steps: optimizer steps of the whole run; may be 0 if the schedule is "constant".
        max_grad_norm: limit of the gradient norm; larger gradients are scaled down to it.
        dtype: dtype of the matrix products; master weights and the loss stay float32.
        rounding: with dtype "bfloat16" and without LoRA, "nearest" rounds the weights in every matrix product,
            "stochastic" rounds them once per step, for trainer and sampler alike.
        seed: seed of stochastic rounding.
        gradient_checkpointing: recompute each layer's activations in the backward pass, which needs less memory.
        epochs: passes over a batch. minibatches: optimizer steps per pass.
        logprob_chunk: number of positions whose logits exist at once; 0 chooses it from the vocabulary
            (`LOGITS_AT_ONCE`).
        lora: train adapters on frozen weights; None trains all weights.
        quantization: "nf4" if the frozen linear layers under LoRA are stored in 4 bits per weight, else None.
        shard: with several ranks, "full" shards the weights over them, "none" keeps whole weights on each.
        offload: "optimizer" keeps the optimizer's moments in CPU memory, "all" everything that is sharded.
        compile: on a GPU, compile the layers of a model whose weights are not sharded, and the scores of tokens.
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
    compile: bool = False

    @property
    def rounds(self) -> bool:
        """True if the weights in use are stochastically rounded copies of float32 masters."""
        return self.rounding == "stochastic" and self.dtype == "bfloat16" and self.lora is None
