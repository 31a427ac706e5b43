r"""Reward `boxed_math`: compare the answer in the last \boxed{...} mathematically."""

from __future__ import annotations

import re
from decimal import Decimal
from functools import partial
from typing import Any, Literal

from retrain.registry import reward
from retrain.rewards.decoration import decorated_number, undecorated
from retrain.system.extras import library

_BOX = "\\boxed{"
_MAX_LENGTH = 500
"""Maximum number of characters of an answer that is parsed; a longer one must be equal as text."""

_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_MAX_DIGITS = 10_000
"""Maximum number of digits of rational numbers that are compared exactly."""
_RELATION = re.compile(r"[=<>≤≥≠≈≡]|\\(?:leq?|geq?|neq?|lt|gt|approx|equiv|sim|cong|in|to)(?![a-zA-Z])")
_BASE = re.compile(r"(?<=\d)\s*_\s*\{?\s*(?:\\text\s*\{\s*)?(\w+)")
"""Base of a number, which math-verify ignores: 101_2."""
_BAR = re.compile(r"[/\u2044\u2215]|frac")
_PROSE = re.compile(
    r"\\(?:text\w*|mathrm|mbox)\s*\{[^{}]*(?:(?:\d|\b(?:or|and|not)\b|\\)[^{}]*\}|\}(?!\s*\^).*\d)", re.DOTALL
)
"""LaTeX text that is more than a unit. math-verify ignores it and everything after it, which may be another answer."""
_WORD = re.compile(r"(?:\\(?:text\w*|mathrm|mbox)\s*\{)?\s*([A-Za-z]{3,})\s*\}?")
"""A word, which math-verify would parse as a product of letters."""


def _unusable(answer: str) -> str:
    """Return the reason why a reference answer cannot be used for comparison, or ""."""
    if answer.count(_BOX) > 1:
        return f"the answer {answer[-100:]!r} has several boxes"
    return "" if _normal_form(answer) else f"the answer {answer!r} is empty"


@reward("boxed_math", extra=("math_verify", "math"), answers=_unusable, pattern=r"\\boxed\s*\{")
class BoxedMath:
    r"""Return 1 if the last \boxed{...} of the completion is mathematically equal to the answer, else 0.

    The reward is stricter than math-verify alone, which accepts 5=5, an unboxed list or 1000\% in cases where they
    are wrong. Only the last box counts, and a relation or a percent sign is right only if the answer has one as
    well. Two numbers are compared exactly. An empty box is wrong.

    Args:
        equivalence: "symbolic" compares with math-verify (extra `math`): 1/2, 0.5 and \frac12 are equal.
            "simple" compares normal forms, see `simple_equal`, and needs no further library.
        require_box: score 0 if there is no box; if false, a completion without a box is the answer as a whole.
        value: require a computed value. If the answer is a number, the completion must be a number as well, and 12/2
            is not accepted for 6. If the answer contains no arithmetic (812 apples, x=812), the completion must not
            contain any. If false, everything with the value of the answer is accepted: 2^4 for 16, but also a repeated
            question, such as 665+147 for 812.
    """

    def __init__(
        self, *, equivalence: Literal["symbolic", "simple"] = "symbolic", require_box: bool = True, value: bool = True
    ) -> None:
        self.require_box, self._value = require_box, value
        self._equal = simple_equal
        if equivalence == "symbolic":
            self._equal = partial(symbolic_equal, value=value)
            symbolic_equal("x", "y")  # load the grammar now, which only the first call does

    def __call__(self, completion: str, answer: str) -> float:
        if problem := _unusable(answer):
            raise ValueError(problem)
        boxed = last_box(completion)
        if boxed is None:
            if self.require_box:
                return 0.0
            boxed = completion
        if not boxed.strip():
            return 0.0
        boxed, wanted = (undecorated(_stated(text)) for text in (boxed, answer))
        if self._value and decorated_number(wanted) is not None and not _is_simplified(boxed, wanted):
            return 0.0
        return float(self._equal(boxed, wanted))


