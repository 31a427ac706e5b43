"""Rewards written for TRL and verl run unchanged, a batch at a time or as coroutines."""

from pathlib import Path

import pytest

from retrain.errors import ComponentError
from retrain.registry import find
from retrain.rewards.pool import RewardPool
from retrain.rewards.signatures import form_of

HERE = Path(__file__).parent / "brought"


def pool(*names, **settings):
    entries = [(find("reward", name, [HERE]).bind({}), 1.0) if isinstance(name, str) else name for name in names]
    return RewardPool(entries, search_paths=[HERE], **{"workers": 0, "max_failed": 1.0} | settings)


def item(completion, answer="4", prompt="2+2?", **extra):
    problem = {"id": "p", "prompt": prompt, "answer": answer, "extra": extra}
    return {"completion": completion, "answer": answer, "problem": problem, "completion_ids": (7, 8, 9)}


@pytest.mark.parametrize(
    ("name", "items", "values"),
    [
        ("trl_rewards.reward_len", [item("ab"), item("abc")], [2.0, 3.0]),
        ("trl_rewards.by_ids", [item("x")], [3.0]),
        ("trl_rewards.boxed", [item(r"\boxed{4}", ground_truth="4"), item("4", ground_truth="4")], [1.0, 0.0]),
        (
            "trl_rewards.format_reward_func",
            [item("<think>a</think><answer>4</answer>", prompt=[{"role": "user", "content": "2+2?"}])],
            [1.0],
        ),
        ("trl_rewards.async_reward", [item("ab", prompt="abc")], [5.0]),
        ("verl_rewards.compute_score", [item("#### 1,000", "1000"), item("1000", "1000")], [1.0, 0.0]),
        ("verl_rewards.compute_score", [item("#### 5", "ignored", reward_model={"ground_truth": "5"})], [1.0]),
        (
            "verl_rewards.compute_score_batched",
            [item("4", data_source="openai/gsm8k"), item("4", data_source="other")],
            [1.0, 0.0],
        ),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_reward_written_for_another_trainer_runs_unchanged(name, items, values, workers):
    with pool(name, workers=workers) as scorer:
        assert [score.value for score in scorer.score(items)] == values


def test_token_ids_alone_are_those_of_one_completion():
    """TRL's form needs **kwargs, because TRL passes prompts and completions to every reward."""
    with pool("ids_alone.score") as scorer:
        assert [score.value for score in scorer.score([item("a"), item("b")])] == [3.0, 3.0]
    assert form_of(find("reward", "trl_rewards.by_ids", [HERE])).name == "trl"


def test_none_leaves_a_completion_to_the_other_rewards():
    items = [item("2+2?", task="math"), item("2+2?", task="code")]
    with pool("trl_rewards.math_reward_func", "trl_rewards.reward_len") as scorer:
        math, code = scorer.score(items)
    assert math.parts == {"trl_rewards.math_reward_func": 1.0, "trl_rewards.reward_len": 4.0}
    assert (code.parts["trl_rewards.math_reward_func"], code.value) == (None, 4.0)


def test_the_numbers_of_a_dict_become_parts():
    with pool("verl_rewards.compute_score_dict", workers=1) as scorer:
        (score,) = scorer.score([item("#### 4", extra_info={"index": 3})])
    name = "verl_rewards.compute_score_dict"
    assert score.parts == {name: 1.0, f"{name}/acc": 1.0, f"{name}/split": 3.5}
    assert (score.value, score.correct) == (1.0, True)


@pytest.mark.parametrize(
    ("name", "status", "detail"),
    [
        ("trl_rewards.one_too_few", "invalid", "expected a list of 2, one for each completion"),
        ("trl_rewards.batch_raises", "error", "raised KeyError: 'column'"),
        ("trl_rewards.boxed", "error", "it reads ground_truth, but the rows of the data only have answer"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_fails_fails_as_a_whole(name, status, detail, workers):
    with pool(name, workers=workers) as scorer:
        for score in scorer.score([item("a"), item("b")]):
            assert (score.value, score.status) == (None, status)
            assert detail in score.detail


@pytest.mark.slow
def test_a_coroutine_that_hangs_or_raises_costs_its_own_completion():
    entry = (find("reward", "later.slow", [HERE]).bind({}), 1.0, 2.0)
    with pool(entry, "trl_rewards.reward_len", workers=1) as scorer:
        hang, wrong, right = scorer.score([item("hang"), item("raise"), item("4")])
    assert (hang.status, hang.detail) == ("timeout", "later.slow took longer than 2 s")
    assert hang.parts["trl_rewards.reward_len"] == 4.0
    assert (wrong.status, right.value) == ("error", 2.0)


def test_concurrency_bounds_how_many_coroutines_run_at_once():
    entry = (find("reward", "later.crowd", [HERE]).bind({}), 1.0, None, 3)
    with pool(entry) as scorer:
        assert max(score.value for score in scorer.score([item("x")] * 8)) == 3.0


@pytest.mark.slow
def test_a_coroutine_that_never_waits_is_killed(monkeypatch):
    monkeypatch.setattr("retrain.rewards.pool._GRACE_S", 0.5)
    entry = (find("reward", "later.blocks", [HERE]).bind({}), 1.0, 0.5)
    with pool(entry, workers=1) as scorer:
        assert [score.status for score in scorer.score([item("x")] * 2)] == ["timeout"] * 2


def test_what_verl_does_not_give_is_refused_with_its_names():
    with pytest.raises(ComponentError, match="reads teacher") as told:
        pool("verl_rewards.wants_more")
    assert told.value.fix == "verl gives data_source, solution_str, ground_truth, extra_info"
