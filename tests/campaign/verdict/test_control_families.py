"""Controls in a report card: conditions with a known result, which are tested apart from the others."""

from dataclasses import replace

import pytest

from retrain.campaign.verdict import card_page
from retrain.campaign.verdict.across_tasks import card_of
from retrain.campaign.verdict.results import read_campaign
from tests.campaign.verdict.test_card_page import TASKS, write_tasks


def test_controls_are_families_of_their_own(tmp_path):
    directory = write_tasks(tmp_path, range(6))
    tables = {task: read_campaign(directory, task) for task in TASKS}
    alone = card_of("card", tables, {})
    both = card_of("card", tables, {}, controls=["new"])
    assert {one.size for one in alone.comparisons.values()} == {len(TASKS)}
    assert {place: one.size for place, one in both.comparisons.items()} == dict.fromkeys(both.comparisons, len(TASKS))
    assert both.pooled["new"].holm == alone.pooled["new"].p


@pytest.mark.parametrize(("controls", "sizes"), [((), {6}), (("other",), {3})])
def test_controls_take_no_power_from_the_other_conditions(controls, sizes, tmp_path):
    directory = write_tasks(tmp_path, range(6))
    tables = {}
    for task in TASKS:
        table = read_campaign(directory, task)
        twins = {("other", cell.seed): replace(cell, condition="other") for cell in table.of("new")}
        cells = {**table.cells, **twins}
        tables[task] = replace(table, cells=cells, conditions=(*table.conditions, "other"))
    card = card_of("card", tables, {}, controls=controls)
    assert list(card.pooled) == ["new", "other"]
    assert {one.size for one in card.comparisons.values()} == sizes
    assert {one.size for one in card.pooled.values()} == {1 if controls else 2}
    note = card_page._contents(card, ())["note"]
    assert ("the 3 comparisons of controls on single tasks" in note) is bool(controls)
    assert ("There are 4 separate tests or families" in note) is bool(controls)
