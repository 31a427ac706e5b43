import json
from itertools import pairwise

import pytest

from retrain.algorithms.planning.gram_pattern import STRATEGIC_GRAMS
from retrain.algorithms.planning.planning_mask import PlanningMask
from retrain.algorithms.planning.semantic import EXECUTION_PHRASES, SemanticDetector, read_execution
from tests.algorithms.planning.test_planning_mask import tokenizer

pytestmark = pytest.mark.numeric

TEXT = (
    "We multiply both sides by 3. Hmm, I should verify this. Let's try a different approach: the sum of the first "
    "terms is 55. The important insight is that n is even, so the answer is 4."
)


@pytest.fixture(scope="module")
def detector():
    return SemanticDetector(STRATEGIC_GRAMS, EXECUTION_PHRASES, None, 3, 0.3)


def found(detector, text):
    return [(text[start:end], name) for start, end, name in detector([text])[0]]


def test_paraphrases_of_grams_are_planning_and_steps_are_not(detector):
    assert found(detector, TEXT) == [
        ("I should verify", "let me verify"),
        ("a different approach", "try another approach"),
        ("The important insight", "the key insight"),
    ]


def test_every_gram_is_found_in_text(detector):
    for gram in STRATEGIC_GRAMS:
        if len(gram.split()) == 3:
            assert found(detector, f"12+3=15\n{gram.capitalize()} 7") == [(gram.capitalize(), gram)]


def test_the_addition_tasks_lines(detector):
    text = "let me think\n3+4=7\nwait let me redo\n2+2=4\nso 47"
    assert [phrase for phrase, _ in found(detector, text)] == ["let me think", "wait let me"]


def test_the_margin_and_the_window_decide():
    assert not found(SemanticDetector(STRATEGIC_GRAMS, EXECUTION_PHRASES, None, 3, 1.5), TEXT)
    wide = SemanticDetector(STRATEGIC_GRAMS, EXECUTION_PHRASES, None, 5, 0.2)
    assert any(len(phrase.split()) == 5 for phrase, _ in found(wide, TEXT))


def test_spans_do_not_overlap_and_texts_do_not_mix(detector):
    together = detector([TEXT, "", "let me think", TEXT])
    assert together == [detector([text])[0] for text in (TEXT, "", "let me think", TEXT)]
    for spans in together:
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_tokens_of_the_spans_are_marked():
    fast = tokenizer("bytes")
    ids = fast.encode("12 HMM LET ME THINK 34")
    [(marked, names)] = PlanningMask(fast, detector="semantic", margin=0.5).mark([ids])
    assert "LET ME THINK" in fast.decode([ids[i] for i in marked])
    assert names == ["let me think"]


def test_execution_is_read_from_what_an_extraction_wrote(tmp_path):
    file = tmp_path / "grams.json"
    file.write_text(json.dumps({"strategic_grams": ["a b"], "metadata": {"execution_grams": ["we add them"]}}))
    assert read_execution(str(file)) == ("we add them",)
    for content in ({"strategic_grams": ["a"], "metadata": None}, ["a"], {"metadata": {"execution_grams": []}}):
        file.write_text(json.dumps(content))
        assert read_execution(str(file)) == EXECUTION_PHRASES
    assert read_execution(None) == EXECUTION_PHRASES
