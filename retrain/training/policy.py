"""The trainable model: scoring and updates, in micro-batches whose size changes memory and speed but not results."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from retrain.errors import UserCodeError
from retrain.functional.mismatch import Mismatch
from retrain.functional.weights import ParameterReader, as_lazy
from retrain.protocols import ALONE, Ranks
from retrain.training.cpu_kernels import trim_freed_memory
from retrain.training.distributed.sharded_tensors import like, local
from retrain.training.distributed.sharding import shard
from retrain.training.model.forward import Forward, MicroBatch, ValueForward
from retrain.training.optim import VALUE_HEAD, Optimizer
from retrain.training.settings import POLICY_ADAPTER, PolicySettings
from retrain.types import Batch, Metrics, State

if TYPE_CHECKING:
    from retrain.algorithms.graph.objective import Objective, StepLoss
    from retrain.training.rounded_weights import RoundedWeights


@dataclass(frozen=True)
class _Step:
    """Input of one optimizer step.

    Attributes:
        batch: the rows of the minibatch.
        loss: the objective with its token weights over these rows.
        parts: micro-batches of the rows that have a gradient.
    """

    batch: Batch
    loss: StepLoss
    parts: Sequence[MicroBatch]


class TorchPolicy:
    """A transformers causal LM that is trained, on one device or sharded over the ranks' devices.

    The model stays in `eval` mode, so its dropout is off and does not change the log-probs; only the dropout of
    adapters is on in updates. The model can be used with `generate` and `save_pretrained` at any time.

    Attributes:
        model: the model in training.
        adapter: peft's wrapper of the model with LoRA, else None.
        step: number of optimizer steps taken.
        nonfinite: number of updates in a row, up to the last one, that skipped a step because its loss or gradient was
            not finite.
        settings: see `PolicySettings`.
        ranks: the processes that train the model together.
    """

    def __init__(
        self,
        model: Any,
        settings: PolicySettings,
        ranks: Ranks = ALONE,
        source: ParameterReader | None = None,
        shares: tuple[TorchPolicy, str] | None = None,
        *,
        has_values: bool = False,
    ) -> None:
        """Prepare the model for training.

        Args:
            model: a causal LM. Its weights become float32 master weights, except those that LoRA freezes.
            settings: see `PolicySettings`.
            ranks: the processes that train the model together; every rank passes the same model.
            source: reads the values of parameters on the meta device.
            shares: a policy with LoRA whose model and wrapper this policy shares, and the name of its own adapter.
            has_values: add a value head, zero at first; the policy then computes values instead of log-probs.
        """
        self.settings, self.ranks, self.step = settings, ranks, 0
        other, self._name = shares or (None, POLICY_ADAPTER)
        if other is None:
            self.adapter: Any = _lora().inject(model, settings.lora) if settings.lora else None
            self.model: Any = model if settings.lora else model.float()
        else:
            self.adapter, self.model = other.adapter, other.model
        self.model.eval()  # also for the modules of an adapter that was added for this policy
        if settings.gradient_checkpointing:
            _checkpoint_layers(self.model)
        self._shards = other._shards if other else shard(self.model, settings, ranks, source)
        # Before any forward pass: during one, FSDP replaces the sharded parameters of the model by whole ones.
        head = self._shards.spread(_value_head(self.model), settings) if has_values else None
        with self._own_adapter():  # only the active adapter's parameters require a gradient
            self.optimizer = Optimizer(self.model, settings, head)
        self._rounded: RoundedWeights | None = None
        if settings.rounds:
            from retrain.training.rounded_weights import RoundedWeights

            self._rounded = RoundedWeights(self.optimizer.parameters, settings.seed, ranks.rank)
        self.forward = Forward(self.model, settings, self._shards)
        if head is not None:
            with self._own_adapter():
                self.forward = ValueForward(self.model, settings, self._shards, head)
        self._earlier: dict[str, Tensor] = {}
        self.nonfinite, self._refused = 0, False
        self._floor = 0  # for `trim_freed_memory`

    def sibling(self, name: str, settings: PolicySettings, *, has_values: bool = False) -> TorchPolicy:
        """Create a second trainable model: a copy of this one or, with LoRA, a new adapter on the same base model.

        With LoRA the two policies share base weights and wrapper, and never use each other's adapter. Without LoRA
        the copy has the current weights: call this before the first update to start from the initial ones.

        Args:
            name: name of the adapter.
            settings: settings of the new policy; they have `lora` if this policy's have.
            has_values: see `__init__`.
        """
        if self.adapter is None:
            model, source = self._shards.copied(self.model)
            return TorchPolicy(model, settings, self.ranks, source, has_values=has_values)
        assert settings.lora is not None, "the sibling of a policy with LoRA needs LoRA settings"
        _lora().add(self.adapter, name, settings.lora)
        return TorchPolicy(self.model, settings, self.ranks, shares=(self, name), has_values=has_values)

    @property
    def device(self) -> torch.device:
        """Device of the computation; batches must be on it."""
        return self.forward.device

    def logprobs(self, batch: Batch, columns: Sequence[str] = ("old_logprobs",)) -> dict[str, Tensor]:
        """Compute the requested POLICY_COLUMNS in one forward pass, without gradient.

        Args:
            batch: N rows of T tokens.
            columns: names of the columns.
        Returns:
            {name: [N, T] float32, 0 outside response_mask}, in nats where the column is a log-prob or an entropy.
        """
        with self._own_adapter():
            return self.forward.logprobs(batch, columns)

    def values(self, batch: Batch) -> Tensor:
        """Compute the values [N, T] of a policy that `has_values`, without gradient, 0 outside response_mask.

        The value in column t is that of the prefix before token t, in the unit of the reward.
        """
        return self.logprobs(batch, ("predicted_values",))["predicted_values"]

    def head_weights(self) -> dict[str, Tensor]:
        """Return the whole weights of the value head by name, on every rank."""
        named = self.optimizer.parameters.items()
        return {name: self._shards.full(p.detach()).contiguous() for name, p in named if name.startswith(VALUE_HEAD)}

    def reference(self) -> Callable[[Batch], Tensor]:
        """Return a function that computes log-probs [N, T] with reference weights.

        With LoRA they are the base model's weights. Otherwise the first call of this method makes a frozen copy of the
        current weights, which all later calls share: call it before the first update to keep the initial weights.
        """
        if self.adapter is not None:
            return self._base_logprobs
        # Read now and not in the lambda, so that the copy has the initial weights.
        frozen = self._frozen
        return lambda batch: frozen.logprobs(batch)["old_logprobs"]

    def reference_weights(self) -> Mapping[str, Tensor]:
        """Return the reference's full weights by the base model's names; with LoRA, the frozen base."""
        if self.adapter is None:
            return self._frozen.weights()
        if self.settings.quantization:
            from retrain.training.model.quantized import dequantized

            return dequantized(self.model, self.ranks.rank)
        return self._shards.whole(_lora().base_weights(self.model))

    @cached_property
    def _frozen(self) -> Forward:
        model, source = self._shards.copied(self.model)
        model.requires_grad_(False)
        return Forward(model, self.settings, shard(model, self.settings, self.ranks, source))

    def _base_logprobs(self, batch: Batch) -> Tensor:
        with self.adapter.disable_adapter():
            return self.forward.logprobs(batch)["old_logprobs"]

    @contextmanager
    def in_float32(self) -> Generator[bool]:
        """Compute matrix products in float32 inside this block.

        Yields:
            False if that is not possible, because FSDP rounds sharded weights when it gathers them.
        """
        if self.forward.dtype != torch.float32 and self._shards.casts:
            yield False
            return
        with self.forward.in_float32():
            yield True

    def remember(self) -> None:
        """Copy the weights to CPU memory for `earlier_logprobs`. With LoRA nothing is copied."""
        if self.adapter is None:
            parameters = self.optimizer.parameters.items()
            self._earlier = {name: local(p.detach()).to("cpu", copy=True) for name, p in parameters}

    def earlier_logprobs(self, batch: Batch) -> Tensor | None:
        """Return log-probs [N, T] under the weights of the last `remember`, or LoRA's base; None before the first."""
        if self.adapter is not None:
            return self._base_logprobs(batch)
        if not self._earlier:
            return None
        self._swap_earlier()
        try:
            return self.forward.logprobs(batch)["old_logprobs"]
        finally:
            self._swap_earlier()

    @torch.no_grad()
    def _swap_earlier(self) -> None:
        for name, parameter in self.optimizer.parameters.items():
            # Swapped in place, so that the device never holds two copies of the weights.
            shard = local(parameter)
            current = shard.to("cpu", copy=True)
            shard.copy_(self._earlier[name])
            self._earlier[name] = current

    def update(self, batch: Batch, objective: Objective, recredit: Callable[[], Tensor] | None = None) -> Metrics:
        """Take `settings.minibatches` optimizer steps on the batch in each of `settings.epochs` epochs.

        The gradient of a step is that of the objective over its whole minibatch. It does not depend on the
        micro-batches, because the weight of every token is computed before the batch is divided. Rows without a
        gradient are left out of the forward pass. In an update of one step, `old_logprobs` are the current log-probs,
        so the importance ratio is exactly 1. In an update of several steps, they are computed before the first one.

        Args:
            batch: rows with advantages [N, T] and the columns that the objective reads.
            objective: the loss over the whole batch.
            recredit: called before each epoch after the first; returns its advantages [N, T]. None: every epoch uses
                those of the batch.
        Returns:
            Means over the steps of loss/*, policy/entropy, grad/norm, optim/lr, tokens/forwarded and update/*, and
            mismatch/* of the first step. A step whose loss or gradient norm is not finite leaves the weights unchanged
            and reports update/nonfinite = 1. A step without rows that have a gradient reports update/skipped = 1.
        """
        steps = self._plan(batch, objective)
        reports = list[Metrics]()
        self._refused = False
        for epoch in range(self.settings.epochs):
            if epoch and recredit is not None:
                steps = self._recredited(steps, batch.replace(advantages=recredit()), objective)
            with self._own_adapter():
                scored_before = len(steps) * self.settings.epochs > 1 and "old_logprobs" in objective.reads
                if scored_before and not epoch:
                    # In the micro-batches of the update: others round differently, and the first ratio would not be 1.
                    scored = [s.batch.replace(**self.forward.logprobs(s.batch, parts=s.parts)) for s in steps]
                    steps = [replace(step, batch=part) for step, part in zip(steps, scored, strict=True)]
                reports += [self._take(step, objective, scored_before) for step in steps]
        self._floor = trim_freed_memory(self._floor)
        self.nonfinite = self.nonfinite + 1 if self._refused else 0
        # After the first step the weights differ from the sampler's, so that mismatch/* would not test the engine.
        return _mean([reports[0], *({n: v for n, v in r.items() if "mismatch/" not in n} for r in reports[1:])])

    @torch.no_grad()
    def follow(self, other: TorchPolicy, rate: float) -> None:
        """Move the trained weights w towards those of another policy of the same shape: w + rate * (other - w)."""
        theirs = other.optimizer.parameters.values()
        for state, their in zip(self.optimizer.parameters.values(), theirs, strict=True):
            local(state).lerp_(local(their), rate)

    def gradient(self, batch: Batch, weights: Tensor) -> Tensor:
        """Return the gradient [D] of sum_{n,t} weights[n, t] * logprobs[n, t] over all D trained parameters.

        The gradient is not summed over ranks. Rows whose weights are all 0 are left out of the forward pass. The
        dropout of adapters is off.

        Args:
            batch: N rows of T tokens.
            weights: [N, T].
        """
        parameters = [*self.optimizer.parameters.values()]
        live = (weights != 0).any(-1).nonzero()[:, 0].tolist()
        with self._own_adapter():
            for index, _ in self.forward.micro_batches(batch, live):
                rows = batch.rows(index)
                width = rows.input_ids.shape[1]
                with self.forward.attention(width):
                    (self.forward.columns(rows)["logprobs"] * weights[index, :width]).sum().backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        self.model.zero_grad()
        return flat

    def weights(self) -> Mapping[str, Tensor]:
        """Return full weights by the base model's names, tied entries included, for a sampler; views where possible.

        With stochastic rounding they are the rounded weights. With LoRA they are `LazyWeights`: the adapter is merged
        into a matrix, in float32, when the matrix is read.
        """
        if self.adapter is None:
            return self.forward.weights()
        return as_lazy(self.reference_weights()).adapted(_lora().updates(self.model, self._name))

    def state_dict(self) -> State:
        """Return trained parameters (with LoRA those of the adapter), optimizer state and step, without copying.

        With stochastic rounding the parameters are the float32 masters.
        """
        parameters = self._rounded.masters if self._rounded else self.optimizer.parameters
        trained = {name: p.detach() for name, p in parameters.items()}
        return {"step": self.step, "model": trained, "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        """Restore the state that `state_dict` returned; training then continues with bit-identical results."""
        self.step = int(state["step"])
        if self._rounded:
            self._rounded.load(state["model"], self.step)
        else:
            for name, parameter in self.optimizer.parameters.items():
                parameter.copy_(like(state["model"][name], parameter))
        self.optimizer.load_state_dict(state["optimizer"])

    def save_adapter(self, folder: Path, base: str = "", card: str = "") -> None:
        """Write the LoRA adapter in peft's format.

        Args:
            folder: directory to write; an earlier one is replaced.
            base: path or name of the base model to record; "" keeps the one that the model was loaded from.
            card: text of the README.md; "" writes none.
        """
        _lora().save(self.adapter, folder, base, card)

    def load_adapter(self, folder: Path) -> None:
        """Load an adapter that `save_adapter` wrote.

        Raises:
            StorageError: the file cannot be read, or it does not fit this model.
        """
        _lora().load(self.adapter, folder)

    def _own_adapter(self) -> AbstractContextManager[None]:
        """Make this policy's adapter the only active and trainable one inside a block."""
        return nullcontext() if self.adapter is None else _lora().active(self.adapter, self._name)

    def _plan(self, batch: Batch, objective: Objective) -> list[_Step]:
        """Return one step per minibatch.

        A minibatch takes every `minibatches`-th row, so that the rows of a group are divided evenly among minibatches.
        """
        rows, steps = torch.arange(len(batch.input_ids), device=batch.input_ids.device), list[_Step]()
        # Fewer rows than minibatches: an empty one would be a step without a gradient.
        for start in range(min(self.settings.minibatches, len(rows))):
            part = batch if self.settings.minibatches == 1 else batch.rows(rows[start :: self.settings.minibatches])
            live = objective.live_rows(part).nonzero()[:, 0].tolist()
            steps.append(_Step(part, objective.step(part), self.forward.micro_batches(part, live)))
        return steps

    def _recredited(self, steps: Sequence[_Step], batch: Batch, objective: Objective) -> list[_Step]:
        """Plan the steps again with the advantages of `batch`; `old_logprobs` stay those of before the first epoch."""
        fresh = self._plan(batch, objective)
        return [
            replace(step, batch=step.batch.replace(old_logprobs=old.batch.column("old_logprobs")))
            for step, old in zip(fresh, steps, strict=True)
        ]

    def _take(self, step: _Step, objective: Objective, scored: bool) -> Metrics:
        """Take one optimizer step: sum the gradients of all micro-batches, check and clip them, apply them.

        Args:
            step: the minibatch.
            objective: the loss.
            scored: the batch has `old_logprobs`; otherwise the current log-probs are used.
        """
        batch, reported = self._with_step_signals(step.batch, objective, scored)
        tally = _Tally()
        lora = nullcontext() if self.adapter is None else _lora().training(self.model, self._name, self.ranks)
        with lora:  # the dropout of this policy's adapter
            for index, counts in step.parts:
                rows = batch.rows(index)
                width = rows.input_ids.shape[1]
                with self.forward.attention(width):
                    columns = self._loss_columns(rows, objective, scored)
                    # A repeated micro-batch does not count: its weights of 0 give gradients of 0.
                    weights = {name: weight[index, :width] * counts for name, weight in step.loss.weights.items()}
                    loss, sums = step.loss.of(columns, weights)
                    loss.backward()  # inside this block, because gradient checkpointing runs the attention again
                if counts:
                    tally.add(rows, columns, sums | {"loss/total": loss.detach()})
        metrics = tally.merged(self.ranks).metrics()
        return reported | metrics | self._apply(metrics.get("loss/total"))

    def _with_step_signals(self, batch: Batch, objective: Objective, scored: bool) -> tuple[Batch, Metrics]:
        """Return a batch with the columns of the step's signals, and their metrics; costs a forward pass if any."""
        if not objective.step_signals:
            return batch, {}
        current = self.forward.logprobs(batch)["old_logprobs"]
        scored_batch = batch if scored else batch.replace(old_logprobs=current)
        columns, metrics = objective.step_columns(scored_batch, current)
        return batch.replace(**columns), metrics

    def _loss_columns(self, rows: Batch, objective: Objective, scored: bool) -> dict[str, Any]:
        current = self.forward.columns(rows)
        if "logprobs" in current:
            current["old_logprobs"] = rows.column("old_logprobs") if scored else current["logprobs"].detach()
        names = objective.reads | {signal.name for signal in objective.step_signals}
        return {name: rows.column(name) for name in names - current.keys()} | current

    def _apply(self, loss: float | None) -> Metrics:
        """Apply the gradients if they and the loss are finite.

        Args:
            loss: the loss of the step; None if no row had a gradient.
        """
        if loss is None:
            return {"tokens/forwarded": 0.0, "update/skipped": 1.0, "update/nonfinite": 0.0}
        self._shards.sum_gradients(list(self.optimizer.parameters.values()))
        clipped = torch.nn.utils.clip_grad_norm_(self.optimizer.parameters.values(), self.settings.max_grad_norm)
        norm = float(self._shards.full(clipped))
        metrics = {"grad/norm": norm, "update/skipped": 0.0}
        # A single infinite gradient would turn all weights and the optimizer's moments into NaN.
        if finite := math.isfinite(loss) and math.isfinite(norm):
            before, gradient = self.optimizer.sampled()
            with self._rounded.updated(self.step + 1) if self._rounded else nullcontext():
                metrics["optim/lr"] = self.optimizer.step(self.step)
            metrics["update/changed"] = float(self._changed(before, gradient, metrics["optim/lr"]))
            self.step += 1
        self._refused |= not finite
        self.optimizer.zero_grad()
        return metrics | {"update/nonfinite": float(not finite)}

    def _changed(self, before: Tensor, gradient: Tensor, lr: float) -> bool:
        """Return True if a sampled weight has changed on any rank.

        Raises:
            UserCodeError: a sampled weight has a gradient, and none has changed.
        """
        # A sample suffices: a step moves nearly every weight that has a gradient.
        changed = not torch.equal(self.optimizer.sampled()[0], before)
        # All ranks decide alike: one that raised alone would leave the others waiting.
        reports = self.ranks.all_gather((changed, lr > 0 and bool(gradient.any())))
        if not any(changed for changed, _ in reports) and any(moved for _, moved in reports):
            raise UserCodeError(
                f"a step of the optimizer changed no weight, although there is a gradient; raise [optimizer] lr, which "
                f"is {lr:.3g} in this step, or remove the code that replaces the optimizer's step"
            )
        return any(changed for changed, _ in reports)


_BY_STALENESS = ("kl", "logp_diff_mean", "ess")
"""Metrics of the area `mismatch` that are also reported by staleness, if it differs among the tokens of a batch."""


class _Tally:
    """Sums over the micro-batches of a step."""

    def __init__(self) -> None:
        self.sums: dict[str, Any] = {}
        self.mismatch: Mismatch | None = None
        self.by_staleness: dict[int, Mismatch] = {}

    def add(self, rows: Batch, columns: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> None:
        # Expert rows were not sampled, so there is no sampler to compare with.
        mask = rows.response_mask & ~rows.is_expert[:, None]
        forwarded = {"tokens/forwarded": rows.attention_mask.sum()}
        if "logprobs" not in columns:
            self._join({**sums, **forwarded}, None)
            return
        mismatch = Mismatch.of(columns["logprobs"], rows.sampler_logprobs, mask)
        entropy = columns["entropy"].detach().where(mask, 0.0).sum()
        metrics = {"policy/entropy": entropy, "tokens": mask.sum()}
        self._join({**sums, **metrics, **forwarded}, mismatch)
        if (staleness := rows.extra.get("token_staleness")) is not None:
            for age in (staleness[mask & (staleness >= 0)]).unique().tolist():
                part = Mismatch.of(columns["logprobs"], rows.sampler_logprobs, mask & (staleness == age))
                self.by_staleness[age] = self.by_staleness[age] + part if age in self.by_staleness else part

    def _join(self, sums: Mapping[str, Tensor], mismatch: Mismatch | None) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0) + value
        if mismatch is not None:
            self.mismatch = mismatch if self.mismatch is None else self.mismatch + mismatch

    def merged(self, ranks: Ranks) -> _Tally:
        """Return the sum over all ranks, added in the order of the ranks, so that it is bit-identical on each."""
        if ranks.size == 1:
            return self
        sums = {name: value.cpu() for name, value in self.sums.items()}
        mismatch = self.mismatch and Mismatch(self.mismatch.sums.cpu(), self.mismatch.extremes.cpu())
        total = _Tally()
        for part in ranks.all_gather((sums, mismatch)):
            total._join(*part)
        return total

    def metrics(self) -> Metrics:
        """Return the sums as numbers; the entropy is divided by the number of the policy's tokens."""
        totals = {name: float(value) for name, value in self.sums.items()}  # synchronizes with the GPU, only here
        if sampled := totals.pop("tokens", 0.0):
            totals["policy/entropy"] /= sampled
        else:
            totals.pop("policy/entropy", None)
        for age, part in sorted(self.by_staleness.items()):
            metrics = part.metrics()
            totals |= {f"mismatch/{name}_stale_{age}": metrics[f"mismatch/{name}"] for name in _BY_STALENESS}
        return totals | (self.mismatch.metrics() if self.mismatch else {})


def _lora() -> Any:
    """Return the module of adapters, which a run without them does not import."""
    from retrain.training.model import lora

    return lora


def _value_head(model: Any) -> torch.nn.Linear:
    """Make a linear layer from hidden states to one number, with all parameters 0, on the model's device."""
    # Zero: the first values are 0, as if there were no critic yet.
    head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1)
    for parameter in head.parameters():
        torch.nn.init.zeros_(parameter)
    return head.to(model.device)


def _mean(reports: Sequence[Metrics]) -> Metrics:
    """Return the mean of every metric over the steps that report it."""
    names = dict.fromkeys(name for report in reports for name in report)
    values = {name: [report[name] for report in reports if name in report] for name in names}
    return {name: sum(values_of_name) / len(values_of_name) for name, values_of_name in values.items()}


def _checkpoint_layers(model: Any) -> None:
    """Turn on gradient checkpointing.

    transformers checkpoints layers in training mode only, so that the layers are put into it; the modules inside them
    stay in eval mode.
    """
    # Its name before transformers 5.23 goes with version 6.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
