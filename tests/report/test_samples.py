"""Which completions are shown."""

from retrain.report.samples import best_and_worst, completion, conversation, reward_weights
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


def test_an_episode_is_shown_as_a_conversation():
    turns = [{"start": 0, "end": 2, "reward": 0.25}, {"start": 5, "end": 6, "reward": 0.0}]
    found = conversation({"completion_ids": [1] * 6, "turns": turns, "ended": "done"})
    assert found.observed == [False, False, True, True, True, False]
    assert found.badges == {1: "1: +0.25", 5: "2"}
    assert (found.tokens, found.summary) == (3, "2 turns, ended: done")
    alone = conversation({"completion_ids": [1] * 6, "turns": turns[:1]})
    assert (alone.observed, alone.badges, alone.tokens, alone.summary) == ((), {}, 6, "")


def test_the_parts_of_a_reward_add_up_with_their_weights():
    config = {"rewards": [{"name": "a.right", "weight": 1.0}, {"name": "a.short", "weight": 0.1}]}
    weights = reward_weights(config | {"rewards": [*config["rewards"], {"name": "a.short", "weight": 0.0}]})
    assert weights == {"a.right": 1.0, "a.short": 0.1, "a.short_2": 0.0}
    parts = {"a.right": 0.0, "a.short": 0.77, "a.short/words": 7.0, "turns": 0.5, "a.short_2": None}
    head = completion(rollout(0.577) | {"parts": parts}, weights)["head"]
    assert head.startswith("reward 0.577 = 1 x a.right 0 + 0.1 x a.short 0.77 + 1 x turns 0.5, a.short/words 7")
    assert completion(rollout(1.0) | {"parts": {"a.right": 1.0}}, weights)["head"].startswith("reward 1.000, ")
