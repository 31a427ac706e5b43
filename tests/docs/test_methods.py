"""Every recipe of a method is on the page of methods or is a preset, and has a measured run among the results."""

import re
from pathlib import Path

import pytest

from retrain.config.presets import preset_names

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parents[2]
RECIPES = sorted(file.stem for file in (ROOT / "configs" / "methods").glob("*.toml"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_a_formula_and_a_run(name):
    page = (ROOT / "docs" / "methods.md").read_text()
    assert name == "base" or name in preset_names() or f"`{name}`" in page
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text().partition("## Recipes that learn")[2]
    assert re.search(rf"^\| `{name}`.*\| \d+ \|", results, re.MULTILINE)
