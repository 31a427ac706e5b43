"""Objective of an update: weighted loss terms, reduced with the denominators of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from retrain.algorithms.graph.column_graph import SignalLookup
from retrain.algorithms.graph.pipeline import called, check_result
from retrain.errors import ComponentError
from retrain.registry import Component, loss, transform
from retrain.types import BASE_COLUMNS, POLICY_COLUMNS, Batch, Metrics

if TYPE_CHECKING:
    from torch import Tensor


class Objective:
    """Weighted sum of loss terms under a reduction; `step` defines it.

    Args:
        terms: bound loss terms.
        reduction: bound reduction of the terms.
        corrections: transforms that multiply the advantages by an importance weight of `old_logprobs` and
            `sampler_logprobs`, in order. The result of a row depends on that row only, and an advantage of 0 stays 0.
            A correction that only drops tokens reports their share as policy/NAME_fraction, in which a token counts
            with its weight in the loss.
        sft_reduction: reduction of the expert's terms if there are terms of both sources; None: `reduction`.
        signal: see `SignalLookup`. A signal that reads `logprobs` is computed in every optimizer step.

    Attributes:
        terms: the loss terms whose weight is not 0.
        share: name of the column with the weight of the expert's terms if there are terms of both sources, computed by
            the signal `SHARE`; else "".
        sources: sources of the rows that the terms train on: "policy", "expert" or both.
        reads: columns that terms and corrections read, except the current `logprobs`; `entropy` is that of the current
            policy.
        signals: columns of `reads` that a signal must compute, such as `ref_logprobs`.
        step_signals: signals of the optimizer step that terms read; see `step_columns`.
    """

    def __init__(
        self,
        terms: Sequence[Component],
        reduction: Component,
        corrections: Sequence[Component] = (),
        sft_reduction: Component | None = None,
        signal: SignalLookup = lambda name: None,
    ) -> None:
        # A term of weight 0 must not cost anything: `kl` would load a reference model.
        self.terms = [term for term in terms if term.params["weight"] != 0]
        self.reduction, self.corrections = reduction, tuple(corrections)
        if not self.terms:
            raise ComponentError("no loss term has a weight other than 0", 'add one, such as name = "ppo_clip"')
        names = [term.name for term in self.terms]
        for name in names:
            if names.count(name) > 1:
                raise ComponentError(f'loss "{name}" is listed twice', "keep one of them and set its weight")
        self.sources = frozenset(source_of(term) for term in self.terms)
        reads = frozenset(name for bound in (*self.terms, *self.corrections) for name in bound.reads)
        # Sorted, because the order of a set of texts differs between processes, and ranks compute together.
        named = [signal(name) for name in sorted(reads - BASE_COLUMNS - POLICY_COLUMNS)]
        self.step_signals = [bound for bound in named if bound and "logprobs" in bound.reads]
        reads |= {name for bound in self.step_signals for name in bound.reads}
        self.reads = reads - {"logprobs", *(bound.name for bound in self.step_signals)}
        self._sft_reduction, self.share = reduction, ""
        if self.mixed:
            from retrain.algorithms.mix import SHARE

            self.share = SHARE
            self.reads |= {self.share}
            self._sft_reduction = sft_reduction or reduction
        self.signals = self.reads - BASE_COLUMNS - POLICY_COLUMNS

    @property
    def mixed(self) -> bool:
        """True if both policy and expert terms are in use."""
        return len(self.sources) > 1

    def live_rows(self, batch: Batch) -> Tensor:
        """Return [N] bool, True for rows that contribute to a term; the forward pass can skip all others."""
        # A term that vanishes with the advantage needs no forward pass of rows without credit.
        moved = (batch.advantages != 0).any(-1)
        live = batch.is_expert.new_zeros(batch.is_expert.shape)
        for term in self.terms:
            rows = _rows(term, batch)
            live = live | (rows & moved if loss.traits_of(term).vanishes else rows)
        return live

    def step_columns(self, batch: Batch, logprobs: Tensor) -> tuple[dict[str, Any], Metrics]:
        """Return the columns of the optimizer step's signals, and their metrics.

        A micro-batch has a few rows, which depend on `micro_batch_tokens`: a statistic of the batch, such as its
        effective sample size, is computed here, once, from all rows of the step.

        Args:
            batch: all rows of the step, with the columns in `reads`.
            logprobs: [N, T] current log-probs, without gradient.
        """
        columns: dict[str, Any] = {}
        metrics: Metrics = {}
        for bound in self.step_signals:
            read = {name: logprobs if name == "logprobs" else batch.column(name) for name in bound.reads}
            call, result = called(bound, read)
            value, reported = call.split(result)
            # The checks of a signal read no other column.
            check_result(call, bound, value, {"response_mask": batch.response_mask})
            columns[bound.name] = value
            metrics |= call.metrics(reported)
        return columns, metrics

    def step(self, batch: Batch) -> StepLoss:
        """Return the loss of an optimizer step on this batch, as a function of the step's micro-batches.

            L = sum over terms k of c_k * sum_{n,t} w_k[n,t] * l_k[n,t]

        l_k is a loss term on corrected advantages. w_k is the reduction's weight, which contains the denominator. c_k
        is the term's `weight`. If there are terms of both sources, it is multiplied by 1 - share for the policy's terms
        and by share for the expert's.
        """
        # Denominators come from the term's rows of the whole batch. With those of a micro-batch or
        # of a rank, a token would have more weight in a part with fewer tokens.
        weights: dict[str, Tensor] = {}
        for term in self.terms:
            mask = (batch.response_mask & _rows(term, batch)[:, None]).to(batch.advantages.dtype)
            reduction = self._sft_reduction if source_of(term) == "expert" else self.reduction
            weights[term.name] = _reduction_weight(reduction, batch, mask)

        # Every policy term weighs tokens alike, so the first stands for all in the metric.
        first = next((term.name for term in self.terms if source_of(term) == "policy"), "")

        def loss(columns: Mapping[str, Any], signals: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            # Corrections multiply the advantages by an importance weight of trainer and sampler.
            metrics = dict[str, Any]()
            for correction in self.corrections:
                before = columns["advantages"]
                call, corrected = called(correction, columns)
                after = call.tensor(corrected, before.shape, before)
                columns = {**columns, "advantages": after}
                if transform.traits_of(correction).drops_only and first:
                    dropped = (before != 0) & (after == 0)
                    _add(metrics, {f"policy/{correction.name}_fraction": (dropped * signals[first]).sum()})
            share = float(columns[self.share]) if self.mixed else None
            total: Any = 0.0
            for term in self.terms:
                weight, factor = signals[term.name], float(term.params["weight"])
                if share is not None:
                    factor *= share if source_of(term) == "expert" else 1 - share
                values, reported = _term_values(term, columns, weight)
                # A value outside the term's tokens may be NaN or infinite, and times 0 it would be NaN.
                reduced = (values.where(weight != 0, 0.0) * weight).sum()
                total = total + factor * reduced
                _add(metrics, {f"loss/{term.name}": reduced.detach()})
                _add(metrics, {name: (part.detach() * weight).sum() for name, part in reported.items()})
            return total, metrics

        return StepLoss(weights, loss)


class StepLoss(NamedTuple):
    """Function that an optimizer step minimises.

    Attributes:
        weights: weight of each token in each term, [N, T], by the term's name. They do not depend
            on the split into micro-batches.
        of: (columns, weights) of some rows -> (scalar to back-propagate, sums that micro-batches add up to metrics of
            the whole batch). `columns` are `logprobs`, with gradient, and everything in `Objective.reads`; `weights`
            are the same rows of the attribute. The sums are loss/<term> without its factor, and what terms report.
    """

    weights: Mapping[str, Tensor]
    of: Callable[[Mapping[str, Any], Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]


def _reduction_weight(reduction: Component, batch: Batch, mask: Tensor) -> Tensor:
    read = {name: mask if name == "mask" else batch.column(name) for name in reduction.reads}
    call, weights = called(reduction, read)
    if not bool(call.tensor(weights, mask.shape, mask).isfinite().all()):
        raise call.fail("returned a NaN or infinite weight")
    return weights


def source_of(term: Component) -> str:
    """Return the source of the rows that a loss term trains on: "policy" or "expert"."""
    return loss.traits_of(term).source


def _term_values(term: Component, columns: Mapping[str, Any], weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a term's values [N, T], with gradient if it depends on the policy, and its metrics [N, T]."""
    call, result = called(term, columns)
    values, extra = call.split(result)
    values = call.tensor(values, weight.shape, weight)
    # In an evaluation without gradients, no term has one.
    trained = (getattr(column, "requires_grad", False) for column in columns.values())
    if any(trained) and not values.requires_grad:
        raise call.fail("returned a tensor without gradient, so it has no effect; do not detach logprobs")
    return values, {call.free(name): call.tensor(part, weight.shape, weight) for name, part in extra.items()}


def _add(sums: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0.0) + value


def _rows(term: Component, batch: Batch) -> Tensor:
    return batch.is_expert if source_of(term) == "expert" else ~batch.is_expert
