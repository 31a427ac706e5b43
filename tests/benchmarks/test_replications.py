"""The words of docs/replications.md follow from the stored results by the rule of the page."""

from dataclasses import replace

import pytest

from benchmarks.evidence.replications import (
    IMAGES,
    PAGE,
    WIDER,
    analysis,
    details,
    figures,
    latest,
    named,
    summary,
    weakest,
    with_results,
    word,
)
from benchmarks.results import read
from retrain.campaign.verdict.judging import Judged

FOUND = with_results()


@pytest.mark.parametrize(("claim", "shown"), latest(FOUND), ids=[claim.name for claim, _ in latest(FOUND)])
def test_a_section_has_the_word_of_its_last_campaign(claim, shown):
    section = PAGE.read_text().partition(f"## {claim.name}\n")[2].partition("\n## ")[0]
    assert f"**{word(shown).capitalize()}**" in section


def test_the_pages_show_the_tables():
    assert read("claims", PAGE) == summary(FOUND)
    assert read("claims-in-full") == details(FOUND)


def test_controls_are_a_family_of_their_own():
    """credit.toml declares two controls: three methods on two tasks are a family of six, not of ten."""
    sizes = {named(each): each.size for each in analysis("credit.csv", WIDER).comparisons}
    assert (sizes["planning: sepa"], sizes["planning: oracle"]) == (6, 4)


def test_the_weakest_expectation_is_nearest_to_failing():
    weak = {claim.name: weakest(shown) for claim, shown in latest(FOUND)}
    assert named(weak["A length penalty collapses accuracy"][0]) == "penalty 0.03"
    dca, expected = weak["DCA shortens answers at equal accuracy"]
    assert (named(dca), dca.outcome.metric, expected) == ("dca 0.1", "accuracy", "not worse")


@pytest.mark.parametrize(("claim", "shown"), latest(FOUND), ids=[claim.name for claim, _ in latest(FOUND)])
def test_the_words_of_a_dot_are_about_its_expectation(claim, shown):
    drawn, _ = weakest(shown)
    assert f"{{{named(drawn)}@{drawn.outcome.column}}}" in claim.figure


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
