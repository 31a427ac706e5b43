import pytest

from retrain.algorithms.planning.detectors import gram_detector, user_detector
from retrain.algorithms.planning.planning_mask import PlanningMask
from retrain.errors import ComponentError, UserCodeError
from tests.algorithms.planning.test_planning_mask import tokenizer

pytestmark = pytest.mark.numeric

SOURCE = """
def shouting(texts):
    return [[(t.index("HM"), t.index("HM") + 2)] if "HM" in t else [] for t in texts]

def named(texts):
    return [[(0, 2, "opening")] if len(t) > 2 else () for t in texts]

def raises(texts):
    raise RuntimeError("no idea")

short = lambda texts: []
beyond = lambda texts: [[(0, 10_000)] for t in texts]
numbers = lambda texts: [3 for t in texts]
constant = 3
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_planning_detectors.py").write_text(SOURCE)
    return [str(tmp_path)]


def test_grams_are_spans_of_the_text_as_it_is():
    text = "\u0130 think. Wait \u2014 let me"
    [[(start, end, name)]] = gram_detector(["wait let me"])([text])
    assert (text[start:end], name) == ("Wait \u2014 let me", "wait let me")


def test_a_users_spans_mark_the_tokens_that_overlap_them(folder):
    fast = tokenizer("bytes")
    mask = PlanningMask(fast, folder, detector="my_planning_detectors.shouting")
    rows = [fast.encode("we say HM to it"), fast.encode("and nothing here")]
    (marked, names), silent = mask.mark(rows)
    assert "HM" in fast.decode([rows[0][i] for i in marked])
    assert len(marked) <= 2
    assert names == ["hm"]
    assert silent == ([], [])


def test_a_span_may_have_a_name(folder):
    assert user_detector("my_planning_detectors:named", folder)(["abc", "a"]) == [[(0, 2, "opening")], []]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises", "raised RuntimeError: no idea"),
        ("short", "must return a list of 1 lists"),
        ("numbers", "completion 0: 3 is not a list of spans"),
        ("beyond", r"completion 0: \(0, 10000\) is not a span .* <= 3"),
    ],
)
def test_anything_else_is_an_error_that_names_the_function(folder, name, says):
    with pytest.raises(UserCodeError, match=f'"my_planning_detectors.{name}": .*{says}'):
        user_detector(f"my_planning_detectors.{name}", folder)(["abc"])


def test_what_is_no_function_is_refused(folder):
    with pytest.raises(ComponentError, match="is a int, not a function"):
        user_detector("my_planning_detectors.constant", folder)
    with pytest.raises(ComponentError, match="no module named"):
        user_detector("no_such_module_of_mine.fn", folder)
