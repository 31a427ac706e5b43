r"""Reward for a mathematically right answer in the last \boxed{...}."""

from __future__ import annotations

import re
from decimal import Decimal
from functools import partial
from typing import Any, Literal

from retrain.functional.numbers import read_number
from retrain.registry import reward
from retrain.system.extras import library

_BOX = "\\boxed{"
_LONGEST = 500
"""Longest answer that is parsed; a longer one is wrong unless it is equal as text."""

_AROUND_NUMBER = re.compile(r"\A(?:\\?\$|\s)+|\\(?:text|mathrm)\s*\{[^{}]*\}|(?:\\?[%$]|\s)+\Z")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_RELATION = re.compile(r"[=<>≤≥≠≈≡]|\\(?:leq?|geq?|neq?|lt|gt|approx|equiv|sim|cong|in|to)(?![a-zA-Z])")
_BAR = re.compile(r"[/\u2044\u2215]|frac")
_PROSE = re.compile(
    r"\\(?:text\w*|mathrm|mbox)\s*\{[^{}]*(?:(?:\d|\b(?:or|and|not)\b|\\)[^{}]*\}|\}(?!\s*\^).*\d)", re.DOTALL
)
"""Text that is more than a unit: math-verify skips it and what follows, so that a second answer could stand there."""
_WORD = re.compile(r"(?:\\(?:text\w*|mathrm|mbox)\s*\{)?\s*([A-Za-z]{3,})\s*\}?")
"""A word, which math-verify takes for a product of letters."""


def _unusable(answer: str) -> str:
    """Why a reference answer cannot be compared with, or ""."""
    if answer.count(_BOX) > 1:
        return f"the answer {answer[-100:]!r} has several boxes"
    return "" if _normal_form(answer) else f"the answer {answer!r} is empty"


@reward("boxed_math", extra=("math_verify", "math"), answers=_unusable)
class BoxedMath:
    r"""1 if the last \boxed{...} of the completion is mathematically the answer, else 0.

    Stricter than math-verify alone, which takes 5=5, an unboxed list or 1000\% for right where they are
    not: only the last box counts, and a relation or a percent sign is right only if the answer has one, too. Two
    numbers are compared exactly. An empty box is wrong.

    Args:
        equivalence: "symbolic" compares with math-verify (extra `math`): 1/2, 0.5 and \frac12 are equal.
            "simple" compares normal forms, see `simple_equal`, and needs nothing installed.
        require_box: without a box the completion scores 0; if False, it is the answer as a whole.
        value: where the answer is a number, the completion must give a number as well, and 12/2 is not accepted for 6;
            where it holds no arithmetic (812 apples, x=812), the completion must hold none. False accepts what has the
            answer's value, such as 2^4 for 16, and so the question itself: 665+147 for 812.
    """

    def __init__(
        self,
        *,
        equivalence: Literal["symbolic", "simple"] = "symbolic",
        require_box: bool = True,
        value: bool = True,
    ) -> None:
        self.require_box, self._value = require_box, value
        self._equal, self._symbolic = simple_equal, equivalence == "symbolic"
        if self._symbolic:
            self._equal = partial(symbolic_equal, value=value)
            symbolic_equal("x", "y")  # the first call loads the grammar

    def __call__(self, completion: str, answer: str) -> float:
        if problem := _unusable(answer):
            raise ValueError(problem)
        found = last_box(completion)
        if found is None:
            if self.require_box:
                return 0.0
            found = completion
        if not found.strip():
            return 0.0
        boxed = last_box(answer)
        wanted = boxed if boxed is not None and self._symbolic else answer
        if self._value and _is_number(wanted) and not (_is_number(found) and _is_worked_out(found, wanted)):
            return 0.0
        return float(self._equal(found, wanted))


def _is_number(text: str) -> bool:
    """Return whether a text is one number, with at most a unit, currency or percent sign."""
    text = text.rpartition("####")[2]
    boxed = last_box(text)
    return read_number(_AROUND_NUMBER.sub("", text if boxed is None else boxed)) is not None


