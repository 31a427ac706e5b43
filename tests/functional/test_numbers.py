"""How answers are read: the table in answers.md, and numbers against Python's fractions.

`RETRAIN_FUZZ=1000000 python -m pytest tests/functional/test_numbers.py` compares as many pairs.
"""

import os
import random
import re
from fractions import Fraction
from pathlib import Path

import pytest

from retrain import registry
from retrain.functional.numbers import last_number, read_number
from retrain.registry import find
from retrain.rewards.text import number

TABLE = Path(__file__).with_name("answers.md").read_text(encoding="utf-8")
PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
ROW = re.compile(
    r"^\| `(\w+)` \| `(.*?)`(?: \(U\+[0-9A-F]{4}\))? \| `(.*?)` \| (right|wrong|refused) "
    r"\| (?:-|(right|wrong)(?:: (\w+))?) \|$",
    re.MULTILINE,
)
ROWS = ROW.findall(TABLE)
COUNT = int(os.environ.get("RETRAIN_FUZZ", "20000"))


def test_the_table_is_read_whole_and_the_page_shows_some_rows():
    rows = {line for line in TABLE.splitlines() if line.startswith("| `")}
    assert len(ROWS) == len(rows) > 130
    shown = PAGE.split("## How answers are compared")[1].split("\n## ")[0]
    assert len([row for row in rows if row in shown]) == sum(bool(ROW.match(line)) for line in shown.splitlines()) > 10


@pytest.mark.parametrize(("name", "completion", "answer", "verdict"), [row[:4] for row in ROWS])
def test_a_row_of_the_table(name, completion, answer, verdict):
    reward = find("reward", name)
    answers = registry.reward.traits_of(reward).answers
    assert answers is not None
    assert bool(answers(answer)) == (verdict == "refused")
    called = reward.bind().build({})
    if verdict == "refused" and name != "exact":
        with pytest.raises(ValueError, match=r"not one number|several boxes|is empty"):
            called(completion, answer)
    elif verdict != "refused":
        assert called(completion, answer) == (verdict == "right")


MINUS = "\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d"
"""Characters that are read as a minus sign, besides that of the keyboard."""


def written(rng: random.Random) -> tuple[str, Fraction]:
    """A number in one of the accepted forms, and its value by Python's own reading."""
    sign = rng.choice(("", "", "-", "+", *MINUS))
    factor = -1 if sign in ("-", *MINUS) else 1
    whole = rng.choice((rng.randrange(20), rng.randrange(10**4), rng.randrange(10**12), rng.randrange(10**30)))
    grouped = f"{whole:,}".replace(
        ",", rng.choice(("", ",", "'", "\u2019", "\u202f", "\u00a0", "{,}", r"\,", r"\ ", r",\!"))
    )
    kind = rng.randrange(6)
    if kind == 0:
        return sign + grouped, Fraction(factor * whole)
    if kind == 1:
        digits = "".join(rng.choices("0123456789", k=rng.randint(1, 8)))
        return f"{sign}{grouped}.{digits}", factor * Fraction(f"{whole}.{digits}")
    if kind == 2:
        below = rng.randint(1, 10**4)
        return f"{sign}{grouped}/{below}", Fraction(factor * whole, below)
    if kind == 3:
        power = rng.randint(-30, 30)
        return f"{sign}{whole}{rng.choice('eE')}{power}", factor * whole * Fraction(10) ** power
    if kind == 4:
        below = rng.randint(1, 10**4)
        text = rf"\{rng.choice(('frac', 'dfrac', 'tfrac'))}{{{whole}}}{{{below}}}"
        return sign + text, Fraction(factor * whole, below)
    below = rng.randint(2, 99)
    above = rng.randrange(1, below)
    return f"{sign}{whole} {above}/{below}", factor * (whole + Fraction(above, below))


JOINTS = (
    *(":", "-", "^", "**", "//", "..", "-+", "/--", "^{", "_", "\u2013", "*", " * ", " + ", "\u00d7", "\u00b7"),
    *(" \u2212 ", " /", "/ ", "\u2219", " \u00b1 ", " \u2260 ", r" \pm ", r" \neq ", " ** "),
    *("/\u221a", r"\sqrt{", r" \cdot ", r"\times", "^(", "*(", "*-", r"\frac{x}{"),
)
BEFORE = ("", "so ", "x = ", "The answer is ", "12 + 7 = ", "**", r"\boxed{", "(", "we get: ", "H2O ... ", "3, then ")
BEHIND = ("", ".", ")", " apples", "\n", "}", "**", "!", " (in H2O)", ", as covid-19 shows", "%")


@pytest.mark.slow
def test_numbers_are_those_of_fractions():
    rng = random.Random(0)
    for _ in range(COUNT):
        (left, x), (right, y) = written(rng), written(rng)
        if (draw := rng.random()) < 0.3:
            right, y = left, x
        elif draw < 0.5:  # nearly the same value
            y = x + Fraction(rng.choice((-1, 1)), 10 ** rng.randint(4, 9))
            right = rng.choice(("{}/{}", r"\frac{{{}}}{{{}}}")).format(y.numerator, y.denominator)
        before, behind = rng.choice(BEFORE), rng.choice(BEHIND)
        assert read_number(left) == x, left
        completion = before + left + behind
        assert read_number(str(last_number(completion))) == x, completion
        decimal = y.denominator > 1 and ("/" not in right.replace("frac", "/") or "/" not in left.replace("frac", "/"))
        near = abs(x - y) <= (Fraction(1, 10**6) * abs(y) if decimal else 0)
        assert number(completion, right) == near, (completion, right)


@pytest.mark.parametrize("space", [" ", "\u202f", r"\,"])
def test_a_space_separates_groups_of_three_digits(space):
    rng = random.Random(2)
    for _ in range(COUNT // 10):
        whole = rng.randrange(1000, 10 ** rng.randint(4, 12))
        text = f"so {whole:,}".replace(",", space) + rng.choice(BEHIND)
        assert read_number(str(last_number(text))) == whole, text


@pytest.mark.parametrize(
    "text", ["답은18입니다.", "답은 18입니다", "답은-18입니다.", "정답18", "答えは18です", "ตอบ18ครับ"]
)
def test_letters_without_blanks_beside_a_number_are_no_part_of_it(text):
    assert read_number(str(last_number(text))) == (-18 if "-" in text else 18)


def test_what_is_no_number_is_never_one():
    rng = random.Random(1)
    for _ in range(COUNT // 10):
        text = rng.choice(JOINTS).join(str(rng.randrange(1, 1000)) for _ in range(rng.randint(2, 3)))
        assert read_number(text) is None, text
        assert last_number(f"so {text}") is None, text
