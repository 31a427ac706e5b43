"""What an update minimizes: weighted loss terms under one reduction with global denominators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from retrain.errors import ComponentError
from retrain.registry import Bound, components
from retrain.registry.call import Call
from retrain.types import BASE_COLUMNS, POLICY_COLUMNS, Batch

if TYPE_CHECKING:
    from torch import Tensor


class Objective:
    """Sum over terms of factor * sum_{n,t} reduction_weight[n,t] * term[n,t], on corrected advantages.

    The reduction's weights come from the whole batch (over the term's own rows: the policy's, or the
    expert's), so the sum over any split into micro-batches is the same number. The factor is the term's
    weight; with terms of both sources in use, times 1 - share for the policy's and times share for the expert's.

    Args:
        terms, reduction: bound loss terms, and how they are reduced.
        corrections: transforms that weigh the advantages by `old_logprobs` against `sampler_logprobs`, in order; a
            row's result depends on that row alone, and an advantage of 0 stays 0. They report no metrics.
        sft_reduction: of the expert's terms, where there are terms of both sources; None: the same.

    Attributes:
        terms: the loss terms in use; those of weight 0 are dropped.
        share: the column that weighs the two sources, where there are terms of both: the expert's share, computed by
            the signal with the trait `mixes`; else "".
        sources: whose rows they train on: "policy", "expert" or both.
        reads: columns that terms and corrections read, besides the current `logprobs`; `entropy` is the current
            policy's.
        signals: those of `reads` that a signal must compute (ref_logprobs, the share ...).
    """

    def __init__(
        self,
        terms: Sequence[Bound],
        reduction: Bound,
        corrections: Sequence[Bound] = (),
        sft_reduction: Bound | None = None,
    ) -> None:
        self.terms = [term for term in terms if term.params["weight"] != 0]
        self.reduction, self.corrections = reduction, tuple(corrections)
        if not self.terms:
            raise ComponentError("no loss term has a weight other than 0", 'list one, such as name = "ppo_clip"')
        names = [term.name for term in self.terms]
        for name in names:
            if names.count(name) > 1:
                raise ComponentError(f'loss "{name}" is listed twice', "keep one and set its weight")
        self.sources = frozenset(source_of(term) for term in self.terms)
        self.reads = frozenset(name for one in (*self.terms, *self.corrections) for name in one.reads) - {"logprobs"}
        self._sft_reduction, self.share = reduction, ""
        if self.mixed:
            self.share = components("signal", trait="mixes")[0].name
            self.reads |= {self.share}
            self._sft_reduction = sft_reduction or reduction
        self.signals = self.reads - BASE_COLUMNS - POLICY_COLUMNS

    @property
    def mixed(self) -> bool:
        """Terms of both sources are in use."""
        return len(self.sources) > 1

    def live_rows(self, batch: Batch) -> Tensor:
        """[N] bool: rows that contribute to any term; a row without advantage need not be forwarded."""
        moved = (batch.advantages != 0).any(-1)
        live = batch.is_expert.new_zeros(batch.is_expert.shape)
        for term in self.terms:
            rows = _rows(term, batch)
            live = live | (rows & moved if _vanishes(term) else rows)
        return live

    def weights(self, batch: Batch) -> dict[str, Tensor]:
        """Reduction weight of each token in each term, [N, T] as the advantages, from the batch of an optimizer step.

        The denominators are those of the term's own rows over the whole batch.
        """
        return {term.name: self._reduced(term, batch) for term in self.terms}

    def _reduced(self, term: Bound, batch: Batch) -> Tensor:
        mask = (batch.response_mask & _rows(term, batch)[:, None]).to(batch.advantages.dtype)
        reduction = self._sft_reduction if source_of(term) == "expert" else self.reduction
        call = Call("reduction", reduction.name)
        read = {name: mask if name == "mask" else batch.column(name) for name in reduction.reads}
        with call(read):
            weights = reduction(*read.values())
        if not bool(call.tensor(weights, mask.shape, mask).isfinite().all()):
            raise call.fail("returned a NaN or infinite weight")
        return weights

    def __call__(self, columns: Mapping[str, Any], weights: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss contribution of some rows.

        Args:
            columns: `logprobs` (with gradient) and everything in `reads`, for these rows.
            weights: the same rows of `weights(batch)`.
        Returns:
            The scalar to back-propagate, and sums that micro-batches add up to metrics of the whole batch:
            loss/<term> (without its factor) and what the terms report, under the same reduction.
        """
        total: Any = 0.0
        metrics: dict[str, Any] = {}
        for correction in self.corrections:
            call = Call("transform", correction.name)
            read = {name: columns[name] for name in correction.reads}
            with call(read):
                advantages = correction(*read.values())
            wanted = columns["advantages"]
            columns = {**columns, "advantages": call.tensor(advantages, wanted.shape, wanted)}
        for term in self.terms:
            weight = weights[term.name]
            values, extra = _called(term, columns, weight)
            reduced = (values.where(weight != 0, 0.0) * weight).sum()
            total = total + self._factor(term, columns) * reduced
            _add(metrics, {f"loss/{term.name}": reduced.detach()})
            _add(metrics, {name: (part.detach() * weight).sum() for name, part in extra.items()})
        return total, metrics

    def _factor(self, term: Bound, columns: Mapping[str, Any]) -> float:
        weight = float(term.params["weight"])
        if not self.mixed:
            return weight
        share = float(columns[self.share])
        return weight * (share if source_of(term) == "expert" else 1 - share)


def source_of(term: Bound) -> str:
    """Whose rows a loss term trains on: "policy" or "expert"."""
    return str(term.component.traits.get("source", "policy"))


def _vanishes(term: Bound) -> bool:
    return bool(term.component.traits.get("vanishes"))


def _called(term: Bound, columns: Mapping[str, Any], weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A term's values [N, T], with a gradient where there is one to have, and its metrics [N, T]."""
    call = Call("loss", term.name)
    read = {name: columns[name] for name in term.reads}
    with call(read):
        result = term(*read.values())
    values, extra = call.split(result)
    values = call.tensor(values, weight.shape, weight)
    if columns["logprobs"].requires_grad and not values.requires_grad:
        raise call.fail("returned a tensor without gradient, which trains nothing; do not detach logprobs")
    return values, {call.free(name): call.tensor(part, weight.shape, weight) for name, part in extra.items()}


def _add(sums: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0.0) + value


def _rows(term: Bound, batch: Batch) -> Tensor:
    return batch.is_expert if source_of(term) == "expert" else ~batch.is_expert
