"""Log-probs of the frozen reference policy, for KL terms. Importing this imports neither torch nor transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from retrain.errors import StorageError
from retrain.protocols import StatefulComponent
from retrain.registry import signal
from retrain.types import Batch, State

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from retrain.training.policy import TorchPolicy


_SAMPLE = 1 << 16
"""Number of values of a weight that `sample_digest` aims at."""


class ScoringSignal(StatefulComponent):
    """Base class of signals that a forward pass of a model computes from tokens alone.

    Attributes:
        score: function from a `scoring_batch` to the column [N, T].
    """

    score: Callable[[Batch], Tensor]

    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor, sampler_logprobs: Tensor
    ) -> Tensor:
        return self.score(scoring_batch(input_ids, attention_mask, response_mask, sampler_logprobs))


@signal("ref_logprobs", models=("frozen",))
class ReferenceLogprobs(ScoringSignal):
    """Log-prob of each response token under the initial weights, [N, T] in nats, 0 outside response_mask.

    With LoRA the reference is the base model without adapter and needs no memory; otherwise it is a frozen copy of the
    weights. Checkpoints do not contain it: a resumed run builds it again from the initial model, and compares its
    fingerprint with the one in the checkpoint.
    """

    def __init__(self, policy: TorchPolicy) -> None:
        self.score = policy.reference()
        self.fingerprint = "" if policy.adapter is not None else fingerprint(policy.reference_weights())

    def state_dict(self) -> State:
        return {"fingerprint": self.fingerprint}

    def load_state_dict(self, state: State) -> None:
        """Compare the fingerprint with the checkpoint's.

        Raises:
            StorageError: the initial weights are not those of the checkpoint's run.
        """
        check_start(self.fingerprint, state["fingerprint"], "the reference for ref_logprobs")


def check_start(start: str, saved: str, name: str) -> None:
    """Compare two fingerprints of frozen weights.

    Args:
        start: fingerprint of this run's weights. saved: that of the checkpoint.
        name: description of the weights, with which the error begins.
    Raises:
        StorageError: the fingerprints differ.
    """
    if start != saved:
        raise StorageError(
            f"{name} differs from the one this run started with: the initial model changed; "
            "restore the model that [model] path named then, or start a fresh run"
        )


def scoring_batch(input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor, sampler_logprobs: Tensor) -> Batch:
    """Make a batch for computing log-probs, from the columns that this needs, all [N, T].

    Its rewards are 0. Groups and advantages have no meaning.
    """
    lengths = response_mask.sum(-1)
    zeros = sampler_logprobs.new_zeros(len(lengths))
    off = lengths < 0  # all False, on the right device
    return Batch(
        input_ids, attention_mask, response_mask, sampler_logprobs, zeros, off, lengths, lengths, off, sampler_logprobs
    )


def sample_digest(weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> str:
    """Return a sha256 over names, shapes and an evenly spaced sample of each weight's values, as hexadecimal text.

    A weight of fewer than 131,072 values is hashed whole; of a larger one, 65,536 to 98,304 values are. The digest
    differs for another model and after an update of all weights, but not always after a change of a few values.

    Args:
        weights: the weights by name.
        dtype: data type to which the values are rounded first; None: their own.
    """
    import torch

    digest = hashlib.sha256()
    for name in sorted(weights):
        flat = weights[name].detach().flatten()
        sample = flat[:: max(1, len(flat) // _SAMPLE)].to("cpu", dtype or flat.dtype).contiguous()
        # The shape, because the sample of a larger tensor may have the same bytes.
        digest.update(f"{name} {tuple(weights[name].shape)}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Return a sha256 over the names and all bytes of the weights, as hexadecimal text."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(weights):  # one by one, because reading a sharded weight gathers it
        digest.update(name.encode())
        # As bytes, because NumPy does not have bfloat16.
        digest.update(weights[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
