import json

import pytest

from retrain.algorithms.planning.gram_pattern import MATH_GRAMS, STRATEGIC_GRAMS, GramPattern, normalize, read_grams
from retrain.errors import ComponentError

pytestmark = pytest.mark.numeric


def found(text, grams=STRATEGIC_GRAMS):
    return [gram for _, _, gram in GramPattern(grams).find(normalize(text))]


def test_there_are_eighteen_default_grams_and_each_is_found():
    assert len(set(STRATEGIC_GRAMS)) == 18
    for gram in STRATEGIC_GRAMS:
        assert gram in found(f"So {gram.upper()} 12.")


def test_a_list_of_written_mathematics_has_a_name():
    assert read_grams("math") == MATH_GRAMS
    assert len(set(MATH_GRAMS)) == 27
    for gram in ("let's try a different approach", "notice that", "we can use the fact that", "the key insight is"):
        assert gram in found(f"So {gram.capitalize()}, x = 3.", read_grams("math"))


def test_whole_words_whatever_their_case_space_and_punctuation_the_longest_at_each_place():
    same = (
        "Wait, let me",
        "wait\n  let\tme",
        "Wait... let me",
        "WAIT \u2014 let me",
        "wait\u00a0let me",
        "(wait let me)",
    )
    assert [found(text) for text in same] == [["wait let me"]] * 6
    for gram in ("wait\u2026 let me", "wait \u2014 let me", "Wait, let\u2013me"):
        assert found("Wait, let me", [gram]) == ["wait let me"]
    apostrophes = "No, that\u2019s not right; that doesn\u02bct work"
    assert found(apostrophes) == ["that's not right", "that doesn't work"]
    parts_of_words = "await let me", "let me thinking", "the keys is", "wait2let me", "letme think", ""
    assert [found(text) for text in parts_of_words] == [[]] * 6
    assert found("the key is", ["the key", "the key is"]) == ["the key is"]
    assert found("let's go", ["let", "let's", "let's go"]) == ["let's go"]
    assert found("the key, here", ["the key", "the key is"]) == ["the key"]
    assert found("x <plan> y", ["<plan>"]) == ["<plan>"]
    assert found("wait let me think") == ["wait let me", "let me think"]


def test_offsets_cover_the_match():
    text = "so Wait, let me add"
    ((start, end, _),) = GramPattern(STRATEGIC_GRAMS).find(normalize(text))
    assert text[start:end] == "Wait, let me"


def test_every_documented_form_reads_the_same(tmp_path):
    grams = ("wait let me", "hm")
    plain, keyed = tmp_path / "plain.json", tmp_path / "keyed.json"
    plain.write_text(json.dumps(grams))
    keyed.write_text(json.dumps({"strategic_grams": grams, "metadata": {}}))
    assert read_grams(list(grams)) == grams
    assert read_grams(json.dumps(grams)) == grams
    assert read_grams("wait let me, hm ,") == grams
    assert read_grams(path=str(plain)) == grams
    assert read_grams(path=str(keyed)) == grams
    assert read_grams() == STRATEGIC_GRAMS


@pytest.mark.parametrize("content", ['{"grams": ["a"]}', '"a"', "[]", "[1]", '[""]', "{", '{"strategic_grams": "a"}'])
def test_any_other_file_is_an_error_that_names_it(tmp_path, content):
    path = tmp_path / "grams.json"
    path.write_text(content)
    with pytest.raises(ComponentError, match=r"grams\.json"):
        read_grams(path=str(path))


def test_other_mistakes(tmp_path):
    with pytest.raises(ComponentError, match="No such file"):
        read_grams(path=str(tmp_path / "missing.json"))
    with pytest.raises(ComponentError, match="not valid JSON"):
        read_grams('["wait')
    with pytest.raises(ComponentError, match="both"):
        read_grams(["a"], str(tmp_path))
    with pytest.raises(ComponentError, match="non-empty"):
        read_grams('{"a": 1}')
