r"""`boxed_math` and `number` against math-verify on generated pairs: every disagreement has a rule of the page.

`RETRAIN_FUZZ=100000 python -m pytest tests/rewards/test_math_verify.py` compares as many pairs.
"""

import logging
import os
import random
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import math_verify
import pytest

from retrain.rewards.boxed_math import BoxedMath
from retrain.rewards.text import number
from tests.functional.test_numbers import ROWS

TABLES = (Path(__file__).parents[1] / "functional" / "answers.md").read_text(encoding="utf-8")

COUNT = int(os.environ.get("RETRAIN_FUZZ", "1500"))
FONTS = (
    r"\text{%s}",
    r"\mathbf{%s}",
    r"\mathrm{%s}",
    r"\textbf{%s}",
    r"\boldsymbol{%s}",
    r"\displaystyle %s",
    r"\large %s",
    r"{\Huge %s}",
)
BRACKETS = ("(%s)", "{%s}", r"\left(%s\right)", r"\(%s\)")
CURRENCY = (r"\$%s", "$%s$", "\u20ac%s", r"%s\,\text{dollars}", r"\pounds %s", "%s \u20ac", r"\text{USD }%s", "USD %s")
UNITS = (
    *(
        r"%s\text{ cm}",
        r"%s\text{ m/s}^2",
        "%s apples",
        "%s square feet",
        r"%s\,\mathrm{kg}",
        "%s km/h",
        r"%s\ \text{m}^3",
    ),
    *(r"%s\frac{\text{m}}{\text{s}}", r"%s^\circ", r"%s^{\circ}\text{C}", "%s\u00b0", "%scm"),
)
SPACING = (" %s ", r"\,%s", r"%s\quad", r"%s~", "%s.", "%s,", r"%s\\")
OTHER_VALUES = (r"%s\text{ million}", "%s dozen", r"%s\pi", "%s+1", "x=%s", "%sab", r"%s\text{ or 7}", r"%s\%%")
SCRIPTS = (
    "答案是%s",
    "答案\uff1a%s元。",
    "答えは%sです",
    "คำตอบคือ%sบาท",
    "답은 %s입니다",
    "__%s__",
    "so **%s**",
    "so %skm/h",
)
CHANGED = ("%s万", "%s억", r"\pm %s", "%sx", "%skm/2h", r"\ln %s", "%s \u00d7 2", "%s:30", "3^{%s}")


def value(rng: random.Random) -> tuple[str, Fraction]:
    """A number as written in LaTeX, tiny and huge ones among them, and its value."""
    kind = rng.randrange(6)
    sign = rng.choice(("", "", "-"))
    factor = -1 if sign else 1
    if kind == 0:
        whole = rng.randrange(1, 10 ** rng.choice((1, 3, 30)))
        return f"{sign}{whole}", Fraction(factor * whole)
    if kind == 1:
        whole = rng.randrange(1000, 10**9)
        return sign + f"{whole:,}".replace(",", rng.choice((",", "{,}", r"\,", r",\!"))), Fraction(factor * whole)
    if kind == 2:
        text = f"{rng.randrange(100)}.{rng.randrange(1, 1000):03}"
        return sign + text, factor * Fraction(text)
    if kind == 3:
        text = f"0.{'0' * rng.randrange(6, 30)}{rng.randrange(1, 10)}"
        return sign + text, factor * Fraction(text)
    above, below = rng.randrange(1, 30), rng.randrange(2, 30)
    if above % below == 0:
        above += 1
    return sign + rng.choice((r"\frac{%d}{%d}", "%d/%d", r"\dfrac{%d}{%d}")) % (above, below), factor * Fraction(
        above, below
    )


def says(completion: str, answer: str) -> bool:
    """The verdict of math-verify as it is used on its own."""
    gold = math_verify.parse(rf"\boxed{{{answer}}}", parsing_timeout=None)
    return bool(math_verify.verify(gold, math_verify.parse(completion, parsing_timeout=None), timeout_seconds=None))


@pytest.fixture(autouse=True)
def quiet():
    """math-verify warns at each call that it has no time limit."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def pairs(rng: random.Random, decorations, others):
    """(text, template, value, reference, value of the reference), of which a third are equal and a third are near."""
    for _ in range(COUNT):
        (left, x), (right, y) = value(rng), value(rng)
        if (draw := rng.random()) < 0.4:
            right, y = left, x
        elif draw < 0.7:
            y = x * (1 + Fraction(rng.choice((-1, 1)), 10 ** rng.randint(1, 9)))
            right = rf"\frac{{{y.numerator}}}{{{y.denominator}}}"
        template = rng.choice((*decorations, *others, "%s"))
        yield template % left, template, x, right, y


@pytest.mark.slow
def test_decorated_numbers_are_their_values():
    """math-verify misses decorations, and accepts other values and numbers that differ after the sixth decimal."""
    rng, rules, reward = random.Random(0), Counter(), BoxedMath()
    for text, template, x, right, y in pairs(rng, (*FONTS, *BRACKETS, *CURRENCY, *UNITS, *SPACING), OTHER_VALUES):
        right = rng.choice((*CURRENCY, *UNITS, "%s", "%s", "%s")) % right
        completion = rf"so \boxed{{{text}}}"
        found = bool(reward(completion, right))
        assert found == (x == y and template not in OTHER_VALUES), (completion, right)
        if found != says(completion, right):
            rule = "decoration" if found else "value" if template in OTHER_VALUES else "exact"
            assert rule != "exact" or abs(x - y) < Fraction(1, 10**6), (completion, right)
            rules[rule] += 1
    assert set(rules) == {"decoration", "value", "exact"}


@pytest.mark.slow
def test_numbers_in_texts_are_their_values():
    """math-verify misses scripts without blanks, takes the first of several numbers, and rounds."""
    rng, rules = random.Random(1), Counter()
    for text, template, x, right, y in pairs(rng, SCRIPTS, CHANGED):
        found = bool(number(text, right))
        written = text.replace("km/", "").replace("frac", "/")
        decimal = y.denominator > 1 and not ("/" in written and "/" in right.replace("frac", "/"))
        near = abs(x - y) <= (Fraction(1, 10**6) * abs(y) if decimal else 0)
        assert found == (near and template not in CHANGED), (text, right)
        if found != says(text, right):
            rule = "text" if found else "last" if template in CHANGED else "exact"
            assert rule != "exact" or abs(x - y) < Fraction(1, 10**6), (text, right)
            rules[rule] += 1
    assert set(rules) == {"text", "last", "exact"}


def test_the_column_of_the_page():
    """The verdict is the one that math-verify gives, and a rule stands where the reward differs."""
    rules = set(re.findall(r"^\| (\w+) \| .{40}", TABLES, re.MULTILINE))
    for name, completion, answer, verdict, theirs, rule in ROWS:
        if theirs:
            assert ("right" if says(completion, answer) else "wrong") == theirs, completion
            assert (rule in rules) == (verdict != theirs) == bool(rule), completion
        else:
            assert verdict == "refused" or name == "exact"
