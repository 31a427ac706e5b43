import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.algorithms.planning.phrases import phrases

pytestmark = pytest.mark.numeric


def runs(text):
    return [" ".join(word.text for word in run) for run in phrases(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Wait, let me CHECK", ["wait let me check"]),
        ("one two. three\nfour", ["one two", "three", "four"]),
        ("so 12 apples, 3 pears", ["so", "apples", "pears"]),
        ("if $x^2 = 4$ then x is even", ["if", "then", "is even"]),
        (r"use \frac{1}{2} of \[ a \] it", ["use", "of", "it"]),
        ("that\u2019s a plan - I think", ["that's a plan i think"]),
        ("x2 variables b and c", ["variables", "and"]),
        ("\u0130stanbul is", ["\u0130stanbul is"]),
        ("", []),
    ],
)
def test_runs_of_plain_words(text, expected):
    assert runs(text) == expected


@settings(deadline=None, max_examples=80)
@given(st.text(alphabet="aIbc \u0130'\u2019.,$1\n\\", max_size=30))
def test_offsets_are_those_of_the_text(text):
    words = [word for run in phrases(text) for word in run]
    assert [word.start for word in words] == sorted(word.start for word in words)
    for word in words:
        assert text[word.start : word.end].replace("\u2019", "'").lower() == word.text.lower()
