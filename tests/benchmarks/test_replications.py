"""The words of docs/replications.md follow from the stored results by the rule of the page."""

from dataclasses import replace

import pytest

from benchmarks.evidence.replications import IMAGES, figures, table, with_results, word
from docs.measure import ROOT
from retrain.campaign.verdict.analysis import Judged

PAGE = (ROOT / "docs" / "replications.md").read_text()
FOUND = with_results()


@pytest.mark.parametrize(("claim", "found"), FOUND, ids=[claim.name for claim, _ in FOUND])
def test_the_page_shows_the_tables_and_the_word(claim, found):
    section = PAGE.partition(f"## {claim.name}\n")[2].partition("\n## ")[0]
    assert f"**{word(found).capitalize()}**" in section
    for line in table(found):
        assert line in section


def test_the_figures_are_those_of_the_results():
    drawn = figures(FOUND)
    assert {name: (IMAGES / name).read_text() for name in drawn} == drawn


@pytest.mark.parametrize(
    ("kind", "equality", "expected", "said"),
    [
        ("better", 1.0, "better", "reproduced"),
        ("worse", 1.0, "better", "opposite"),
        ("equal", 0.01, "better", "equal"),
        ("open", 1.0, "better", "open"),
        ("not worse", 1.0, "better", "open"),
        ("not worse", 1.0, "not worse", "reproduced"),
        ("equal", 0.01, "not worse", "reproduced"),
        ("better", 1.0, "not worse", "reproduced"),
        ("worse", 0.01, "not worse", "reproduced"),  # by less than the margin
        ("worse", 1.0, "not worse", "opposite"),
        ("open", 1.0, "not worse", "open"),
        ("worse", 1.0, "worse", "reproduced"),
        ("better", 1.0, "worse", "opposite"),
    ],
)
def test_the_rule(kind, equality, expected, said):
    one = replace(FOUND[0][1][0][0], judged=Judged("exact", equality=equality, kind=kind), withheld="")
    better = replace(one, judged=Judged("exact", kind="better"))
    assert word([(one, expected)]) == said
    assert word([(one, expected), (better, "better")]) == said, "what else holds does not change it"
