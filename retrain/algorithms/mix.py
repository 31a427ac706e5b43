"""Schedule of the weight mu between the policy's loss terms and the expert's."""

from __future__ import annotations

from math import cos, pi
from typing import Annotated, Literal

from pydantic import Field

from retrain.registry import reduction, signal
from retrain.types import Metrics

_Share = Annotated[float, Field(ge=0, le=1)]
_Steps = Annotated[int, Field(ge=0)]


SHARE = "mu"
"""The signal that a loss with terms of the policy and of an expert reads."""
_RISE_AND_FALL = ("schedule", ("chord",))


@signal(
    "mu",
    table="mix",
    when={"mu": ("schedule", ("constant",)), **dict.fromkeys(("warmup", "decay", "peak", "valley"), _RISE_AND_FALL)},
)
def mix_weight(  # noqa: PLR0913 - its keyword-only parameters are its table
    step: int,
    *,
    mu: _Share = 0.1,
    schedule: Literal["constant", "chord"] = "constant",
    warmup: _Steps = 200,
    decay: _Steps = 400,
    peak: _Share = 0.5,
    valley: _Share = 0.02,
    sft_reduction: Annotated[str | None, reduction] = None,
) -> tuple[float, Metrics]:
    """Share of the expert's terms in a loss that has terms of both sources.

    loss = (1 - mu) * policy terms + mu * expert terms
    constant: mu
    chord:    peak * step / warmup while step < warmup; then, for `decay` steps,
              valley + (peak - valley) * (1 + cos(pi * (step - warmup) / decay)) / 2; then valley

    Args:
        step: of the run, from 0.
        mu: of the constant schedule.
        schedule: "constant", or CHORD's linear rise and cosine decay.
        warmup, decay: steps of the rise and of the decay; 0 disables it.
        peak, valley: the highest value, and the last.
        sft_reduction: how the expert's terms become one number; unset: as the policy's, by [algorithm] reduction. The
            objective reads it.
    Returns:
        A number in [0, 1], reported as `mix/mu`; a function of the step alone.
    References: Zhang et al., On-Policy RL Meets Off-Policy Experts (CHORD), arXiv:2508.11408; Pan et al., Trinity-RFT
        (MIX), arXiv:2505.17826.
    """
    del sft_reduction
    if schedule == "constant":
        value = mu
    elif step < warmup:
        value = peak * step / warmup
    elif step < warmup + decay:
        value = valley + (peak - valley) * (1 + cos(pi * (step - warmup) / decay)) / 2
    else:
        value = valley
    return value, {"mix/mu": value}
