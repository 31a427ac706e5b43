"""Which rows train: failures leave a group, and a group without a rival goes."""

from dataclasses import replace

from retrain.run.collect import rollout_metrics, valid_rows
from retrain.types import Rollout


def rollout(group: int, reward: float | None, tokens: int = 2) -> Rollout:
    ids = tuple(range(tokens))
    return Rollout("p", "1+1?", "2", (1,), ids, (-0.5,) * tokens, "so 2", "stop", 0, group, reward, {}, reward == 1.0)


def test_a_group_that_failures_leave_with_one_row_is_dropped():
    rollouts = [rollout(0, 1.0), rollout(0, None), rollout(1, 0.0), rollout(1, 1.0), rollout(1, None)]
    assert valid_rows(rollouts) == [2, 3]


def test_groups_of_one_stay_when_they_were_sampled_as_one():
    assert valid_rows([rollout(0, 1.0), rollout(1, None), rollout(2, 0.0)]) == [0, 2]


def test_means_are_over_scored_completions_and_lengths_over_all():
    rollouts = [rollout(0, 1.0, 3), rollout(0, 0.0, 1), replace(rollout(0, None, 8), finish_reason="length")]
    metrics = rollout_metrics(rollouts)
    assert metrics["reward/mean"] == metrics["reward/accuracy"] == metrics["reward/std"] == 0.5
    assert (metrics["reward/failed"], metrics["tokens/response"], metrics["rollout/truncated"]) == (1, 4, 1 / 3)
