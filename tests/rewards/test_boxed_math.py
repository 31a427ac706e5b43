r"""Mathematical equivalence of boxed answers, its traps, and what hostile text cannot do."""

import importlib
import os

import pytest

from retrain.errors import ComponentError, MissingExtraError
from retrain.registry import find
from retrain.rewards.boxed_math import BoxedMath, last_box, simple_equal
from retrain.rewards.decoration import undecorated
from retrain.rewards.pool import RewardPool


@pytest.fixture(scope="module")
def symbolic():
    return BoxedMath()


@pytest.mark.parametrize(
    ("found", "answer", "equal"),
    [
        ("64", "64", True),
        ("#### 64", "64", True),
        ("5 cm", "5", False),
        ("1,2345", "12345", False),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", True),
        (" YES ", "yes", True),
        ("3/4", "0.75", False),
        ("50%", "50", False),
        (r"\boxed{5", "5", False),
        ("1,234.0", "1234", True),
        ("1,2", "12", False),
        ("12345678901234567891", "12345678901234567890", False),
    ],
)
def test_simple_normal_form(found, answer, equal):
    assert simple_equal(found, answer) is equal


def test_an_expression_with_the_value_of_the_answer_may_be_accepted(symbolic):
    lenient = BoxedMath(value=False)
    assert lenient(r"\boxed{2^4}", "16") == lenient(r"\boxed{665+147}", "812") == 1
    for equivalence in ("symbolic", "simple"):
        strict = BoxedMath(equivalence=equivalence)
        for number in ("-5", r"\$5.00", "5,000", r"50\%", "1e3", r"$12$", r"5\text{ cm}"):
            assert strict(rf"\boxed{{{number}}}", number) == 1, number
        assert strict(r"\boxed{\frac{1}{2}}", r"\frac12") == (equivalence == "symbolic")
        assert strict(r"\boxed{x+1}", "x+1") == strict(r"\boxed{(1,2)}", "(1,2)") == 1


@pytest.mark.parametrize("equivalence", ["symbolic", "simple"])
@pytest.mark.parametrize("answer", ["", "  ", "$ $", r"\boxed{}", r"\boxed{5} or \boxed{6}", "#### "])
def test_an_answer_that_cannot_be_compared_with_is_refused(equivalence, answer):
    with pytest.raises(ValueError, match=r"is empty|has several boxes"):
        BoxedMath(equivalence=equivalence)(r"\boxed{6}", answer)


def test_simple_reward_with_and_without_a_box():
    assert BoxedMath(equivalence="simple")("12.50", "12.5") == 0
    assert BoxedMath(equivalence="simple")(r"\boxed{12.50}", "#### 12.5") == 1
    assert BoxedMath(equivalence="simple", require_box=False)("#### 12.50", "12.5") == 1
    assert BoxedMath(require_box=False)(r"\frac12", "0.5") == 1


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{a{b}c}", "a{b}c"),
        (r"\boxed{1} \boxed{2", None),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{a\\{b}c}", r"a\\{b}c"),
        ("none", None),
    ],
)
def test_last_box(text, box):
    assert last_box(text) == box


def test_hostile_powers_are_killed():
    reward = find("reward", "boxed_math").bind({})
    with RewardPool([(reward, 1.0)], timeout_s=1.0, max_failed=1.0) as pool:
        hostile = [r"\boxed{9^{9^{9^{9^9}}}}", r"\boxed{" + "{" * 100 + "}" * 100 + "}"]
        scores = pool.score([{"completion": text, "answer": "5"} for text in hostile])
    assert {score.status for score in scores} <= {"timeout", "ok", "error"}
    assert {score.value for score in scores} <= {None, 0.0}


@pytest.mark.parametrize(
    "repeated",
    ["abc ", "km/", "$", ", ", "\\\\ ", r"\;", r"\text{USD }", r"\text{a}", r"\frac", r"^\circ", "((", " ", r"\text{1"],
)
def test_decoration_is_stripped_in_time(repeated):
    """The regular expressions have no exponential case: each would take longer than the universe."""
    assert undecorated(("1 " + repeated * 250)[:249] + "!") is not None


@pytest.mark.parametrize("name", ["exact", "number", "boxed_math", "format", "overlong"])
def test_model_text_is_never_executed(name, tmp_path):
    canary = tmp_path / "canary"
    code = f"__import__('os').system('touch {canary}')"
    params = {"pattern": "(.*)"} if name == "format" else {}
    if name == "boxed_math":
        params = {"require_box": False}
    reward = find("reward", name).bind(params)
    texts = [
        code,
        f"\\boxed{{{code}}}",
        f"so {code}",
        f"so {code.replace(' ', chr(9))}",
        f"\\boxed{{\\text{{{code}}}}}",
        f"${code}$",
    ]
    with RewardPool([(reward, 1.0)], timeout_s=600.0, max_failed=1.0) as pool:
        pool.score([{"completion": t, "answer": "1", "length": 3, "max_tokens": 9} for t in texts])
        pool.score([{"completion": "1", "answer": t, "length": 3, "max_tokens": 9} for t in texts])
    assert not os.path.exists(canary)


def test_missing_library_names_the_extra(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MissingExtraError, match=r"math-verify is not installed; pip install .*\[math\]"):
        BoxedMath()
    assert issubclass(MissingExtraError, ComponentError)


def test_a_sum_is_not_its_value_however_long_it_is(symbolic):
    assert symbolic(r"\boxed{" + "1+" * 400 + "1}", "401") == 0.0
