"""The names of `retrain.api`."""

import ast
from pathlib import Path

import pytest

from retrain import api

DECLARED = [
    name.asname
    for node in ast.walk(ast.parse(Path(api.__file__).read_text()))
    if isinstance(node, ast.ImportFrom)
    for name in node.names
    if name.asname
]


def test_what_type_checkers_see_is_what_there_is():
    assert set(DECLARED) == {"load", *api._MODULES}


@pytest.mark.parametrize("name", DECLARED)
def test_every_name_is_there(name):
    assert getattr(api, name) is not None


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'reopened'"):
        api.reopened  # noqa: B018
