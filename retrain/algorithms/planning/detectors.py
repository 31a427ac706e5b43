"""Detectors of planning: functions from decoded completions to character spans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from retrain.algorithms.planning.gram_pattern import GramPattern, normalize
from retrain.errors import ComponentError
from retrain.registry.call import Call
from retrain.registry.lookup import load_object

PlanningSpan = tuple[int, int, str]
"""(start, end, name): text[start:end] is planning; hicra/semantic_entropy counts spans by name."""

Detector = Callable[[list[str]], list[list[PlanningSpan]]]
"""Function from texts to the planning spans of each text."""


def gram_detector(grams: Sequence[str]) -> Detector:
    """Return a detector of strategic grams (see `GramPattern`)."""
    pattern = GramPattern(grams)

    def detect(texts: list[str]) -> list[list[PlanningSpan]]:
        return [list(pattern.find(normalize(text))) for text in texts]

    return detect


def user_detector(path: str, search_paths: Sequence[str | Path] = ()) -> Detector:
    """Return the user's detector `fn(texts) -> [[(start, end), ...], ...]`, whose results are checked.

    A span may have a name as third entry; the default is its text.

    Args:
        path: dotted path of the function.
        search_paths: directories of the user's modules.
    Raises:
        ComponentError: there is no such function.
    """
    function = load_object(path, search_paths)
    if not callable(function):
        raise ComponentError(f'"{path}" is a {type(function).__name__}, not a function', "name a function")
    call = Call("planning detector", path)

    def detect(texts: list[str]) -> list[list[PlanningSpan]]:
        with call():
            detected: Any = function(texts)
        if not isinstance(detected, Sequence) or len(detected) != len(texts):
            raise call.fail(f"must return a list of {len(texts)} lists of spans, one per completion")
        return [_checked(call, row, spans, text) for row, (spans, text) in enumerate(zip(detected, texts, strict=True))]

    return detect


def _checked(call: Call, row: int, spans: Any, text: str) -> list[PlanningSpan]:
    # A text is a sequence, too, of letters.
    if not isinstance(spans, Sequence) or isinstance(spans, str):
        raise call.fail(f"completion {row}: {spans!r} is not a list of spans")
    checked: list[PlanningSpan] = []
    for span in spans:
        match span:
            case (int(start), int(end)) | [int(start), int(end)] if 0 <= start < end <= len(text):
                checked.append((start, end, " ".join(normalize(text[start:end]).split())))
            case (int(start), int(end), str(name)) if 0 <= start < end <= len(text):
                checked.append((start, end, name))
            case _:
                problem = f"{span!r} is not a span (start, end) with 0 <= start < end <= {len(text)}, the text's length"
                raise call.fail(f"completion {row}: {problem}")
    return checked