def _stated(text: str) -> str:
    r"""Return the text after the last ####, or of that the content of the last \boxed{}."""
    text = text.rpartition("####")[2]
    boxed = last_box(text)
    return text if boxed is None else boxed


def _is_simplified(prediction: str, wanted: str) -> bool:
    """Return whether `prediction` is one number, and a fraction such as 12/2 only if the answer is one as well."""
    number = decorated_number(prediction)
    if number is None:
        return False
    return number.denominator > 1 or not _BAR.search(prediction) or bool(_BAR.search(wanted))


def last_box(text: str) -> str | None:
    r"""Return the content of the last \boxed{...}; None if there is none, or if its brace is never closed."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    depth = 1
    start += len(_BOX)
    for brace in _BRACE.finditer(text, start):  # \\ is a line break, and \{ an escaped brace
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : brace.start()]
    return None


def symbolic_equal(prediction: str, answer: str, value: bool = False) -> bool:
    """Return whether math-verify considers two LaTeX expressions equal, except for its known false positives.

    The run time has no bound. Call the function in a process that can be killed.

    Args:
        prediction: the expression of the completion.
        answer: the reference answer.
        value: reject `prediction` if it contains arithmetic with numbers, such as 665+147, and `answer` does not.
    """
    prediction, answer = prediction.strip(), answer.strip()
    if prediction == answer:
        return prediction != ""
    if max(len(prediction), len(answer)) > _MAX_LENGTH or "$" in prediction or prediction.lower() == answer.lower():
        return False
    if _signs(prediction) != _signs(answer) or _BASE.findall(prediction) not in ([], _BASE.findall(answer)):
        return False
    # If the answer is a word, the completion must be this word.
    words = _WORD.fullmatch(prediction), _WORD.fullmatch(answer)
    if words[1] is not None:
        return words[0] is not None and words[0][1] == words[1][1]
    if _PROSE.search(prediction) and not _PROSE.search(answer):
        return False
    numbers = decorated_number(prediction), decorated_number(answer)
    if None not in numbers:  # compared exactly here, because math-verify rounds numbers
        return numbers[0] == numbers[1]
    verifier = library("math_verify", "math")
    # Only the LaTeX grammar is used, because the extractor of plain expressions evaluates them as Python.
    grammar = [verifier.LatexExtractionConfig()]
    parsed = [verifier.parse(f"{_BOX}{text}}}", grammar, parsing_timeout=None) for text in (answer, prediction)]
    if value and any(map(_has_arithmetic, parsed[1])) and not any(map(_has_arithmetic, parsed[0])):
        return False
    equal = verifier.verify(parsed[0], parsed[1], timeout_seconds=None)
    return bool(equal) and not any(_differ(*pair) for pair in zip(parsed[0][:1], parsed[1][:1], strict=False))


def _signs(text: str) -> tuple[bool, bool]:
    """Return whether a text contains a relation, and whether it contains a percent sign."""
    return bool(_RELATION.search(text)), "%" in text


def _differ(first: Any, other: Any) -> bool:
    """Return whether two expressions that math-verify calls equal contain different numbers in the same place.

    math-verify rounds to six decimals, so that 10^-30 and 10^-31 are equal. Rational numbers of up to 10^4 digits are
    compared exactly, irrational ones with a relative tolerance of 1e-40, and with a decimal with one of 1e-6.
    Expressions with symbols are compared so where the symbols are distinct rational numbers, because math-verify also
    compares some of them as rounded numbers: sqrt(x) + 10^-30 and sqrt(x).
    """
    sympy = library("sympy", "math")
    if isinstance(first, sympy.Expr) and isinstance(other, sympy.Expr):
        symbols = sorted(first.free_symbols | other.free_symbols, key=str)
        # Distinct values without a special meaning, so that unequal expressions are unlikely to agree there.
        point = {symbol: sympy.Rational(97 + 4 * index, 64) for index, symbol in enumerate(symbols)}
        return _numbers_differ(first.subs(point), other.subs(point))
    pairs = zip(_parts(first, other), _parts(other, first), strict=False)
    return any(_differ(left, right) for left, right in pairs)


def _parts(node: Any, other: Any) -> list[Any]:
    """Return what `_differ` compares: elements of a tuple or set, bounds of an interval, the right side of x = 1."""
    sympy = library("sympy", "math")
    if isinstance(node, sympy.FiniteSet):
        return sorted(node.args, key=lambda element: sympy.default_sort_key(element.evalf()))
    if isinstance(node, sympy.Interval):
        return [node.start, node.end]
    if isinstance(node, sympy.core.relational.Relational):
        return [node.rhs] if type(node) is type(other) and node.lhs == other.lhs else []
    return list(node.args) if isinstance(node, sympy.Tuple) else []


def _numbers_differ(first: Any, other: Any) -> bool:
    """Compare two expressions without symbols; see `_differ`."""
    sympy = library("sympy", "math")
    decimals = any(number.has(sympy.Float) for number in (first, other))
    first, other = (
        number.xreplace({decimal: sympy.Rational(str(decimal)) for decimal in number.atoms(sympy.Float)})
        for number in (first, other)
    )
    # 10^(10^9) is a rational number, too, but writing it out would fill the memory.
    sizes = [sympy.log(sympy.Abs(number), 10).evalf() for number in (first, other)]
    if first.is_rational and other.is_rational and all(size.is_finite and abs(size) < _MAX_DIGITS for size in sizes):
        return first.doit() != other.doit()
    # 60 digits, so that the relative tolerance of 1e-40 is above the rounding.
    left, right = first.evalf(60), other.evalf(60)
    if not (left.is_finite and right.is_finite):
        return bool(left.is_infinite or right.is_infinite) and left != right
    tolerance = sympy.Float("1e-6" if decimals and (first.is_rational or other.is_rational) else "1e-40", 60)
    return bool(sympy.Abs(left - right) > tolerance * sympy.Max(sympy.Abs(left), sympy.Abs(right)))


def _has_arithmetic(parsed: Any) -> bool:
    """Return whether a parsed expression contains an unevaluated sum, product, power or factorial of numbers.

    Signs, fractions and roots do not count as arithmetic, except for the root of a perfect power.
    """
    sympy = library("sympy", "math")
    return isinstance(parsed, sympy.Basic) and any(map(_is_arithmetic, sympy.preorder_traversal(parsed)))


def _is_arithmetic(node: Any) -> bool:
    """Return whether one node of an expression is an unevaluated operation on numbers; see `_has_arithmetic`."""
    sympy = library("sympy", "math")
    numbers = [number for number in node.args if isinstance(number, sympy.Number)]
    if isinstance(node, sympy.Add | sympy.Mul):
        # A factor of 1 or -1 is a sign, as in -x.
        return sum(abs(number) != 1 or isinstance(node, sympy.Add) for number in numbers) > 1
    if isinstance(node, sympy.Pow) and len(numbers) == 2:
        base, power = numbers
        return (power.is_integer and power != -1) or (base.is_integer and base > 0 and bool(sympy.perfect_power(base)))
    return isinstance(node, sympy.factorial) and bool(numbers)


def simple_equal(prediction: str, answer: str) -> bool:
    r"""Return whether two answers have the same normal form, or are the same number.

    The normal form is the text after the last ####, or of that the content of the last \boxed{}, in lower case,
    without white space around it, dollar signs, commas between groups of three digits, white space that does not
    separate two words or numbers, and a final `.0`.
    """
    left, right = _normal_form(prediction), _normal_form(answer)
    if left == right:
        return True
    try:
        return Decimal(left) == Decimal(right)  # exact, in contrast to float
    except ArithmeticError:
        return False


def _normal_form(text: str) -> str:
    text = _stated(text.strip().lower()).replace("$", "").strip()
    text = re.sub(r"(?<![\w.])\s+|\s+(?![\w.])", "", text)
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    return text.removesuffix(".0")
