"""Which response tokens are planning: thinking about what to do, rather than doing it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from math import log
from typing import TYPE_CHECKING, Any, Literal

from retrain.algorithms.grams import GramPattern, normalize, read_grams
from retrain.algorithms.tokentext import TokenText
from retrain.registry import signal
from retrain.types import Metrics

if TYPE_CHECKING:
    from torch import Tensor


@signal("planning_mask", table="planning")
class PlanningMask:
    """1 on response tokens that overlap a strategic gram in the decoded text, 0 elsewhere.

    Matching is on the text of the sampled ids with the characters that each token covers: case-insensitive,
    white space and typographic apostrophes normalized, whole words, longest gram first.

    Args:
        tokenizer: the model's; ids are decoded, nothing is re-encoded.
        detector: how planning is found; "grams".
        strategic_grams: list of phrases, JSON array in a string, or comma-separated string; 18 built-in ones if unset.
        strategic_grams_path: JSON file with [...] or {"strategic_grams": [...]} instead.
    References: Wang et al., HICRA, arXiv:2509.03646 (strategic grams).
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        detector: Literal["grams"] = "grams",
        strategic_grams: list[str] | str | None = None,
        strategic_grams_path: str | None = None,
    ) -> None:
        self.detector = detector
        self.grams = read_grams(strategic_grams, strategic_grams_path)
        self._pattern = GramPattern(self.grams)
        self._text = TokenText(tokenizer, normalize)

    def __call__(self, input_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Metrics]:
        """[N, T] bool, and the entropy of the grams' counts over the whole batch (see `semantic_entropy`)."""
        counts: Counter[str] = Counter()
        response = response_mask.cpu()
        mask = response.new_zeros(response.shape)
        for row, ids in enumerate(input_ids.cpu()):
            marked, found = self.mark(ids[response[row]].tolist())
            counts.update(found)
            if marked:
                mask[row, response[row].nonzero()[:, 0][marked]] = True
        return mask.to(response_mask.device), semantic_entropy(counts)

    def mark(self, ids: Sequence[int]) -> tuple[list[int], list[str]]:
        """Positions of planning tokens in a completion, in order, and the grams found."""
        pieces = self._text.pieces(ids)
        matches = list(self._pattern.find("".join(pieces)))
        if not matches:
            return [], []
        ends = list(accumulate(map(len, pieces)))
        marked: set[int] = set()
        for start, end, _ in matches:
            first, last = bisect_right(ends, start), bisect_left(ends, end)
            marked.update(range(first, last + 1))
        return sorted(marked), [gram for _, _, gram in matches]


def semantic_entropy(counts: Counter[str]) -> Metrics:
    """hicra/semantic_entropy = -sum p ln p nats over gram counts; _norm divides by ln(distinct); distinct_sg."""
    total = sum(counts.values())
    entropy = sum((n / total * log(total / n) for n in counts.values()), 0.0)
    return {
        "hicra/semantic_entropy": entropy,
        "hicra/semantic_entropy_norm": entropy / log(len(counts)) if len(counts) > 1 else 0.0,
        "hicra/distinct_sg": float(len(counts)),
    }
