"""Rewards that see all completions of a prompt at once."""

from pathlib import Path

import pytest

from retrain.errors import ComponentError
from retrain.registry import find
from retrain.rewards.pool import RewardPool

HERE = Path(__file__).parent


def pool(*names, **settings):
    rewards = [(find("reward", f"comparing.{name}", [HERE]).bind({}), 1.0) for name in names]
    return RewardPool(rewards, search_paths=[HERE], **{"workers": 0, "max_failed": 1.0} | settings)


def items(*texts, **fields):
    """A completion of each `GROUP:TEXT`; without a number it belongs to no group."""
    problem = {"id": "p", "prompt": "why?", "answer": "a", "extra": {}}
    pairs = [text.rpartition(":")[::2] for text in texts]
    groups = [{"group": int(group)} if group else {} for group, _ in pairs]
    return [
        {"completion": text, "answer": "a", "problem": problem} | group
        for (_, text), group in zip(pairs, groups, strict=True)
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_group_is_compared_within_itself_wherever_its_completions_stand(workers):
    with pool("share_of_shorter", "Counting", "longest", workers=workers) as scorer:
        scores = scorer.score(items("1:aa", "2:bbbb", "1:a", "2:b", "1:aaa", "c"))
    parts = [(one.parts["comparing.share_of_shorter"], one.parts["comparing.Counting"]) for one in scores]
    assert parts == [(0.5, 3.0), (0.0, 2.0), (1.0, 3.0), (1.0, 2.0), (0.0, 3.0), (0.0, 1.0)]
    assert [one.parts["comparing.longest"] for one in scores] == [0.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert [one.parts["comparing.longest/letters"] for one in scores] == [2.0, 4.0, 1.0, 1.0, 3.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_group_that_fails_has_no_rewards_and_others_keep_theirs(workers):
    texts = ("1:a", "2:b", "1:bad", "3:slow", "2:bb", "3:d")
    with pool("longest", workers=workers, timeout_s=2.0) as scorer:
        scores = scorer.score(items(*texts))
    assert [one.status for one in scores] == ["error", "ok", "error", "timeout", "ok", "timeout"]
    assert [one.value for one in scores] == [None, 0.0, None, None, 1.0, None]
    assert scores[0].detail == "comparing.longest raised ValueError: a bad completion"


def test_a_group_that_kills_its_worker_costs_that_group():
    with pool("crashes", workers=1) as scorer:
        scores = scorer.score(items("1:a", "2:bad", "2:b", "3:c", "3:d"))
    assert [one.status for one in scores] == ["ok", "crashed", "crashed", "ok", "ok"]


@pytest.mark.parametrize(("name", "workers"), [("too_few", 1), ("too_few_later", 0), ("too_few_later", 1)])
def test_a_list_of_another_length_is_invalid_for_the_whole_group(name, workers):
    with pool(name, workers=workers) as scorer:
        scores = scorer.score(items("1:a", "1:b", "2:c"))
    assert [one.status for one in scores] == ["invalid", "invalid", "ok"]
    assert "expected a list of 2" in scores[0].detail


def test_a_group_stands_alone():
    with pytest.raises(ComponentError, match=r"reads teacher.*read them from the dicts in group"):
        pool("more")
