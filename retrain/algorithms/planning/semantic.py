"""Detection of planning by meaning: text that is more similar to strategic grams than to examples of execution."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from retrain.algorithms.planning.embedding import cosines, embedder
from retrain.algorithms.planning.phrases import Word, phrases
from retrain.system.files import expanded

EXECUTION_PHRASES: tuple[str, ...] = (
    "so the answer is",
    "the sum of the digits",
    "we get the value",
    "is equal to",
    "multiply both sides by",
    "divided by the number",
    "plus the carry",
    "minus the remainder",
    "carry the one",
    "substitute into the equation",
    "this simplifies to",
    "taking the square root",
    "which gives us",
    "therefore the total is",
    "the number of ways",
    "for all integers",
    "the length of the side",
    "the area of the triangle",
    "per hour in total",
    "the derivative with respect to",
    "collect like terms",
    "adding the two equations",
    "the first and the second",
    "each of the remaining",
)
"""Default examples of execution: phrases that carry out a step."""

_REMEMBERED = 500_000
"""Largest number of cached judgments; the cache is cleared beyond it."""

Judgment = tuple[float, str]
"""Margin of a window, and its nearest strategic gram."""


def read_execution(path: str | None) -> tuple[str, ...]:
    """Return the examples of execution that `retrain grams extract` stored, or EXECUTION_PHRASES."""
    content: Any = json.loads(expanded(path).read_text(encoding="utf-8")) if path else None
    match content:
        case {"metadata": {"execution_grams": [str(), *_] as grams}}:
            return tuple(map(str, grams))
        case _:
            return EXECUTION_PHRASES


class SemanticDetector:
    """Detector of windows of words that are nearer to a strategic gram than to any example of execution.

    margin(w) = max_p cos(w, p) - max_e cos(w, e),  p the strategic grams, e the examples of execution

    A window is `window` words of a run of plain words (see `phrases`), or all of a shorter run. Of overlapping windows
    above the margin, the one with the largest margin is planning.

    Args:
        grams: examples of planning. execution: examples of execution.
        model: directory or hub name of a sentence-transformer; None is TF-IDF fitted on the examples.
        window: number of words of a window.
        margin: margin that a window of planning exceeds, a difference of cosines.
    """

    def __init__(
        self, grams: Sequence[str], execution: Sequence[str], model: str | None, window: int, margin: float
    ) -> None:
        self._grams, self._window, self._margin = tuple(grams), window, margin
        self._embed = embedder(model, [*grams, *execution])
        self._planning, self._execution = self._embed(self._grams), self._embed(execution)
        self._judged: dict[str, Judgment] = {}

    def __call__(self, texts: list[str]) -> list[list[tuple[int, int, str]]]:
        """Return the planning spans of every text, each with its nearest gram as name."""
        windows = [[window for run in phrases(text) for window in self._windows(run)] for text in texts]
        self._judge([text for windows_of_text in windows for text, _, _ in windows_of_text])
        return [self._best(windows_of_text) for windows_of_text in windows]

    def _windows(self, run: Sequence[Word]) -> list[tuple[str, int, int]]:
        parts = [run[first : first + self._window] for first in range(max(1, len(run) - self._window + 1))]
        return [(" ".join(word.text for word in part), part[0].start, part[-1].end) for part in parts]

    def _judge(self, windows: list[str]) -> None:
        """Compute and cache margin and nearest gram of new windows."""
        # Completions repeat their phrases, so most windows of a step are in the cache.
        if len(self._judged) > _REMEMBERED:
            self._judged.clear()
        # Without repetitions, in order, so that one call embeds every new text once.
        new = list(dict.fromkeys(text for text in windows if text not in self._judged))
        if not new:
            return
        vectors = self._embed(new)
        near = cosines(vectors, self._planning)
        far = cosines(vectors, self._execution).max(1)
        for text, margin, nearest in zip(new, (near.max(1) - far).tolist(), near.argmax(1).tolist(), strict=True):
            self._judged[text] = margin, self._grams[nearest]

    def _best(self, windows: Sequence[tuple[str, int, int]]) -> list[tuple[int, int, str]]:
        """Return the windows above the margin, without those that overlap a window with a larger one."""
        judged = [(*self._judged[text], start, end) for text, start, end in windows]
        chosen: list[tuple[int, int, str]] = []
        # By margin, of equal ones the first, so that a better window is never lost to a worse one.
        for margin, gram, start, end in sorted(judged, key=lambda window: (-window[0], window[2])):
            if margin <= self._margin:
                break
            if all(end <= other[0] or other[1] <= start for other in chosen):
                chosen.append((start, end, gram))
        return sorted(chosen)
