"""The tables of docs/evidence.md are those of the stored runs."""

import pytest

from benchmarks.evidence.ablations import ABLATIONS, table
from docs.measure import ROOT

PAGE = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ABLATIONS)
def test_the_page_shows_the_table_of_the_runs(name):
    section = PAGE.partition(f"## The ablation on {name}\n")[2].partition("\n## ")[0]
    assert "\n".join(table(name)) in section
