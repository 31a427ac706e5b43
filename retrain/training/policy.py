"""The trainable model: scoring and updates in micro-batches whose size changes memory, not results."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from retrain.functional.mismatch import Mismatch
from retrain.protocols import ALONE, Ranks
from retrain.training.model import lora
from retrain.training.model.forward import Forward, MicroBatch, ValueForward
from retrain.training.model.loading import ParameterReader
from retrain.training.optim import VALUE_HEAD, Optimizer
from retrain.training.rounded_weights import RoundedWeights
from retrain.training.settings import PolicySettings
from retrain.training.shards import like, local, shard
from retrain.types import Batch, Metrics, State
from retrain.weights import as_lazy

if TYPE_CHECKING:
    from retrain.algorithms.graph.objective import Objective, StepLoss


@dataclass(frozen=True)
class _Step:
    """What one optimizer step sees: rows, their loss, micro-batches of live rows."""

    batch: Batch
    loss: StepLoss
    parts: Sequence[MicroBatch]


class TorchPolicy:
    """A transformers causal LM under training, on one device or spread over the ranks' devices.

    The model stays in `eval` mode, so that dropout never sets the policy apart from its own log-probs (the
    adapters' own dropout aside), and remains usable for `generate` and `save_pretrained`.

    Args:
        model: a causal LM; its weights become float32 master weights, except those that LoRA freezes.
        settings: see `PolicySettings`.

    Attributes:
        model: the model being trained. step: optimizer steps taken. adapter: peft's wrapper of it, or None.
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
            ranks: the processes that train it together; each gives the same model.
            source: of the values of parameters on the meta device.
            shares: a policy with LoRA whose model and wrapper this one shares, and the adapter to train.
            has_values: train a head that gives one number per token, zero at first, instead of log-probs.
        """
        self.settings, self.ranks, self.step = settings, ranks, 0
        other, self._name = shares or (None, lora.POLICY)
        if other is None:
            self.adapter: Any = lora.inject(model, settings.lora) if settings.lora else None
            self.model: Any = model if settings.lora else model.float()
        else:
            self.adapter, self.model = other.adapter, other.model
        self.model.eval()  # also the modules of an adapter that was added for this policy
        if settings.gradient_checkpointing:
            _checkpoint_layers(self.model)
        self._shards = other._shards if other else shard(self.model, settings, ranks, source)
        # Before any forward: while one runs, the model has other parameters than those that are sharded.
        head = self._shards.spread(_value_head(self.model), settings) if has_values else None
        with lora.active(self.adapter, self._name):  # what is trained is what has gradients in this block
            self.optimizer = Optimizer(self.model, settings, head)
        rounded = RoundedWeights(self.optimizer.parameters, settings.seed, ranks.rank) if settings.rounds else None
        self._rounded = rounded
        self.forward = Forward(self.model, settings, self._shards)
        if head is not None:
            with lora.active(self.adapter, self._name):
                self.forward = ValueForward(self.model, settings, self._shards, head)
        self._earlier: dict[str, Tensor] = {}

    def sibling(self, name: str, settings: PolicySettings, *, has_values: bool = False) -> TorchPolicy:
        """A second model to train, which starts where training started: a copy, or with LoRA another adapter.

        With LoRA base weights and wrapper are shared; forwards, updates and weights of either policy never see the
        other's adapter. Without, call it before the first update.
        """
        if self.adapter is None:
            model, source = self._shards.copied(self.model)
            return TorchPolicy(model, settings, self.ranks, source, has_values=has_values)
        assert settings.lora is not None, "the sibling of a policy with LoRA is an adapter too"
        lora.add(self.adapter, name, settings.lora)
        return TorchPolicy(self.model, settings, self.ranks, shares=(self, name), has_values=has_values)

    @property
    def device(self) -> torch.device:
        """Where the weights are, and where batches must be."""
        return self.forward.device

    def logprobs(self, batch: Batch, columns: Sequence[str] = ("old_logprobs",)) -> dict[str, Tensor]:
        """POLICY_COLUMNS by name, each [N, T] float32, 0 outside response_mask, in one pass."""
        with lora.active(self.adapter, self._name):
            return self.forward.logprobs(batch, columns)

    def values(self, batch: Batch) -> Tensor:
        """Values [N, T] of the prefix before each response token, of a model that `has_values`."""
        assert isinstance(self.forward, ValueForward)
        with lora.active(self.adapter, self._name):
            return self.forward.values(batch)

    def head_weights(self) -> dict[str, Tensor]:
        """Weights of the head for values, by name, whole on every rank."""
        named = self.optimizer.parameters.items()
        return {name: self._shards.full(p.detach()).contiguous() for name, p in named if name.startswith(VALUE_HEAD)}

    def reference(self) -> Callable[[Batch], Tensor]:
        """Scores [N, T] by the weights of the first call: the base model under the adapters, or a frozen copy.

        Whoever asks before the first update gets the initial weights; all share the one copy.
        """
        if self.adapter is not None:
            return self._base_logprobs
        frozen = self._frozen
        return lambda batch: frozen.logprobs(batch)["old_logprobs"]

    def reference_weights(self) -> Mapping[str, Tensor]:
        """Full weights of the reference, by the base model's names: with LoRA the frozen ones under the adapters."""
        if self.adapter is None:
            return self._frozen.weights()
        if self.settings.quantization:
            from retrain.training.model.quantized import dequantized

            return dequantized(self.model, self.ranks.rank)
        return self._shards.whole(lora.base_weights(self.model))

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
        """Multiply in float32 inside this block; yields whether that is so: sharded weights come rounded already."""
        before = self.forward.dtype
        possible = before == torch.float32 or not self._shards.casts
        self.forward.dtype = torch.float32 if possible else before
        try:
            yield possible
        finally:
            self.forward.dtype = before

    def remember(self) -> None:
        """Keep a copy of the weights for `earlier_logprobs`, in the processor's memory; LoRA needs none."""
        if self.adapter is None:
            parameters = self.optimizer.parameters.items()
            self._earlier = {name: local(p.detach()).to("cpu", copy=True) for name, p in parameters}

    def earlier_logprobs(self, batch: Batch) -> Tensor | None:
        """Scores [N, T] by the weights of the last `remember`, or of LoRA's base; None before the first."""
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
            own = local(parameter)
            current = own.to("cpu", copy=True)
            own.copy_(self._earlier[name])
            self._earlier[name] = current

    def update(self, batch: Batch, objective: Objective, recredit: Callable[[], Tensor] | None = None) -> Metrics:
        """`epochs` passes of `minibatches` optimizer steps each over the batch.

        The gradient is that of the objective over the whole minibatch and does not depend on the micro-batches: the
        weight of every token is fixed first. Rows that contribute nothing are not forwarded. With a single
        step `old_logprobs` are the current ones (ratio exactly 1); with several they are scored first, in
        the micro-batches of the steps.

        Args:
            recredit: advantages [N, T] for each epoch after the first; None: those of the batch in every epoch.
        Returns:
            loss/*, policy/entropy, grad/norm, optim/lr, tokens/forwarded, update/*, means over the steps, and
            mismatch/* of the first. A step whose loss or gradient is not finite changes nothing and
            reports update/nonfinite = 1; one without a live row reports update/skipped = 1.
        """
        steps, reports = self._plan(batch, objective), list[Metrics]()
        for epoch in range(self.settings.epochs):
            if epoch and recredit is not None:
                steps = self._recredited(steps, batch.replace(advantages=recredit()), objective)
            with lora.active(self.adapter, self._name):
                several = len(steps) * self.settings.epochs > 1 and "old_logprobs" in objective.reads
                if several and not epoch:
                    # Scored in the micro-batches of the update: in others the ratio would not begin at exactly 1.
                    scored = [one.batch.replace(**self.forward.logprobs(one.batch, parts=one.parts)) for one in steps]
                    steps = [replace(step, batch=part) for step, part in zip(steps, scored, strict=True)]
                reports += [self._take(step, objective, several) for step in steps]
        # Once the weights have moved, the distance to the sampler says nothing about the engine.
        return _mean([reports[0], *({n: v for n, v in r.items() if "mismatch/" not in n} for r in reports[1:])])

    @torch.no_grad()
    def follow(self, other: TorchPolicy, rate: float) -> None:
        """Move the trained weights towards those of another policy of the same shape: w + rate * (other - w)."""
        theirs = other.optimizer.parameters.values()
        for own, their in zip(self.optimizer.parameters.values(), theirs, strict=True):
            local(own).lerp_(local(their), rate)

    def gradient(self, batch: Batch, weights: Tensor) -> Tensor:
        """[D] gradient of sum_{n,t} weights[n, t] * logprobs[n, t] in the trained parameters, one behind the other.

        On one rank. Rows without weight are not forwarded. Adapters' dropout is off.
        """
        parameters = [*self.optimizer.parameters.values()]
        live = (weights != 0).any(-1).nonzero()[:, 0].tolist()
        with lora.active(self.adapter, self._name):
            for index, _ in self.forward.micro_batches(batch, live):
                rows = batch.rows(index)
                width = rows.input_ids.shape[1]
                with self.forward.attention(width):
                    (self.forward.columns(rows)["logprobs"] * weights[index, :width]).sum().backward()
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([one.flatten() for one in found])
        self.model.zero_grad()
        return flat

    def weights(self) -> Mapping[str, Tensor]:
        """Full weights by the base model's names, tied entries included, for a sampler; views where possible.

        With stochastic rounding they are bfloat16 numbers. With LoRA they are `LazyWeights`: a matrix is merged in
        float32 when it is read.
        """
        if self.adapter is None:
            return self.forward.weights()
        return as_lazy(self.reference_weights()).adapted(lora.updates(self.model, self._name))

    def state_dict(self) -> State:
        """Trained parameters (with LoRA the adapters only), optimizer state and step; the tensors are not copies.

        Of weights that are rounded they are the masters.
        """
        parameters = self._rounded.masters if self._rounded else self.optimizer.parameters
        trained = {name: p.detach() for name, p in parameters.items()}
        return {"step": self.step, "model": trained, "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        """Restore what `state_dict` gave; training continues bit for bit."""
        self.step = int(state["step"])
        if self._rounded:
            self._rounded.load(state["model"], self.step)
        else:
            for name, parameter in self.optimizer.parameters.items():
                parameter.copy_(like(state["model"][name], parameter))
        self.optimizer.load_state_dict(state["optimizer"])

    def save_adapter(self, folder: Path, base: str = "", card: str = "") -> None:
        """Write the adapter in peft's format.

        Args:
            base: where its base model is, if not where it was loaded from.
            card: text of a README.md.
        """
        lora.save(self.adapter, folder, base, card)

    def load_adapter(self, folder: Path) -> None:
        """Take what `save_adapter` wrote; StorageError if it cannot be read or is another model's."""
        lora.load(self.adapter, folder)

    def _plan(self, batch: Batch, objective: Objective) -> list[_Step]:
        """A step for each minibatch: every `minibatches`-th row, so that each has a share of every group."""
        rows, steps = torch.arange(len(batch.input_ids), device=batch.input_ids.device), list[_Step]()
        for start in range(min(self.settings.minibatches, len(rows))):
            part = batch if self.settings.minibatches == 1 else batch.rows(rows[start :: self.settings.minibatches])
            live = objective.live_rows(part).nonzero()[:, 0].tolist()
            steps.append(_Step(part, objective.step(part), self.forward.micro_batches(part, live)))
        return steps

    def _recredited(self, steps: Sequence[_Step], batch: Batch, objective: Objective) -> list[_Step]:
        """The steps with the advantages of `batch`, and log-probs as they were scored before the first epoch."""
        fresh = self._plan(batch, objective)
        return [
            replace(one, batch=one.batch.replace(old_logprobs=old.batch.column("old_logprobs")))
            for one, old in zip(fresh, steps, strict=True)
        ]

    def _take(self, step: _Step, objective: Objective, scored: bool) -> Metrics:
        """One optimizer step: gradients of all micro-batches, guard, clip, apply.

        Args:
            scored: the batch has `old_logprobs`; otherwise they are the current ones.
        """
        tally = _Tally()
        with lora.training(self.model, self._name, self.ranks):
            for index, counts in step.parts:
                rows = step.batch.rows(index)
                width = rows.input_ids.shape[1]
                with self.forward.attention(width):
                    columns = self._loss_columns(rows, objective, scored)
                    weights = {name: weight[index, :width] * counts for name, weight in step.loss.weights.items()}
                    loss, sums = step.loss.of(columns, weights)
                    loss.backward()  # in here: with gradient checkpointing it runs the attention again
                if counts:
                    tally.add(rows, columns, sums | {"loss/total": loss.detach()})
        metrics = tally.merged(self.ranks).metrics()
        return metrics | self._apply(metrics.get("loss/total"))

    def _loss_columns(self, rows: Batch, objective: Objective, scored: bool) -> dict[str, Any]:
        current = self.forward.columns(rows)
        if "logprobs" in current:
            current["old_logprobs"] = rows.column("old_logprobs") if scored else current["logprobs"].detach()
        return {name: rows.column(name) for name in objective.reads - current.keys()} | current

    def _apply(self, loss: float | None) -> Metrics:
        """Step along the gradients unless they or the loss are not finite; the loss is None without a live row."""
        if loss is None:
            return {"tokens/forwarded": 0.0, "update/skipped": 1.0, "update/nonfinite": 0.0}
        self._shards.sum_gradients(list(self.optimizer.parameters.values()))
        clipped = torch.nn.utils.clip_grad_norm_(self.optimizer.parameters.values(), self.settings.max_grad_norm)
        norm = float(self._shards.full(clipped))
        metrics = {"grad/norm": norm, "update/skipped": 0.0}
        # One infinite gradient would make every weight, and the optimizer's moments, not a number for good.
        if finite := math.isfinite(loss) and math.isfinite(norm):
            with self._rounded.updated(self.step + 1) if self._rounded else nullcontext():
                metrics["optim/lr"] = self.optimizer.step(self.step)
            self.step += 1
        self.optimizer.zero_grad()
        return metrics | {"update/nonfinite": float(not finite)}


class _Tally:
    """Sums over the micro-batches of a step."""

    def __init__(self) -> None:
        self.sums: dict[str, Any] = {}
        self.mismatch: Mismatch | None = None

    def add(self, rows: Batch, columns: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> None:
        mask = rows.response_mask & ~rows.is_expert[:, None]
        forwarded = {"tokens/forwarded": rows.attention_mask.sum()}
        if "logprobs" not in columns:
            self._join({**sums, **forwarded}, None)
            return
        mismatch = Mismatch.of(columns["logprobs"], rows.sampler_logprobs, mask)
        entropy = columns["entropy"].detach().where(mask, 0.0).sum()
        own = {"policy/entropy": entropy, "tokens": mask.sum()}
        self._join({**sums, **own, **forwarded}, mismatch)

    def _join(self, sums: Mapping[str, Tensor], mismatch: Mismatch | None) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0) + value
        if mismatch is not None:
            self.mismatch = mismatch if self.mismatch is None else self.mismatch + mismatch

    def merged(self, ranks: Ranks) -> _Tally:
        """The sum of all ranks' tallies, in their order, so that every rank has the same bits."""
        if ranks.size == 1:
            return self
        sums = {name: value.cpu() for name, value in self.sums.items()}
        mismatch = self.mismatch and Mismatch(self.mismatch.sums.cpu(), self.mismatch.extremes.cpu())
        total = _Tally()
        for part in ranks.all_gather((sums, mismatch)):
            total._join(*part)
        return total

    def metrics(self) -> Metrics:
        """The sums as numbers, the entropy as the mean over the policy's tokens."""
        found = {name: float(value) for name, value in self.sums.items()}  # the first time that a GPU is waited for
        if sampled := found.pop("tokens", 0.0):
            found["policy/entropy"] /= sampled
        else:
            found.pop("policy/entropy", None)
        return found | (self.mismatch.metrics() if self.mismatch else {})


def _value_head(model: Any) -> torch.nn.Linear:
    """A linear layer from the model's hidden states to one number, zero, on the model's device."""
    head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1)
    for parameter in head.parameters():
        torch.nn.init.zeros_(parameter)
    return head.to(model.device)


def _mean(reports: Sequence[Metrics]) -> Metrics:
    """Mean of every metric over the steps that report it."""
    names = dict.fromkeys(name for report in reports for name in report)
    values = {name: [report[name] for report in reports if name in report] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items()}


def _checkpoint_layers(model: Any) -> None:
    """transformers checkpoints layers in training mode only; the modules inside them stay in eval mode."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
