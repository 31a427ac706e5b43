"""Rewards that look at text or length and need nothing installed."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated

from pydantic import AfterValidator, Field

from retrain.functional.numbers import last_number, read_number
from retrain.registry import reward

_TOLERANCE = 1e-6


def reference(answer: str) -> str:
    """Return the part of a reference answer after its last `####`, stripped."""
    return answer.rpartition("####")[2].strip()


def no_answer(answer: str) -> str:
    """Reason why a reference answer cannot be compared with, or ""."""
    return "" if answer.strip() else "the answer is empty"


def not_a_number(answer: str) -> str:
    """Reason why a reference answer is not one number, or ""."""
    return "" if read_number(reference(answer)) is not None else f"the answer {answer[-100:]!r} is not one number"


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


@reward("exact", answers=no_answer)
def exact(completion: str, answer: str, *, pattern: Capturing = r"(?:^|\n)so (\S+)\s*\Z") -> float:
    """1 if what `pattern` captures equals the answer, else 0. White space around both is ignored.

    Args:
        pattern: regular expression whose first group is the answer; the last match counts. The default
            takes the word after `so` on the last line.
    """
    matches = list(re.finditer(pattern, completion))
    return float(bool(matches) and (matches[-1].group(1) or "").strip() == answer.strip())


@reward("number", answers=not_a_number)
def number(completion: str, answer: str, *, tolerance: Annotated[float, Field(ge=0)] | None = None) -> float:
    """1 if the last number x of the completion is the answer's number y, else 0.

    Forms of numbers: `retrain.functional.numbers`. Fractions are read, and whole numbers compare
    exactly. If y is not a whole number and either is written as a decimal,
    |x - y| <= 1e-6 * max(1, |y|) is enough. The answer must be one number, or end with `#### NUMBER`.

    Args:
        tolerance: |x - y| <= tolerance * max(1, |y|) is enough, whatever the numbers are; unset: as above.
    """
    wanted, written = read_number(reference(answer)), last_number(completion)
    if wanted is None:
        raise ValueError(not_a_number(answer))
    found = None if written is None else read_number(written)
    if found is None or found == wanted:
        return float(found is not None)
    decimal = wanted.denominator > 1 and ("/" not in reference(answer) or "/" not in str(written))
    slack = Fraction(_TOLERANCE if decimal else 0) if tolerance is None else Fraction(tolerance)
    return float(abs(found - wanted) <= slack * max(1, abs(wanted)))


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
