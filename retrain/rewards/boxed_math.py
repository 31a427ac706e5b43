r"""Whether the answer in the last \boxed{...} is the right one, up to how mathematics writes it."""

from __future__ import annotations

import re
from typing import Literal

from retrain.registry import reward
from retrain.system.extras import library

_BOX = "\\boxed{"
_LONGEST = 500
"""Characters of an answer that are worth parsing; what is longer is wrong unless it is equal as text."""

_RELATION = re.compile(r"[=<>≤≥≠≈≡]|\\(?:leq?|geq?|neq?|lt|gt|approx|equiv|sim|cong|in|to)(?![a-zA-Z])")


@reward("boxed_math", extra=("math_verify", "math"))
class BoxedMath:
    r"""1 if the last \boxed{...} of the completion is mathematically the answer, else 0.

    Stricter than math-verify alone, which takes 5=5, an unboxed list or 1000\% for right where they are
    not: only the last box counts, and a relation or a percent sign is right only if the answer has one, too.

    Args:
        equivalence: "symbolic" compares with math-verify (extra `math`): 1/2, 0.5 and \frac12 are equal.
            "simple" compares normal forms, see `simple_equal`, and needs nothing installed.
        require_box: without a box the completion scores 0; if False, it is the answer as a whole.
    """

    def __init__(self, *, equivalence: Literal["symbolic", "simple"] = "symbolic", require_box: bool = True) -> None:
        self.require_box = require_box
        self._equal = simple_equal
        if equivalence == "symbolic":
            self._equal = symbolic_equal
            symbolic_equal("1", "2")  # the first call loads the grammar

    def __call__(self, completion: str, answer: str) -> float:
        found = last_box(completion)
        if found is None:
            if self.require_box:
                return 0.0
            found = completion
        boxed = last_box(answer)
        return float(self._equal(found, answer if boxed is None or self._equal is simple_equal else boxed))


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
    if max(len(found), len(answer)) > _LONGEST or "$" in found:
        return False
    if bool(_RELATION.search(found)) != bool(_RELATION.search(answer)) or ("%" in found) != ("%" in answer):
        return False
    verifier = library("math_verify", "math")
    # Its extractor of plain expressions evaluates them as Python, so only the LaTeX grammar is used.
    grammar = [verifier.LatexExtractionConfig()]
    parsed = [verifier.parse(f"{_BOX}{text}}}", grammar, parsing_timeout=None) for text in (answer, found)]
    return bool(verifier.verify(parsed[0], parsed[1], timeout_seconds=None))


def simple_equal(found: str, answer: str) -> bool:
    r"""Whether two answers have one normal form, or equal values as floats.

    Normal form: stripped, lower case, what follows the last ####, inside \boxed{}, without spaces, commas,
    dollar signs and one final `.0`.
    """
    left, right = _normal_form(found), _normal_form(answer)
    if left == right:
        return True
    try:
        return float(left) == float(right)
    except ValueError:
        return False


def _normal_form(text: str) -> str:
    text = text.strip().lower().rpartition("####")[2]
    boxed = last_box(text)
    text = re.sub(r"[\s,$]", "", text if boxed is None else boxed)
    return text.removesuffix(".0")
