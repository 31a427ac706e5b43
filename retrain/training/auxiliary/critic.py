"""A critic: a second model that is trained to predict the return of prefixes. Importing this does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from retrain import functional as F
from retrain.algorithms.graph.objective import Objective
from retrain.algorithms.transforms.token_returns import gae
from retrain.registry import Component, Finding, find, signal
from retrain.training.auxiliary.second_model import check_path, own_optimizer, trained_second_model
from retrain.training.reference import ScoringSignal
from retrain.types import Batch, Metrics, State

if TYPE_CHECKING:
    from torch import Tensor

    from retrain.training.policy import TorchPolicy

_ROUNDING = 1e-10
"""Relative variance below which float32 targets count as equal."""
_PositiveRate = Annotated[float, Field(gt=0)]
_UnitShare = Annotated[float, Field(ge=0, le=1)]


def _check(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    yield from check_path(params["path"], config, "critic")
    steps = config.training.max_steps
    # A run without steps trains nothing on purpose.
    if 0 < steps <= params["warmup_steps"]:
        problem = f"the policy is never trained: only the critic is, and the run has {steps} steps"
        yield Finding(("warmup_steps",), problem, "use fewer, or raise [training] max_steps", fatal=False)


@signal("values", table="critic", check=_check, models=("trained",))
class Critic(ScoringSignal):
    """Value of each response token: the expected return of the prefix before it.

    V_t, [N, T] in the unit of the reward, 0 outside response_mask
    target_t = A_t + V_t, with A_t from `gae` with the critic's own lam and the values before the update
    loss = mean over tokens of 0.5 * max((v_t - target_t)^2, (clip(v_t, V_t - clip, V_t + clip) - target_t)^2)

    The critic is a language model that starts as the initial policy. A linear head, zero at first, replaces the output
    embedding. With LoRA the critic is a second adapter on the policy's base model, with its own head. Its optimizer is
    AdamW without weight decay at a constant rate. Expert rows do not train it.

    Args:
        path: model to start from instead of the initial policy; it needs the policy's tokenizer.
        lr, max_grad_norm: learning rate and gradient clipping of the critic's optimizer.
        epochs: optimizer steps on each batch.
        clip: limit of the change of a value in the loss; "none" for no limit.
        gamma, lam: discount and GAE parameter of the target; gamma should equal that of [gae].
        warmup_steps: number of first steps in which only the critic is trained.

    Metrics, of the values before the update: critic/explained_variance, 1 - var(target - V) / var(target) over
    tokens; critic/value_mean and critic/target_mean; critic/loss and critic/grad_norm of the updates.

    References: Schulman et al., GAE, arXiv:1506.02438; Schulman et al., PPO, arXiv:1707.06347; Yue et al., VAPO,
        arXiv:2504.05118 (a separate lam for the critic, and the warm-up).
    """

    def __init__(  # noqa: PLR0913 - the policy, the tokenizer and eight keys
        self,
        policy: TorchPolicy,
        tokenizer: Any,
        *,
        path: str | None = None,
        lr: _PositiveRate = 1e-5,
        max_grad_norm: _PositiveRate = 1.0,
        epochs: Annotated[int, Field(ge=1)] = 1,
        clip: _PositiveRate | Literal["none"] = 0.2,
        gamma: _UnitShare = 1.0,
        lam: _UnitShare = 1.0,
        warmup_steps: Annotated[int, Field(ge=0)] = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._gamma = gamma
        self._lam = lam
        self._warmup_steps = warmup_steps
        settings = own_optimizer(policy, "critic", lr, max_grad_norm, epochs)
        self.model: Any = trained_second_model(
            policy, tokenizer, "critic", settings, path, "[critic] path", has_values=True
        )
        self.score = self.model.values
        term = Component("loss", "value", value_loss, "critic").bind({"clip": None if clip == "none" else clip})
        self._objective = Objective([term], find("reduction", "token_mean").bind())

    def holds_policy(self, step: int) -> bool:
        """Return True in the first `warmup_steps` steps, in which only the critic is trained."""
        return step < self._warmup_steps

    def after(self, batch: Batch) -> Metrics:
        """Train the critic on the policy's rows; return its metrics."""
        rows = batch.rows((~batch.is_expert & batch.response_mask.any(-1)).nonzero()[:, 0])
        if not len(rows.rewards):
            return {}
        values, mask = rows.column("values"), rows.response_mask
        target = values + gae(rows.turn_rewards, values, mask, gamma=self._gamma, lam=self._lam)
        report = self.model.update(rows.replace(value_targets=target), self._objective)
        update = {"loss": report["loss/value"], "grad_norm": report["grad/norm"]} if "grad/norm" in report else {}
        metrics = explained(values, target, mask) | update | {"nonfinite": report["update/nonfinite"]}
        return {f"critic/{name}": value for name, value in metrics.items()}

    def state_dict(self) -> State:
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self.model.load_state_dict(state["model"])

    def export(self, folder: Path) -> None:
        """Write the model in transformers format, with a merged adapter, and the head as value_head.safetensors."""
        from safetensors.torch import save_file

        from retrain.training.model.loading import save_model

        save_model(folder, self.model.model, self._tokenizer, self.model.weights())
        save_file(self.model.head_weights(), folder / "value_head.safetensors")


def value_loss(
    predicted_values: Tensor, values: Tensor, value_targets: Tensor, response_mask: Tensor, *, clip: float | None
) -> Tensor:
    """Clipped squared error of each value.

    0.5 * max((v - R)^2, (clip(v, V - clip, V + clip) - R)^2)

    Args:
        predicted_values: v [N, T], with gradient.
        values: V [N, T], the values before the update.
        value_targets: R [N, T].
        response_mask: [N, T] bool.
        clip: limit of the change of a value; None: 0.5 * (v - R)^2.
    Returns:
        [N, T], 0 outside response_mask.
    References: Schulman et al., PPO, arXiv:1707.06347; the clipping of values is that of OpenAI's implementation.
    """
    new, old = F.masked.keep(predicted_values, response_mask), F.masked.keep(values, response_mask)
    target = F.masked.keep(value_targets, response_mask)
    error = (new - target).square()
    if clip is not None:
        # The larger error, as in PPO: a value gets no reward for moving further than `clip`.
        error = error.maximum(((old + (new - old).clamp(-clip, clip)) - target).square())
    return 0.5 * error


def explained(values: Tensor, targets: Tensor, mask: Tensor) -> Metrics:
    """Mean value, mean target, and the explained variance, over tokens.

    explained_variance = 1 - var(target - V) / var(target); it is left out if all targets are equal.

    Args:
        values: V [N, T]; targets: [N, T]; mask: [N, T] bool.
    """
    metrics = {
        "value_mean": float(F.masked.masked_mean(values, mask)),
        "target_mean": float(F.masked.masked_mean(targets, mask)),
    }
    # Equal targets have nothing to explain, and rounding would divide rounding.
    spread = float(F.masked.masked_variance(targets, mask))
    if spread > _ROUNDING * (1 + metrics["target_mean"] ** 2):
        metrics["explained_variance"] = 1 - float(F.masked.masked_variance(targets - values, mask)) / spread
    return metrics
