"""What an update minimizes: weighted loss terms under one reduction with global denominators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from retrain.errors import ComponentError
from retrain.registry import Bound
from retrain.types import BASE_COLUMNS, POLICY_COLUMNS, Batch

if TYPE_CHECKING:
    from torch import Tensor


class Objective:
    """Sum over terms of weight * sum_{n,t} reduction_weight[n,t] * term[n,t].

    The reduction's weights come from the whole batch (over the term's own rows: the policy's, or the
    expert's), so the sum over any split into micro-batches is the same number.

    Attributes:
        terms: the loss terms in use; those of weight 0 are dropped.
        reads: columns that the terms read, besides the current `logprobs`; `entropy` is the current policy's.
        signals: those of `reads` that a signal must compute (ref_logprobs ...).
    """

    def __init__(self, terms: Sequence[Bound], reduction: Bound) -> None:
        self.terms = [term for term in terms if term.params["weight"] != 0]
        self.reduction = reduction
        if not self.terms:
            raise ComponentError("no loss term has a weight other than 0", 'list one, such as name = "ppo_clip"')
        names = [term.name for term in self.terms]
        for name in names:
            if names.count(name) > 1:
                raise ComponentError(f'loss "{name}" is listed twice', "keep one and set its weight")
        self.reads = frozenset(name for term in self.terms for name in term.reads) - {"logprobs"}
        self.signals = self.reads - BASE_COLUMNS - POLICY_COLUMNS

    def live_rows(self, batch: Batch) -> Tensor:
        """[N] bool: rows that contribute to any term; a row without advantage need not be forwarded."""
        moved = (batch.advantages != 0).any(-1)
        live = batch.is_expert.new_zeros(batch.is_expert.shape)
        for term in self.terms:
            rows = _source(term, batch)
            live = live | (rows & moved if term.component.traits.get("vanishes") else rows)
        return live

    def weights(self, batch: Batch) -> dict[str, Tensor]:
        """Weight of each token in each term, [N, T] as the advantages, from the whole batch of an optimizer step."""
        return {term.name: float(term.params["weight"]) * self._reduced(term, batch) for term in self.terms}

    def _reduced(self, term: Bound, batch: Batch) -> Tensor:
        mask = (batch.response_mask & _source(term, batch)[:, None]).to(batch.advantages.dtype)
        columns = [mask if name == "mask" else batch.column(name) for name in self.reduction.reads]
        return self.reduction(*columns)

    def __call__(self, columns: Mapping[str, Any], weights: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss contribution of some rows.

        Args:
            columns: `logprobs` (with gradient) and everything in `reads`, for these rows.
            weights: the same rows of `weights(batch)`.
        Returns:
            The scalar to back-propagate, and sums that micro-batches add up to metrics of the whole batch:
            loss/<term> (without its weight) and what the terms report, under the same reduction.
        """
        total: Any = 0.0
        metrics: dict[str, Any] = {}
        for term in self.terms:
            result = term(*(columns[name] for name in term.reads))
            values, extra = result if isinstance(result, tuple) else (result, {})
            weight = weights[term.name]
            total = total + (values.where(weight != 0, 0.0) * weight).sum()
            reduction = weight / float(term.params["weight"])
            for name, part in {f"loss/{term.name}": values, **extra}.items():
                metrics[name] = metrics.get(name, 0.0) + (part.detach() * reduction).sum()
        return total, metrics


def _source(term: Bound, batch: Batch) -> Tensor:
    return batch.is_expert if term.component.traits.get("source") == "expert" else ~batch.is_expert
