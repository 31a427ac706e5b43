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
"""Signal that weighs policy and expert terms, read by an objective that has both."""
_RISE_AND_FALL = ("schedule", ("chord",))


@signal(
    "mu",
    table="mix",
    when={"mu": ("schedule", ("constant",)), **dict.fromkeys(("warmup", "decay", "peak", "valley"), _RISE_AND_FALL)},
)
def mix_weight(  # noqa: PLR0913 - the keys of its table
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
    """Weight of the expert's terms in a loss with policy and expert terms.

    loss = (1 - mu) * policy terms + mu * expert terms
    constant: mu
    chord:    peak * step / warmup while step < warmup; then, for `decay` steps,
              valley + (peak - valley) * (1 + cos(pi * (step - warmup) / decay)) / 2; then valley

    Args:
        step: training step, from 0.
        mu: value of the constant schedule.
        schedule: "constant", or "chord": a linear rise and a cosine decay.
        warmup, decay: number of steps of the rise and of the decay; 0 disables it.
        peak, valley: highest and last value.
        sft_reduction: reduction of the expert's terms, which the objective reads; unset: [algorithm] reduction.
    Returns:
        mu in [0, 1], which depends on the step only; also reported as `mix/mu`.
    References: Zhang et al., On-Policy RL Meets Off-Policy Experts (CHORD), arXiv:2508.11408; Pan et al., Trinity-RFT
        (MIX), arXiv:2505.17826.
    """
    # The objective reads it; as a parameter it is a key of [mix].
    del sft_reduction
    if schedule == "constant":
        share = mu
    elif step < warmup:
        share = peak * step / warmup
    elif step < warmup + decay:
        share = valley + (peak - valley) * (1 + cos(pi * (step - warmup) / decay)) / 2
    else:
        share = valley
    return share, {"mix/mu": share}
