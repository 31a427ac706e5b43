"""Columns of a row in a template."""

import pytest

from retrain.functional.templates import PLACEHOLDER, as_text, column

ROW = {"a": 1, "b": {"c": "x", "d": {"e": None}}, "b.c": 2}


@pytest.mark.parametrize(("name", "found"), [("a", [1]), ("b.c", ["x"]), ("b.d.e", [None]), ("b.x", []), ("a.b", [])])
def test_a_dot_names_a_nested_column(name, found):
    assert column(ROW, name) == found


def test_a_place_is_a_name_in_braces():
    assert PLACEHOLDER.findall('{a} {b.c} {} {1} { a } {"score": N} {{_d}}') == ["a", "b.c", "_d"]


def test_what_is_not_text_is_shown_as_json():
    assert [as_text(one) for one in ("ü", 1.5, None, ["é", {"a": True}])] == ["ü", "1.5", "null", '["é", {"a": true}]']
