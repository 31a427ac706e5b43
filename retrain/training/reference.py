"""The frozen reference that KL terms compare with; importing this imports neither torch nor transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from retrain.errors import StorageError
from retrain.protocols import Policy, StatefulComponent
from retrain.registry import signal
from retrain.types import Batch, State

if TYPE_CHECKING:
    from torch import Tensor


_SAMPLE = 1 << 16


@signal("ref_logprobs", models=("frozen",), judges=False)
class ReferenceLogprobs(StatefulComponent):
    """log p of each response token under the weights training started from, [N, T] nats, 0 elsewhere.

    With LoRA the reference is the base model with adapters off and costs no memory, else a frozen copy.
    The weights are not stored: every start of a run builds the same ones again, and a fingerprint in the
    checkpoint proves it.
    """

    def __init__(self, policy: Policy) -> None:
        self._score = policy.reference()
        self.fingerprint = "" if policy.adapter is not None else fingerprint(policy.reference_weights())

    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor, sampler_logprobs: Tensor
    ) -> Tensor:
        return self._score(unjudged(input_ids, attention_mask, response_mask, sampler_logprobs))

    def state_dict(self) -> State:
        return {"fingerprint": self.fingerprint}

    def load_state_dict(self, state: State) -> None:
        """StorageError if this run's initial weights are not those that the checkpoint's run started from."""
        check_start(self.fingerprint, state["fingerprint"], "the reference for ref_logprobs")


def check_start(own: str, saved: str, name: str) -> None:
    """StorageError if the weights that a part compares with are not those of the checkpoint's run, by fingerprint."""
    if own != saved:
        raise StorageError(
            f"{name} differs from the one this run started with: the initial model changed; "
            "restore the model that [model] path named then, or start a fresh run"
        )


def unjudged(input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor, sampler_logprobs: Tensor) -> Batch:
    """A batch for a scoring forward, from the columns that one needs: without rewards, groups and advantages."""
    rows = response_mask.sum(-1)
    zeros, off = sampler_logprobs.new_zeros(len(rows)), rows < 0
    return Batch(
        input_ids, attention_mask, response_mask, sampler_logprobs, zeros, off, rows, rows, off, sampler_logprobs
    )


def sample_digest(weights: Mapping[str, Tensor]) -> str:
    """sha256 over names, shapes and an evenly spaced sample of each weight, at most 65,536 values: fast at any size.

    It notices another model and any change of all weights, and not that of a single value.
    """
    import torch

    digest = hashlib.sha256()
    for name in sorted(weights):
        flat = weights[name].detach().flatten()
        sample = flat[:: max(1, len(flat) // _SAMPLE)].cpu().contiguous()
        digest.update(f"{name} {tuple(weights[name].shape)}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """sha256 over names and the exact bytes of all weights."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(weights):  # read one by one: weights that are sharded are whole only then
        digest.update(name.encode())
        # As bytes, because NumPy has no bfloat16.
        digest.update(weights[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
