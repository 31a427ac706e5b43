"""The kinds of verdicts: their words, marks, colors and consequences. Whatever shows a verdict reads this table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

VerdictKind = Literal["better", "worse", "equal", "not worse", "same", "open"]
Shape = Literal["triangle", "inverted triangle", "square", "diamond", "circle"]


class KindStyle(NamedTuple):
    """How a kind of verdict is shown, and what follows from it.

    Attributes:
        words: the verdict in words; {margin} stands for the margin.
        mark: its mark in a terminal; color: the color of its line there, "" for none.
        css: its CSS class; shape: its mark in a figure.
        legend: its words in a legend; "" for a kind that looks like another one.
        holds: True if a claim over several outcomes holds for it; "margin": only if the outcome has a margin.
    """

    words: str
    mark: str
    color: str
    css: str
    shape: Shape
    legend: str
    holds: Literal[True, False, "margin"]


KINDS: Mapping[VerdictKind, KindStyle] = {
    "better": KindStyle("better", "▲", "blue", "better", "triangle", "better", True),
    "worse": KindStyle("worse", "▼", "red", "worse", "inverted triangle", "worse", False),
    "equal": KindStyle("equal within {margin}", "=", "green", "equal", "square", "equal", "margin"),
    "not worse": KindStyle(
        "not worse by more than {margin}", "≥", "green", "not-worse", "diamond", "not worse", "margin"
    ),
    "same": KindStyle("identical", "=", "green", "equal", "square", "", False),
    "open": KindStyle("inconclusive", "○", "", "open", "circle", "inconclusive", False),
}
"""Kind -> its style, in the order in which headlines count them."""
