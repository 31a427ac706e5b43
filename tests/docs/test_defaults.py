"""docs/defaults.md says what the schema says."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from retrain.config.schema import Config
from retrain.registry import components

pytestmark = pytest.mark.repository

PAGE = (Path(__file__).parents[2] / "docs" / "defaults.md").read_text()
ROWS = re.findall(r"^\| `\[([\w.]+)\] (\w+)` \| (.*?) \|", PAGE, re.MULTILINE)
QUOTED = [(table, key, found[1]) for table, key, cell in ROWS if (found := re.match(r"`([^`]+)`", cell))]


def default(table, key):
    """Default of a key of a section, or of a component's table."""
    if table in Config.model_fields:
        section: Any = Config.model_fields[table].annotation
        return section.model_fields[key].default
    (found,) = {
        repr(part.schema.model_fields[key].default): part.schema.model_fields[key].default
        for part in components()
        if part.table == table and key in part.schema.model_fields
    }.values()
    return found


@pytest.mark.parametrize(("table", "key", "quoted"), QUOTED)
def test_the_page_quotes_the_schema(table, key, quoted):
    value = default(table, key)
    assert tomllib.loads(f"x = {quoted}")["x"] == (list(value) if isinstance(value, tuple) else value)


def test_most_rows_quote_a_value():
    assert len(QUOTED) > 25
