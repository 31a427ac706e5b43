"""Rewards computed from the text or length of a completion, without further libraries."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated

from pydantic import AfterValidator, Field

from retrain.registry import reward

_TOLERANCE = Fraction(1, 10**6)
"""Relative tolerance of the reward `number` for decimals."""


def reference(answer: str) -> str:
    """Return the part of a reference answer after its last `####`, stripped."""
    return answer.rpartition("####")[2].strip()


def no_answer(answer: str) -> str:
    """Return the reason why the reward `exact` cannot use a reference answer, or ""."""
    return "" if answer.strip() else "the answer is empty"


def not_a_number(answer: str) -> str:
    """Return the reason why a reference answer is not one number, or ""."""
    from retrain.functional.numbers import read_number

    return "" if read_number(reference(answer)) is not None else f"the answer {answer[-100:]!r} is not one number"


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return pattern


def _check_group(pattern: str) -> str:
    if not re.compile(pattern).groups:
        raise ValueError("captures nothing: put the part that matches the answer in parentheses")
    return pattern


Pattern = Annotated[str, AfterValidator(_check_pattern)]
Capturing = Annotated[Pattern, AfterValidator(_check_group)]


@reward("exact", answers=no_answer)
def exact(completion: str, answer: str, *, pattern: Capturing = r"(?:^|\n)so (\S+)\s*\Z") -> float:
    """Return 1 if the text captured by `pattern` equals the answer, else 0. White space around both is ignored.

    Args:
        pattern: regular expression whose first group captures the answer; the last match counts. The default
            captures the word after `so` on the last line.
    """
    matches = list(re.finditer(pattern, completion))
    # A group that did not take part in the match is None.
    return float(bool(matches) and (matches[-1].group(1) or "").strip() == answer.strip())


@reward("number", answers=not_a_number)
def number(completion: str, answer: str, *, tolerance: Annotated[float, Field(ge=0)] | None = None) -> float:
    """Return 1 if the last number x of the completion equals the number y of the answer, else 0.

    `retrain.functional.numbers` defines the accepted formats, which include fractions. Numbers are compared
    exactly, with one exception: if y is not a whole number and x or y is written as a decimal,
    |x - y| <= 1e-6 * |y| suffices. The answer must be one number, or end with `#### NUMBER`.

    Args:
        tolerance: accept |x - y| <= tolerance * max(1, |y|) for all numbers; if unset, the rule above applies.
    """
    from retrain.functional.numbers import is_fraction, last_number, read_number  # no other reward here reads numbers

    expected = read_number(reference(answer))
    written = last_number(completion)
    if expected is None:
        raise ValueError(not_a_number(answer))
    number_written = None if written is None else read_number(written)
    if number_written is None or number_written == expected:
        return float(number_written is not None)
    if tolerance is not None:
        return float(abs(number_written - expected) <= Fraction(tolerance) * max(1, abs(expected)))
    # A rounded decimal of a fraction is accepted, a wrong fraction or whole number is not.
    decimal = expected.denominator > 1 and not (is_fraction(reference(answer)) and is_fraction(str(written)))
    return float(decimal and abs(number_written - expected) <= _TOLERANCE * abs(expected))


@reward("format", correctness=False)
def format_matches(completion: str, *, pattern: Pattern) -> float:
    """Return 1 if `pattern` matches anywhere in the completion (a dot also matches a line end), else 0.

    Args:
        pattern: regular expression.
    """
    return float(re.search(pattern, completion, re.DOTALL) is not None)


@reward("overlong", correctness=False)
def overlong(length: int, max_tokens: int, *, buffer_share: Annotated[float, Field(gt=0, le=1)] = 0.2) -> float:
    """Return the soft overlong punishment: 0 up to L - B tokens, then (L - B - length) / B, at least -1.

    L = max_tokens and B = buffer_share * L, so a completion that uses the whole budget gets -1.

    Args:
        buffer_share: share of the budget over which the reward falls from 0 to -1.
    References: Yu et al., DAPO, arXiv:2503.14476, equation 13 (B = 4096 of L = 20480).
    """
    buffer = buffer_share * max_tokens
    return max(-1.0, min(0.0, (max_tokens - buffer - length) / buffer))
