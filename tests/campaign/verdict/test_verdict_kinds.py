"""Every kind of verdict has a row in the one table, and every reader takes it from there."""

from dataclasses import replace
from typing import get_args

import pytest

from retrain.campaign.verdict.analysis import Analysis, analyze, claims
from retrain.campaign.verdict.judging import Judged
from retrain.campaign.verdict.sentences import as_json, text
from retrain.campaign.verdict.verdict_kinds import KINDS, VerdictKind
from retrain.campaign.verdict.verdict_page import exported, paper, render
from tests.campaign.verdict.test_analysis import noisy, simulated


def test_every_kind_has_a_row():
    assert set(KINDS) == set(get_args(VerdictKind))


@pytest.mark.parametrize("kind", get_args(VerdictKind))
def test_every_output_shows_every_kind(kind, tmp_path):
    table = simulated(noisy(), ladder=())
    table = replace(table, cells={place: replace(cell, path=tmp_path) for place, cell in table.cells.items()})
    (one,) = analyze([table]).comparisons
    found = Analysis((table,), (replace(one, judged=Judged("exact", 0.04, 0.04, kind=kind)),))
    words = KINDS[kind].words.format(margin="0")
    assert f"{KINDS[kind].mark} {words}" in text(found)
    assert as_json(found)["comparisons"][0]["verdict"] == words
    assert words in render(found, [])
    assert words in paper(found)
    assert f'class="{KINDS[kind].css} mark"' in exported(found)["differences"].svg
    assert claims(found) == {}
