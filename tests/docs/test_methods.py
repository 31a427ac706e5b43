"""The page of methods: formulas are those of the code, and every recipe is told of."""

import html
import inspect
import re
from pathlib import Path

import pytest

from retrain.registry import find

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "methods.md").read_text()
ROWS = re.findall(r"\| (advantage|transform|loss) `(\w+)` \| [^|]*\| <code>(.*?)</code> \|", PAGE)


@pytest.mark.parametrize(("kind", "name", "formula"), ROWS, ids=[name for _, name, _ in ROWS])
def test_a_formula_is_that_of_the_docstring(kind, name, formula):
    text = " ".join((inspect.getdoc(find(kind, name).target) or "").split())
    assert " ".join(html.unescape(formula).split()) in text


def test_every_recipe_has_a_row_or_is_said_to_have_none():
    told = {*re.findall(r"`(\w+)`", PAGE[PAGE.index("## Recipes that learn") :])}
    assert {file.stem for file in (ROOT / "configs" / "methods").glob("*.toml")} <= told
    assert len(ROWS) == 22
