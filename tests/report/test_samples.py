"""Which completions are shown."""

from retrain.report.samples import best_and_worst
from tests.report.test_run_page import rollout


def picked(rows):
    return [rows[i] for i in best_and_worst(rows)]


def test_best_second_and_worst_of_a_group_that_differs():
    rows = [rollout(0.0, group=0), rollout(0.0, "2+2=5", group=0)]
    assert picked(rows) == rows
    assert picked([*rows, rows[0]]) == rows  # equal completions are shown once
    mixed = [rollout(reward, group=1) for reward in (0.0, 1.0, 0.5, None, 0.25)]
    assert [row["reward"] for row in picked(rows + mixed)] == [1.0, 0.5, 0.0]
    assert picked([]) == []
    unscored = [rollout(None, group=0)]
    assert picked(unscored) == unscored
    assert picked([*unscored, rollout(1.0, group=0)]) == [rollout(1.0, group=0)]
