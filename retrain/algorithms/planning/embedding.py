"""Texts as vectors of length 1, so that a product is a cosine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from retrain.errors import ComponentError, install
from retrain.registry import Finding
from retrain.system.extras import library

EXTRA = "grams"

Embedder = Callable[[Sequence[str]], Any]
"""Texts -> [texts, features], rows of length 1 (0 for a text without known features), dense or sparse."""


def embedder(directory: str | None, examples: Sequence[str]) -> Embedder:
    """A sentence-transformer from a directory, or TF-IDF fitted on the examples.

    Raises:
        MissingExtraError: the package behind it is not installed.
        ComponentError: there is no such directory, or no model in it.
    """
    return _tf_idf(examples) if directory is None else _sentence_transformer(directory)


def check_embedder(directory: str | None) -> Iterator[Finding]:
    """What keeps `embedder` from working, found without importing anything."""
    package = "sklearn" if directory is None else "sentence_transformers"
    if directory is not None and not Path(directory).expanduser().is_dir():
        fix = "give one with a sentence-transformer in it"
        yield Finding(("embedder",), f'there is no directory "{directory}"', fix)
    elif importlib.util.find_spec(package) is None:
        yield Finding(("detector" if directory is None else "embedder",), f"{package} is not installed", install(EXTRA))


def cosines(left: Any, right: Any) -> Any:
    """[left, right] cosines of rows, as a dense array."""
    product = left @ right.T
    return product.toarray() if hasattr(product, "toarray") else product


def _tf_idf(examples: Sequence[str]) -> Embedder:
    """Character 2- to 4-grams within words: inflections are near each other, and so are phrases that share words."""
    text: Any = library("sklearn.feature_extraction.text", EXTRA)
    vectorizer = text.TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), dtype=library("numpy", EXTRA).float32)
    vectorizer.fit(examples)
    return vectorizer.transform


def _sentence_transformer(directory: str) -> Embedder:
    if not Path(directory).expanduser().is_dir():
        raise ComponentError(f'there is no directory "{directory}"', "give one with a sentence-transformer in it")
    transformers: Any = library("sentence_transformers", EXTRA)
    try:
        model = transformers.SentenceTransformer(str(Path(directory).expanduser()), device="cpu", local_files_only=True)
    except (OSError, ValueError) as error:
        raise ComponentError(f"{directory} holds no sentence-transformer ({error})", "give another one") from error

    def embed(texts: Sequence[str]) -> Any:
        return model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)

    return embed
