"""Runs of plain words in text: without digits and mathematics, within one line and sentence."""

from __future__ import annotations

import re
from typing import NamedTuple

from retrain.algorithms.planning.gram_pattern import normalize

_PIECES = re.compile(
    r"""(?P<math>\$\$.*?\$\$|\$[^$\n]*\$|\\\[.*?\\\]|\\\(.*?\\\)|\\[A-Za-z]+(?:\{[^{}]*\})*)
      | (?P<word>[^\W\d_]+(?:'[^\W\d_]+)*(?!\w))
      | (?P<gap>(?:[^\S\n]|[,;:*\u2026\u2013\u2014-])+)
      | (?P<stop>\w+|[^\w\s]|\n)""",
    re.VERBOSE | re.DOTALL,
)
_SHORT_WORDS = ("a", "i")
"""Words of one letter; other single letters count as variables."""


class Word(NamedTuple):
    """A word of normalized text, at text[start:end]."""

    text: str
    start: int
    end: int


def phrases(text: str) -> list[list[Word]]:
    """Return the runs of at least one word, in order; offsets refer to `text`."""
    phrases: list[list[Word]] = [[]]
    for piece in _PIECES.finditer(normalize(text)):
        if piece.lastgroup == "word" and (len(piece[0]) > 1 or piece[0] in _SHORT_WORDS):
            phrases[-1].append(Word(piece[0], piece.start(), piece.end()))
        # A number, formula or sentence end closes the run; after several of them only one new run begins.
        elif piece.lastgroup != "gap" and phrases[-1]:
            phrases.append([])
    return [phrase for phrase in phrases if phrase]
