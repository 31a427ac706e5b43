"""Embeddings of texts as vectors of length 1, so that a dot product is a cosine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from retrain.errors import ComponentError, install
from retrain.registry import Finding
from retrain.system.extras import library
from retrain.system.files import expanded
from retrain.system.model_paths import is_hub_name

EXTRA = "grams"

Embedder = Callable[[Sequence[str]], Any]
"""Texts -> [texts, features], dense or sparse; rows have length 1, or 0 for a text without known features."""


_ADVICE = "use a directory with a sentence-transformer, or a hub name such as sentence-transformers/all-MiniLM-L6-v2"


def embedder(name: str | None, examples: Sequence[str]) -> Embedder:
    """Return a sentence-transformer, or TF-IDF fitted on the examples.

    Args:
        name: directory, or OWNER/NAME on the hub; None is TF-IDF.
        examples: texts on which TF-IDF is fitted.
    Raises:
        MissingExtraError: the required package is not installed.
        ComponentError: there is no such directory or model.
    """
    if name is not None:
        return _sentence_transformer(name)
    features: Any = library("sklearn.feature_extraction.text", EXTRA)
    # Character 2- to 4-grams within words, in which inflections of a word are similar.
    vectorizer = features.TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), dtype=library("numpy", EXTRA).float32)
    vectorizer.fit(examples)
    return vectorizer.transform


def check_embedder(name: str | None) -> Iterator[Finding]:
    """Yield a finding if `embedder` cannot work; nothing is imported, and the hub is not accessed."""
    package = "sklearn" if name is None else "sentence_transformers"
    if name is not None and not _may_exist(name):
        yield Finding(("embedder",), f'there is no directory "{name}"', _ADVICE)
    elif importlib.util.find_spec(package) is None:
        yield Finding(("detector" if name is None else "embedder",), f"{package} is not installed", install(EXTRA))


def _may_exist(name: str) -> bool:
    """Return True if a name is a directory or may be a model on the hub."""
    # A relative path such as models/mini looks like a hub name, so only loading it can tell.
    return expanded(name).is_dir() or ("/" in name and is_hub_name(name))


def cosines(left: Any, right: Any) -> Any:
    """Return the cosines of rows, [left, right], as a dense array."""
    product = left @ right.T
    # The product of TF-IDF's sparse matrices is sparse.
    return product.toarray() if hasattr(product, "toarray") else product


def _sentence_transformer(name: str) -> Embedder:
    if not _may_exist(name):
        raise ComponentError(f'there is no directory "{name}"', _ADVICE)
    transformers: Any = library("sentence_transformers", EXTRA)
    path = expanded(name)
    is_local = path.is_dir()
    try:
        # On the CPU: the policy and its optimizer need the GPU's memory.
        model = transformers.SentenceTransformer(
            str(path) if is_local else name, device="cpu", local_files_only=is_local
        )
    except (OSError, ValueError) as error:
        where = f"{name} is not a sentence-transformer" if is_local else f"{name} cannot be loaded from the hub"
        raise ComponentError(f"{where} ({' '.join(str(error).split())[:300]})", _ADVICE) from error

    def embed(texts: Sequence[str]) -> Any:
        return model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)

    return embed
