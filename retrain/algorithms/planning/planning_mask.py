"""The planning mask, which marks response tokens that plan what to do rather than do it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import log
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from retrain import functional as F
from retrain.algorithms.planning.detectors import Detector, PlanningSpan, gram_detector, user_detector
from retrain.algorithms.planning.gram_pattern import read_grams
from retrain.algorithms.planning.token_text import TokenText
from retrain.errors import ComponentError, did_you_mean
from retrain.registry import Finding, is_dotted, signal
from retrain.types import Batch, Metrics

if TYPE_CHECKING:
    from torch import Tensor

WordRange = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=2, max_length=2)]


_DETECTORS = ("grams", "semantic")
_GRAM_KEYS = ("strategic_grams", "strategic_grams_path", "sg_n_range")
_SEMANTIC = ("detector", ("semantic",))


def _check(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    """Yield findings on invalid grams, an unknown or unimportable detector, and the embedder of "semantic"."""
    grams, path, words = (params[key] for key in _GRAM_KEYS)
    key = "strategic_grams" if path is None else "strategic_grams_path"
    try:
        # Read twice: the error of the second call is about the number of words.
        read_grams(grams, path)
        key = "sg_n_range"
        read_grams(grams, path, words)
    except ComponentError as error:
        yield Finding((key,), error.problem, error.fix)
    detector = params["detector"]
    if is_dotted(detector):
        try:
            user_detector(detector, config.plugins.search_paths)
        except ComponentError as error:
            yield Finding(("detector",), error.problem, error.fix)
    elif detector not in _DETECTORS:
        fix = did_you_mean(detector, _DETECTORS, f"use {', '.join(_DETECTORS)}, or a dotted path to your own")
        yield Finding(("detector",), f'there is no detector "{detector}"', fix)
    elif detector == "semantic":
        from retrain.algorithms.planning.embedding import check_embedder

        yield from check_embedder(params["embedder"])


@signal(
    "planning_mask",
    table="planning",
    check=_check,
    reaches={"embedder": "loads a sentence-transformer, whose files may name modules to import"},
    stored="planning",
    when={
        **dict.fromkeys(_GRAM_KEYS, ("detector", _DETECTORS)),
        **dict.fromkeys(("embedder", "window", "margin"), _SEMANTIC),
    },
)
class PlanningMask:
    """Planning mask [N, T], True on response tokens that overlap a planning span of the decoded text.

    A detector finds character spans in the text of the sampled ids; a token is planning if it covers a character of a
    span. "grams" finds strategic grams: whole words in upper or lower case, with white space and typographic
    apostrophes normalized, and the longest gram at each position. "semantic" finds windows of words that are nearer to
    the grams than to examples of execution (see `SemanticDetector`; extra `grams`).

    Args:
        tokenizer: the model's tokenizer, which decodes the ids.
        search_paths: directories in which a dotted path is looked up.
        detector: "grams", "semantic", or the dotted path of `fn(texts)`, which returns a list of (start, end)
            character spans for every text.
        strategic_grams: list of phrases, JSON array in a string, comma-separated string, or the name of a built-in
            list: "default" (18 phrases of self-correction, used if nothing is set) or "math" (27 phrases of written
            mathematics).
        strategic_grams_path: JSON file with [...] or {"strategic_grams": [...]} instead.
        sg_n_range: [smallest, largest] number of words of the grams to use; unset: all grams.
        embedder: sentence-transformer for "semantic", a directory or OWNER/NAME on the hub; unset: TF-IDF.
        window: number of words in a window of "semantic".
        margin: difference of cosines above which a window is planning with "semantic".
        log_semantic_entropy: report hicra/semantic_entropy, hicra/semantic_entropy_norm and hicra/distinct_sg.
        log_planning_token_ratio: report hicra/planning_token_ratio.
    References: Wang et al., HICRA, arXiv:2509.03646 (strategic grams).
    """

    def __init__(  # noqa: PLR0913 - the keys of its table
        self,
        tokenizer: Any,
        search_paths: Sequence[str] = (),
        *,
        detector: Annotated[str, Field(min_length=1)] = "grams",
        strategic_grams: list[str] | str | None = None,
        strategic_grams_path: str | None = None,
        sg_n_range: WordRange | None = None,
        embedder: str | None = None,
        window: Annotated[int, Field(ge=1)] = 3,
        margin: Annotated[float, Field(ge=0, lt=2)] = 0.3,
        log_semantic_entropy: bool = True,
        log_planning_token_ratio: bool = True,
    ) -> None:
        self.grams = read_grams(strategic_grams, strategic_grams_path, sg_n_range)
        self._log_entropy, self._log_ratio = log_semantic_entropy, log_planning_token_ratio
        self._text = TokenText(tokenizer)
        self._detect: Detector
        if detector == "grams":
            self._detect = gram_detector(self.grams)
        elif detector == "semantic":
            from retrain.algorithms.planning.semantic import SemanticDetector, read_execution

            execution = read_execution(strategic_grams_path)
            self._detect = SemanticDetector(self.grams, execution, embedder, window, margin)
        else:
            self._detect = user_detector(detector, search_paths)

    def __call__(
        self, input_ids: Tensor, response_mask: Tensor, turn_ids: Tensor | None = None
    ) -> tuple[Tensor, Metrics]:
        """Return the mask [N, T] bool, with metrics of the whole batch: share of planning tokens, entropy of grams.

        Every turn is a separate text, so that a span never extends across an observation.
        """
        # Decoding is Python's work, token by token; from a GPU each token would be a copy.
        response, ids = response_mask.cpu(), input_ids.cpu()
        # Turns from 1, so that 0 is what the policy did not sample.
        turns = response.long() if turn_ids is None else (turn_ids.cpu() + 1).where(response, 0)
        mask = response.new_zeros(response.shape)
        spans = [(row, turns[row] == turn) for row in range(len(turns)) for turn in range(1, int(turns[row].max()) + 1)]
        counts: Counter[str] = Counter()
        marks = self.mark([ids[row][in_turn].tolist() for row, in_turn in spans])
        for (row, in_turn), (marked, grams) in zip(spans, marks, strict=True):
            counts.update(grams)
            if marked:
                mask[row, in_turn.nonzero()[:, 0][marked]] = True
        metrics = planning_ratio(mask, response) if self._log_ratio else {}
        return mask.to(response_mask.device), metrics | (semantic_entropy(counts) if self._log_entropy else {})

    def after(self, batch: Batch) -> Metrics:
        """Return hicra/planning_advantage_mean and hicra/execution_advantage_mean; see `advantage_split`."""
        return advantage_split(batch)

    def mark(self, completions: Sequence[Sequence[int]]) -> list[tuple[list[int], list[str]]]:
        """Return, for each completion, the positions of planning tokens in order, and the names of the spans found."""
        pieces = [self._text.pieces(ids) for ids in completions]
        spans = self._detect(["".join(texts) for texts in pieces])
        return [
            (_covering(texts, spans_of_row), [name for _, _, name in spans_of_row])
            for texts, spans_of_row in zip(pieces, spans, strict=True)
        ]


def _covering(pieces: Sequence[str], spans: Sequence[PlanningSpan]) -> list[int]:
    """Return the sorted indices of the pieces that cover a character of a span."""
    if not spans:
        return []
    ends = list(accumulate(map(len, pieces)))
    covering: set[int] = set()
    for start, end, _ in spans:
        # Pieces without text end where they begin, so `bisect_right` skips those before the span.
        covering.update(range(bisect_right(ends, start), bisect_left(ends, end) + 1))
    return sorted(covering)


def advantage_split(batch: Batch) -> Metrics:
    """Return hicra/{planning,execution}_advantage_mean: mean advantage over all planning and all other tokens."""
    planning = batch.column("planning_mask").bool() & batch.response_mask
    masks = {"planning": planning, "execution": batch.response_mask & ~planning}
    return {
        f"hicra/{name}_advantage_mean": float(F.masked.masked_mean(batch.advantages, mask))
        for name, mask in masks.items()
    }


def planning_ratio(planning_mask: Tensor, response_mask: Tensor) -> Metrics:
    """Return hicra/planning_token_ratio: share of planning tokens among all response tokens of the batch.

    Args:
        planning_mask, response_mask: [N, T].
    """
    planning = int((planning_mask.bool() & response_mask).sum())
    return {"hicra/planning_token_ratio": planning / max(int(response_mask.sum()), 1)}


def semantic_entropy(counts: Counter[str]) -> Metrics:
    """Return the entropy of the frequencies p of strategic grams.

    hicra/semantic_entropy = -sum_g p_g ln p_g in nats; hicra/semantic_entropy_norm divides it by the logarithm of the
    number of distinct grams, hicra/distinct_sg.
    """
    total = sum(counts.values())
    entropy = sum((n / total * log(total / n) for n in counts.values()), 0.0)
    return {
        "hicra/semantic_entropy": entropy,
        "hicra/semantic_entropy_norm": entropy / log(len(counts)) if len(counts) > 1 else 0.0,
        "hicra/distinct_sg": float(len(counts)),
    }
