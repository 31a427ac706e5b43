"""What `[planning]` demands, checked before anything loads."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from retrain import registry
from retrain.algorithms.planning.detectors import user_detector
from retrain.algorithms.planning.embedding import EXTRA, package_of
from retrain.algorithms.planning.gram_pattern import read_grams
from retrain.config.document import Document
from retrain.config.resolve import is_dotted
from retrain.errors import ComponentError

_DETECTORS = ("grams", "semantic")
_GRAM_KEYS = ("strategic_grams", "strategic_grams_path", "sg_n_range")


def check_planning(document: Document) -> None:
    """Record unusable grams, an unknown detector, and a missing extra."""
    params = _params(document)
    if params is None:
        return
    _check_grams(document, params)
    detector = params["detector"]
    if detector == "semantic":
        _check_semantic(document, params["embedder"])
    elif detector not in _DETECTORS and not is_dotted(detector):
        near = get_close_matches(detector, _DETECTORS, 1)
        fix = f'did you mean "{near[0]}"?' if near else f"use {', '.join(_DETECTORS)}, or a dotted path to your own"
        document.refuse(("planning", "detector"), f'no detector is called "{detector}"', fix)


def check_own_detector(document: Document, search_paths: Sequence[str]) -> None:
    """Import a detector that is a dotted path; ComponentError if that fails."""
    params = _params(document)
    if params is not None and is_dotted(params["detector"]):
        user_detector(params["detector"], search_paths)


def _params(document: Document) -> Mapping[str, Any] | None:
    """The table with its defaults; None if it has mistakes, which are reported elsewhere."""
    try:
        return registry.find("signal", "planning_mask").bind(document.data.get("planning", {})).params
    except (TypeError, ValueError, ComponentError):
        return None


def _check_grams(document: Document, params: Mapping[str, Any]) -> None:
    grams, path, words = (params[key] for key in _GRAM_KEYS)
    key = "strategic_grams" if path is None else "strategic_grams_path"
    try:
        read_grams(grams, path)
        key = "sg_n_range"
        read_grams(grams, path, words)
    except ComponentError as error:
        document.refuse(("planning", key), error.problem, error.fix)


def _check_semantic(document: Document, directory: str | None) -> None:
    if directory is not None and not Path(directory).expanduser().is_dir():
        document.refuse(
            ("planning", "embedder"),
            f'there is no directory "{directory}"',
            "give one with a sentence-transformer in it",
        )
    elif importlib.util.find_spec(package_of(directory)) is None:
        key = "detector" if directory is None else "embedder"
        document.refuse(
            ("planning", key), f"{package_of(directory)} is not installed", f'pip install "retrain[{EXTRA}]"'
        )
