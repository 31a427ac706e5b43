"""Rewards that look at text or length and need nothing installed."""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import AfterValidator, Field

from retrain.registry import reward

_NUMBER = re.compile(r"(?:(?<![\w.)])[-+])?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?!\d))?")


def _compiled(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return pattern


def _capturing(pattern: str) -> str:
    if not re.compile(pattern).groups:
        raise ValueError("captures nothing: put the answer's part in parentheses")
    return pattern


Pattern = Annotated[str, AfterValidator(_compiled)]
Capturing = Annotated[Pattern, AfterValidator(_capturing)]


@reward("exact")
def exact(completion: str, answer: str, *, pattern: Capturing = r"(?:^|\n)so (\S+)\s*\Z") -> float:
    """1 if what `pattern` captures equals the answer, else 0. White space around both is ignored.

    Args:
        pattern: regular expression whose first group is the answer; the last match counts. The default
            takes the word after `so` on the last line.
    """
    matches = list(re.finditer(pattern, completion))
    return float(bool(matches) and (matches[-1].group(1) or "").strip() == answer.strip())


@reward("number")
def number(completion: str, answer: str, *, tolerance: Annotated[float, Field(ge=0)] = 1e-6) -> float:
    """1 if the last number x of the completion is the answer's y: |x - y| <= tolerance * max(1, |y|).

    Commas between groups of three digits are dropped; a minus after a digit or letter subtracts; percent
    signs mean nothing. The answer must hold a number.

    Args:
        tolerance: largest difference, relative to the answer where that is above 1.
    """
    wanted = _last_number(answer)
    if wanted is None:
        raise ValueError(f"the answer {answer!r} holds no number")
    found = _last_number(completion)
    return float(found is not None and abs(found - wanted) <= tolerance * max(1.0, abs(wanted)))


@reward("format", correctness=False)
def format_matches(completion: str, *, pattern: Pattern) -> float:
    """1 if `pattern` matches somewhere in the completion (a dot matches line ends as well), else 0.

    Args:
        pattern: regular expression.
    """
    return float(re.search(pattern, completion, re.DOTALL) is not None)


@reward("overlong", correctness=False)
def overlong(length: int, max_tokens: int, *, buffer_share: Annotated[float, Field(gt=0, le=1)] = 0.2) -> float:
    """Soft punishment of length: 0 up to L - B tokens, then (L - B - length) / B, at least -1.

    L = max_tokens and B = buffer_share * L, so a completion that uses the whole budget gets -1.

    Args:
        buffer_share: share of the budget over which the reward falls.
    References: Yu et al., DAPO, arXiv:2503.14476, equation 13 (B = 4096 of L = 20480).
    """
    buffer = buffer_share * max_tokens
    return max(-1.0, min(0.0, (max_tokens - buffer - length) / buffer))


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    value = float(found[-1].replace(",", "")) if found else math.inf
    return value if math.isfinite(value) else None
