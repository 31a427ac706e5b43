"""SEPA's schedule: the weight with which the uncertainty of execution tokens is pooled at each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from retrain import functional as F
from retrain.protocols import StatefulComponent
from retrain.registry import signal
from retrain.types import Batch, Metrics, State

if TYPE_CHECKING:
    from torch import Tensor

StepCount = Annotated[int, Field(ge=0)] | Literal["auto"]
_DECAY = 0.99
"""Decay of the moving average of the variance."""
_COLLAPSE = 0.2
"""Share of the initial variance below which the schedule "auto" increases the weight."""


@signal("sepa_lambda", table="sepa", stored="sepa/lambda", when={"warmup_steps": ("schedule", ("auto",))})
class SepaLambda(StatefulComponent):
    """Pooling weight lambda in [0, 1] of the transform `sepa`, and the entropies of planning and execution tokens.

    linear: 0 if steps = 0 or step <= delay_steps, else min((step - delay_steps) / steps, 1)
    auto:   max(linear, 1 - min((v / v_0) / 0.2, 1)), v = moving average (0.99) of the batch variance of
            execution-token uncertainty, v_0 its value after `warmup_steps` steps
    gate:   0 until the share of correct answers of a batch reaches `correct_rate_gate` for the first time

    Args:
        total_steps: number of steps of the run.
        steps: number of steps in which the weight rises from 0 to 1; "auto" ends the rise at four fifths of
            `[training] max_steps`, independent of the gate; 0 keeps the linear part at 0.
        schedule: "linear", or "auto", which also increases the weight if the variance collapses.
        delay_steps: number of steps with weight 0 before the rise; "auto" is a twentieth of `[training] max_steps`.
        correct_rate_gate: share of correct answers in a batch that opens the gate; 0 opens it at once.
        warmup_steps: number of steps after which "auto" records the initial variance.
        ramp_from: count steps from the opening of the "gate", or from the "start" of the run; with "start" the weight
            jumps if the gate opens late.
    References: docs/sepa.md of github.com/teilomillet/retrain; no paper describes SEPA.
    """

    def __init__(  # noqa: PLR0913 - the run's length and six keys
        self,
        total_steps: int,
        *,
        steps: StepCount = "auto",
        schedule: Literal["linear", "auto"] = "linear",
        delay_steps: StepCount = "auto",
        correct_rate_gate: Annotated[float, Field(ge=0, le=1)] = 0.1,
        warmup_steps: Annotated[int, Field(ge=1)] = 50,
        ramp_from: Literal["gate", "start"] = "gate",
    ) -> None:
        self.steps, self.schedule, self.delay_steps = steps, schedule, delay_steps
        self.total_steps = total_steps
        self.correct_rate_gate, self.warmup_steps, self.ramp_from = correct_rate_gate, warmup_steps, ramp_from
        self._opened_at: int | None = None
        self._seen = 0
        self._variance: float | None = None
        self._initial: float | None = None

    def __call__(
        self, step: int, uncertainty: Tensor, planning_mask: Tensor, response_mask: Tensor
    ) -> tuple[float, Metrics]:
        """Return the weight, and the metrics sepa/lambda, sepa/gate_open and sepa/{exec,plan}_entropy_{mean,var}."""
        value = self.at(step)
        metrics = {"sepa/lambda": value, "sepa/gate_open": float(self._opened_at is not None)}
        return value, metrics | entropy_metrics(uncertainty, planning_mask, response_mask)

    def at(self, step: int) -> float:
        """Return the weight at a step, from the batches so far."""
        if self._opened_at is None:
            return 0.0
        start = self._opened_at if self.ramp_from == "gate" else 0
        linear = ramp(step, start, self.steps, self.delay_steps, self.total_steps)
        # Without an initial variance above 0 a collapse cannot be measured.
        if self.schedule == "linear" or self._variance is None or not self._initial:
            return linear
        # The greater of both: a collapse may only speed the schedule up.
        return max(linear, 1 - min(self._variance / self._initial / _COLLAPSE, 1.0))

    def before(self, batch: Batch) -> Metrics:
        """Open the gate if enough of this batch is correct."""
        # float64, in which 4/5 equals the number 0.8, so that a rate on the threshold opens the gate.
        rate = float(batch.correct.double().mean())
        if self._opened_at is None and rate >= self.correct_rate_gate:
            self._opened_at = batch.step
        return {}

    def after(self, batch: Batch) -> Metrics:
        """Update the moving average of the variance with this batch's execution tokens, if it has some."""
        execution = batch.response_mask & ~batch.column("planning_mask").bool()
        # The variance of no tokens, 0, would count as a collapse.
        if not bool(execution.any()):
            return {}
        variance = float(F.masked.masked_variance(batch.column("uncertainty"), execution))
        # Started at the first variance: an average started at 0 would look like a collapse.
        previous = variance if self._variance is None else self._variance
        self._variance = _DECAY * previous + (1 - _DECAY) * variance
        self._seen += 1
        if self._seen == self.warmup_steps:
            self._initial = self._variance
        return {}

    def state_dict(self) -> State:
        """Return the step at which the gate opened, and the moving average of the variance."""
        return {"opened_at": self._opened_at, "seen": self._seen, "variance": self._variance, "initial": self._initial}

    def load_state_dict(self, state: State) -> None:
        """Restore the state that `state_dict` returned."""
        self._opened_at, self._seen = state["opened_at"], state["seen"]
        self._variance, self._initial = state["variance"], state["initial"]


def ramp(step: int, start: int, steps: int | str, delay: int | str, total: int) -> float:
    """Linear part of the pooling weight, in [0, 1].

    min(max(step - start - delay, 0) / steps, 1); 0 if steps is 0

    Args:
        step: training step, from 0.
        start: step at which the delay begins.
        steps: number of steps of the rise; "auto" ends it at 4/5 of `total`.
        delay: number of steps with weight 0; "auto" is 1/20 of `total`.
        total: number of steps of the run.
    """
    start += total // 20 if isinstance(delay, str) else delay
    if isinstance(steps, str):
        # At least one step, if the gate opens in the last fifth of the run.
        steps = max(total * 4 // 5 - start, 1)
    return min(max(step - start, 0) / steps, 1.0) if steps else 0.0


def entropy_metrics(uncertainty: Tensor, planning_mask: Tensor, response_mask: Tensor) -> Metrics:
    """Return sepa/{exec,plan}_entropy_{mean,var}: mean and variance over all execution and planning tokens.

    Args:
        uncertainty: [N, T]; planning_mask: [N, T]; response_mask: [N, T] bool.
    """
    planning = planning_mask.bool() & response_mask
    metrics: Metrics = {}
    for name, mask in (("exec", response_mask & ~planning), ("plan", planning)):
        metrics[f"sepa/{name}_entropy_mean"] = float(F.masked.masked_mean(uncertainty, mask))
        metrics[f"sepa/{name}_entropy_var"] = float(F.masked.masked_variance(uncertainty, mask))
    return metrics
