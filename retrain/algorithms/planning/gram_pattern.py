"""Strategic grams, which are phrases that indicate planning, and a pattern that finds them in text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from retrain.errors import ComponentError
from retrain.system.files import expanded

STRATEGIC_GRAMS: tuple[str, ...] = (
    "wait let me",
    "let me think",
    "on second thought",
    "let me check",
    "let me verify",
    "is this right",
    "double check",
    "try another approach",
    "go back and",
    "start over",
    "that's not right",
    "that doesn't work",
    "another way to",
    "or we could",
    "what if we",
    "notice that",
    "the key is",
    "the key insight",
)
"""The default grams, `strategic_grams = "default"`."""

MATH_GRAMS: tuple[str, ...] = (
    "let's try a different approach",
    "let's consider another",
    "let's start by",
    "let's break this down",
    "let's check if",
    "let's verify",
    "notice that",
    "note that if",
    "observe that",
    "recall that",
    "we can use the fact that",
    "using the fact that",
    "the key insight is",
    "the key observation is",
    "the main idea is",
    "the problem reduces to",
    "it suffices to show",
    "without loss of generality",
    "suppose for contradiction",
    "we need to find",
    "we want to show",
    "consider the case where",
    "there are two cases",
    "by symmetry we can",
    "an alternative way to",
    "to double check",
    "going back to",
)
"""Grams of written mathematics, `strategic_grams = "math"`.

They are the four examples of HICRA's documentation for TRL, and phrases with similar functions: start, use a known
fact, distinguish cases, reduce, verify, change the approach.
"""

NAMED: dict[str, tuple[str, ...]] = {"default": STRATEGIC_GRAMS, "math": MATH_GRAMS}
"""Values of `strategic_grams` that name a list."""

_APOSTROPHES = str.maketrans(dict.fromkeys("\u2018\u2019\u02bc\uff07\u00b4`", "'"))
_BETWEEN = r"[\s,;:.!?\u2026\u2013\u2014*-]+"  # white space or punctuation between words of a gram: "Wait, let me"


def normalize(text: str) -> str:
    """Return the text in lower case, with typographic apostrophes replaced by '; every character keeps its position."""
    lowered = text.lower()
    if len(lowered) != len(text):  # a few capitals become two characters
        lowered = "".join(low if len(low := character.lower()) == 1 else character for character in text)
    return lowered.translate(_APOSTROPHES)


def read_grams(
    grams: Sequence[str] | str | None = None, path: str | None = None, words: Sequence[int] | None = None
) -> tuple[str, ...]:
    """Return the grams that the configuration names.

    Args:
        grams: a list, a JSON array in a string, a comma-separated string, or the name of a list in `NAMED`; None is
            "default".
        path: JSON file with [...] or {"strategic_grams": [...]}.
        words: smallest and largest number of words of a gram; others are left out.
    Raises:
        ComponentError: grams and path are both given, the file is invalid, a gram is not text, or none is left.
    """
    if grams is not None and path is not None:
        raise ComponentError("strategic_grams and strategic_grams_path are both set", "keep one of them")
    if path is not None:
        texts = _checked(_from_file(path), path)
    elif grams is None or (isinstance(grams, str) and grams in NAMED):
        texts = NAMED[grams or "default"]
    else:
        texts = _checked(_from_text(grams) if isinstance(grams, str) else grams, "strategic_grams")
    return texts if words is None else _within(texts, words)


def _within(grams: tuple[str, ...], words: Sequence[int]) -> tuple[str, ...]:
    """Return the grams with a number of words between `words[0]` and `words[1]`."""
    low, high = words
    kept = tuple(gram for gram in grams if low <= len(_words(gram)) <= high)
    if not kept:
        counts = sorted({len(_words(gram)) for gram in grams})
        raise ComponentError(
            f"sg_n_range = [{low}, {high}] contains none of the {len(grams)} strategic grams",
            f"they have {counts[0]} to {counts[-1]} words",
        )
    return kept


def _words(gram: str) -> tuple[str, ...]:
    # What `_BETWEEN` matches separates words, except for a hyphen, which may be inside a word.
    return tuple(re.findall(r"[^\s,;:.!?\u2026\u2013\u2014*]+", normalize(gram)))


def _from_text(text: str) -> Any:
    if not text.lstrip().startswith(("[", "{")):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ComponentError(f"strategic_grams is not valid JSON ({error})", 'write ["wait let me", ...]') from error


def _from_file(path: str) -> Any:
    try:
        content = json.loads(expanded(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ComponentError(f"strategic_grams_path {path}: {error.strerror}", "name a JSON file") from error
    except ValueError as error:
        raise ComponentError(f"strategic_grams_path {path} is not valid JSON ({error})", "fix the file") from error
    return content["strategic_grams"] if isinstance(content, dict) and "strategic_grams" in content else content


def _checked(grams: Any, source: str) -> tuple[str, ...]:
    shape = 'a non-empty list of phrases, as [...] or in a file {"strategic_grams": [...]}'
    if not isinstance(grams, (list, tuple)) or not grams:
        raise ComponentError(f"{source} is not {shape}", "fix it")
    for gram in grams:
        if not isinstance(gram, str) or not re.search(r"\w", gram):
            raise ComponentError(
                f"{source} contains {gram!r}, which is not a phrase", "write every gram as text with words"
            )
    # A phrase that is listed twice would count twice in the number of grams.
    return tuple(dict.fromkeys(grams))


class GramPattern:
    """A compiled pattern of all grams, for text normalized by `normalize`.

    A match consists of whole words, with any white space or punctuation between them. At every position the longest
    gram that starts there is found, so overlapping phrases ("wait let me think") are all found.
    """

    def __init__(self, grams: Sequence[str]) -> None:
        words = {_words(gram) for gram in grams}
        # A lookahead consumes nothing, so that the next match may begin inside this one.
        self._pattern = re.compile(rf"(?<!\w)(?=({_alternation(words)}))")

    def find(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Yield (start, end, gram) of every match in normalized text, ordered by start."""
        for match in self._pattern.finditer(text):
            start, end = match.span(1)
            yield start, end, re.sub(_BETWEEN, " ", match[1])


def _alternation(grams: set[tuple[str, ...]]) -> str:
    """Return the pattern of a trie of words: shared prefixes are tried once, longer grams before shorter ones."""
    rests: dict[str, set[tuple[str, ...]]] = {}
    for first, *rest in grams:
        rests.setdefault(first, set()).add(tuple(rest))
    branches: list[str] = []
    # Longer words first; the order of a set of texts would differ between processes.
    for word in sorted(rests, key=lambda word: (-len(word), word)):
        # The continuation comes before the end of a gram, so that the longest gram wins.
        longer = rests[word] - {()}
        ways = [_BETWEEN + _alternation(longer)] if longer else []
        ways += [r"(?!\w)"] if () in rests[word] else []
        branches.append(f"{re.escape(word)}(?:{'|'.join(ways)})")
    return f"(?:{'|'.join(branches)})"
