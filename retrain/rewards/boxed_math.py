r"""Whether the answer in the last \boxed{...} is the right one, up to how mathematics writes it."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal

from retrain.functional.numbers import read_number
from retrain.registry import reward
from retrain.system.extras import library

_BOX = "\\boxed{"
_LONGEST = 500
"""Characters of an answer that are worth parsing; what is longer is wrong unless it is equal as text."""

_AROUND_NUMBER = re.compile(r"\A(?:\\?\$|\s)+|\\(?:text|mathrm)\s*\{[^{}]*\}|(?:\\?[%$]|\s)+\Z")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_RELATION = re.compile(r"[=<>≤≥≠≈≡]|\\(?:leq?|geq?|neq?|lt|gt|approx|equiv|sim|cong|in|to)(?![a-zA-Z])")


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
        value: where the answer is a number, the completion must give a number as well. False accepts what has its
            value, such as 2^4 for 16, and so the question itself: 665+147 for 812.
    """

    def __init__(
        self,
        *,
        equivalence: Literal["symbolic", "simple"] = "symbolic",
        require_box: bool = True,
        value: bool = True,
    ) -> None:
        self.require_box, self._value = require_box, value
        self._equal = simple_equal
        if equivalence == "symbolic":
            self._equal = symbolic_equal
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
        wanted = answer if boxed is None or self._equal is simple_equal else boxed
        if self._value and _is_number(wanted) and not _is_number(found):
            return 0.0
        return float(self._equal(found, wanted))


def _is_number(text: str) -> bool:
    """Whether a text is one number, with a unit, currency or percent sign at most, and not an expression."""
    text = text.rpartition("####")[2]
    boxed = last_box(text)
    return read_number(_AROUND_NUMBER.sub("", text if boxed is None else boxed)) is not None


def last_box(text: str) -> str | None:
    r"""What stands in the last \boxed{...} of `text`; None without one, or if its brace never closes."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    depth, start = 1, start + len(_BOX)
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0) if text[end - 1] != "\\" else 0
        if depth == 0:
            return text[start:end]
    return None


def symbolic_equal(found: str, answer: str) -> bool:
    """Whether math-verify finds two LaTeX expressions equal, without its known false positives.

    Takes as long as the expressions make it: call it in a process that can be killed.
    """
    found, answer = found.strip(), answer.strip()
    if found == answer:
        return found != ""
    if max(len(found), len(answer)) > _LONGEST or "$" in found or found.lower() == answer.lower():
        return False
    if bool(_RELATION.search(found)) != bool(_RELATION.search(answer)) or ("%" in found) != ("%" in answer):
        return False
    numbers = read_number(found), read_number(answer)
    if None not in numbers:  # math-verify rounds them
        return numbers[0] == numbers[1]
    verifier = library("math_verify", "math")
    # Its extractor of plain expressions evaluates them as Python, so only the LaTeX grammar is used.
    grammar = [verifier.LatexExtractionConfig()]
    parsed = [verifier.parse(f"{_BOX}{text}}}", grammar, parsing_timeout=None) for text in (answer, found)]
    return bool(verifier.verify(parsed[0], parsed[1], timeout_seconds=None))


def simple_equal(found: str, answer: str) -> bool:
    r"""Whether two answers have one normal form, or are the same number.

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