def _is_worked_out(found: str, wanted: str) -> bool:
    """Return false for a fraction that is a whole number, such as 12/2, unless the answer is a fraction as well."""
    number = read_number(_AROUND_NUMBER.sub("", found))
    return number is None or number.denominator > 1 or not _BAR.search(found) or bool(_BAR.search(wanted))


def last_box(text: str) -> str | None:
    r"""Return the contents of the last \boxed{...}; None without one, or if its brace never closes."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    depth, start = 1, start + len(_BOX)
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0) if text[end - 1] != "\\" else 0
        if depth == 0:
            return text[start:end]
    return None


def symbolic_equal(found: str, answer: str, value: bool = False) -> bool:
    """Return whether math-verify finds two LaTeX expressions equal, without its known false positives.

    Takes as long as the expressions make it: call it in a process that can be killed.

    Args:
        value: `found` may hold arithmetic between numbers, such as 665+147, only if `answer` does.
    """
    found, answer = found.strip(), answer.strip()
    if found == answer:
        return found != ""
    if max(len(found), len(answer)) > _LONGEST or "$" in found or found.lower() == answer.lower():
        return False
    if bool(_RELATION.search(found)) != bool(_RELATION.search(answer)) or ("%" in found) != ("%" in answer):
        return False
    words = _WORD.fullmatch(found), _WORD.fullmatch(answer)
    if words[1] is not None:
        return words[0] is not None and words[0][1] == words[1][1]
    if _PROSE.search(found) and not _PROSE.search(answer):
        return False
    numbers = read_number(found), read_number(answer)
    if None not in numbers:  # math-verify rounds them
        return numbers[0] == numbers[1]
    verifier = library("math_verify", "math")
    # Its extractor of plain expressions evaluates them as Python, so only the LaTeX grammar is used.
    grammar = [verifier.LatexExtractionConfig()]
    parsed = [verifier.parse(f"{_BOX}{text}}}", grammar, parsing_timeout=None) for text in (answer, found)]
    if value and any(map(_has_arithmetic, parsed[1])) and not any(map(_has_arithmetic, parsed[0])):
        return False
    return bool(verifier.verify(parsed[0], parsed[1], timeout_seconds=None))


def _has_arithmetic(parsed: Any) -> bool:
    """Return true if a parsed expression holds a sum, product, power or factorial of numbers that is not worked out.

    Signs, fractions and roots do not count as arithmetic, except for the root of a perfect power.
    """
    sympy = library("sympy", "math")
    return isinstance(parsed, sympy.Basic) and any(map(_is_arithmetic, sympy.preorder_traversal(parsed)))


def _is_arithmetic(node: Any) -> bool:
    sympy = library("sympy", "math")
    numbers = [one for one in node.args if isinstance(one, sympy.Number)]
    if isinstance(node, sympy.Add | sympy.Mul):
        return sum(abs(one) != 1 or isinstance(node, sympy.Add) for one in numbers) > 1
    if isinstance(node, sympy.Pow) and len(numbers) == 2:
        base, power = numbers
        return (power.is_integer and power != -1) or (base.is_integer and base > 0 and bool(sympy.perfect_power(base)))
    return isinstance(node, sympy.factorial) and bool(numbers)


def simple_equal(found: str, answer: str) -> bool:
    r"""Return whether two answers have one normal form, or are the same number.

    Normal form: stripped, lower case, what follows the last ####, inside \boxed{}, without dollar signs, commas between
    groups of three digits, white space that does not separate two words or numbers, and one final `.0`.
    """
    left, right = _normal_form(found), _normal_form(answer)
    if left == right:
        return True
    try:
        return Decimal(left) == Decimal(right)  # exact, unlike float
    except ArithmeticError:
        return False


def _normal_form(text: str) -> str:
    text = text.strip().lower().rpartition("####")[2]
    boxed = last_box(text)
    text = (text if boxed is None else boxed).replace("$", "").strip()
    text = re.sub(r"(?<![\w.])\s+|\s+(?![\w.])", "", text)
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    return text.removesuffix(".0")
