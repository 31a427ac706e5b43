"""Credit by turns: worked examples, and the gradient by exact enumeration of a game whose length the policy decides."""

from itertools import product
from math import exp

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.conftest import call
from tests.reference.prime import process_rloo

pytestmark = pytest.mark.numeric

GO, RIGHT = 1 / (1 + exp(-0.4)), 1 / (1 + exp(0.3))
OUTCOMES = [  # probability; reward of each turn; its gradient of log p by the logits of (go on, right)
    (1 - GO, [0.3], [(-GO, 0.0)]),
    (GO * RIGHT, [0.5, 1.0], [(1 - GO, 0.0), (0.0, 1 - RIGHT)]),
    (GO * (1 - RIGHT), [0.5, 0.0], [(1 - GO, 0.0), (0.0, -RIGHT)]),
]
"""Stop for 0.3; or go on for 0.5, and then be right for 1 or wrong for 0."""


def columns(rewards, group_ids=None):
    """One token for each turn."""
    width = max(map(len, rewards))
    mask = torch.tensor([[turn < len(row) for turn in range(width)] for row in rewards])
    return {
        "turn_rewards": torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rewards], dtype=torch.float64),
        "turn_ids": torch.arange(width) * mask,
        "response_mask": mask,
        "group_ids": torch.tensor(group_ids or [0] * len(rewards)),
    }


def gradient(credit, scale, size=3):
    """E[mean over the group of A * d log p], over every group of `size` episodes."""
    total = torch.zeros(2, dtype=torch.float64)
    for group in product(OUTCOMES, repeat=size):
        probability = torch.tensor([p for p, _, _ in group]).double().prod()
        advantages = credit(columns([rewards for _, rewards, _ in group]))
        for row, (_, _, scores) in enumerate(group):
            for turn, score in enumerate(scores):
                total += probability * advantages[row, turn] * torch.tensor(score, dtype=torch.float64) / size
    return scale * total


def true_gradient():
    each = [p * sum(rewards) * torch.tensor(scores).double().sum(0) for p, rewards, scores in OUTCOMES]
    return torch.stack(each).sum(0)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_gradient_of_turn_returns_is_that_of_the_expected_reward(size):
    found = gradient(lambda batch: call("transform", "turn_returns", batch), 1.0, size)
    torch.testing.assert_close(found, true_gradient(), rtol=0, atol=1e-6)


def test_the_gradient_of_turn_grpo_is_another():
    found = gradient(lambda batch: call("transform", "turn_grpo", batch), 1.5)
    assert [round(value, 4) for value in true_gradient().tolist()] == [0.1503, 0.1464]
    assert [round(value, 4) for value in found.tolist()] == [0.0481, 0.1052]


def test_a_worked_example():
    batch = columns([[1.0, 2.0], [0.0, 4.0], [3.0]])
    found = call("transform", "turn_returns", batch)
    expected = [[3 - 3.5, 2 - 4.0], [4 - 3.0, 4 - 2.0], [3 - 3.5, 0.0]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    found = call("transform", "turn_returns", batch, gamma=0.5)
    expected = [[2 - 2.5, 2 - 4.0], [2 - 2.5, 4 - 2.0], [3 - 2.0, 0.0]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    found = call("transform", "turn_grpo", batch)
    assert found[0].tolist() == pytest.approx([1 - 4 / 3 + 2 - 3, 2 - 3])


def test_with_a_reward_at_the_end_alone_it_is_rloo():
    batch = columns([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]], [0, 0, 1, 1])
    rloo = call("advantage", "rloo", {"rewards": batch["turn_rewards"].sum(-1), "group_ids": batch["group_ids"]})
    assert torch.equal(call("transform", "turn_returns", batch), rloo[:, None].expand(4, 2))


def test_equal_episodes_give_exactly_nothing_and_one_alone_its_return():
    batch = columns([[0.1, 0.7]] * 3 + [[0.1, 0.7]], [0, 0, 0, 1])
    found = call("transform", "turn_returns", batch)
    assert not found[:3].any()
    assert found[3].tolist() == pytest.approx([0.8, 0.7])


def test_the_credit_of_a_turn_is_on_all_its_tokens_and_nowhere_else():
    batch = {
        "turn_rewards": torch.tensor([[0, 0, 1.0, 0, 2.0], [0, 0, 0, 0, 0.0]]),
        "turn_ids": torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]),
        "response_mask": torch.tensor([[0, 1, 1, 0, 1], [0, 1, 0, 0, 0]]).bool(),
        "group_ids": torch.zeros(2, dtype=torch.long),
    }
    assert call("transform", "turn_returns", batch).tolist() == [[0, 3, 3, 0, 2], [0, -3, 0, 0, 0]]


TOKENS = st.tuples(st.floats(0, 2), st.booleans())
EPISODES = st.lists(
    st.tuples(st.floats(-2, 2), st.lists(st.lists(TOKENS, min_size=1, max_size=4), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
)
"""(advantage, turns), a turn being the (uncertainty, planning) of its tokens."""


def laid_out(episodes, gap=2):
    """Columns of episodes whose turns have `gap` tokens of an observation in front of each; NaN stands there."""
    width = max(sum(len(turn) + gap for turn in turns) for _, turns in episodes)
    shape = (len(episodes), width)
    found = {
        "uncertainty": torch.full(shape, float("nan"), dtype=torch.float64),
        "planning_mask": torch.ones(shape, dtype=torch.bool),
        "response_mask": torch.zeros(shape, dtype=torch.bool),
        "turn_ids": torch.zeros(shape, dtype=torch.long),
        "group_ids": torch.zeros(len(episodes), dtype=torch.long),
    }
    for row, (_, turns) in enumerate(episodes):
        at = 0
        for number, turn in enumerate(turns):
            for place, (uncertainty, planning) in enumerate(turn, at + gap):
                found["uncertainty"][row, place], found["planning_mask"][row, place] = uncertainty, planning
                found["response_mask"][row, place], found["turn_ids"][row, place] = True, number
            at += gap + len(turn)
    advantages = torch.tensor([advantage for advantage, _ in episodes], dtype=torch.float64)
    found["advantages"] = advantages[:, None] * found["response_mask"]
    found["entropy"], found["lengths"] = found["uncertainty"], found["response_mask"].sum(-1)
    return found


def sampled(values, columns):
    return values[columns["response_mask"]].tolist()


@settings(deadline=None, max_examples=60)
@given(EPISODES, st.sampled_from(["gtpo", "sepa"]))
def test_per_turn_is_what_every_turn_would_get_as_an_episode(episodes, name):
    params = {"beta": 0.7} if name == "gtpo" else {}
    whole = laid_out(episodes)
    apart = laid_out([(advantage, [turn]) for advantage, turns in episodes for turn in turns])
    found = call("transform", name, {**whole, "sepa_lambda": 0.6}, per="turn", **params)
    alone = call("transform", name, {**apart, "sepa_lambda": 0.6}, **params)
    assert sampled(found, whole) == pytest.approx(sampled(alone, apart), abs=1e-12)


def test_the_spread_is_taken_over_the_episode_or_over_each_turn():
    columns = laid_out([(1.0, [[(1.0, False), (3.0, False)], [(2.0, False)]])])
    assert sampled(call("transform", "gtpo", columns, beta=0.5), columns) == pytest.approx([0.75, 1.25, 1.0])
    columns = laid_out([(1.0, [[(1.0, False), (3.0, False)], [(8.0, False)]])])
    found = call("transform", "gtpo", columns, beta=0.5, per="turn")
    assert sampled(found, columns) == pytest.approx([0.75, 1.25, 1.0])
    found = call("transform", "sepa", {**columns, "sepa_lambda": 1.0})
    assert sampled(found, columns) == pytest.approx([4.0] * 3)
    found = call("transform", "sepa", {**columns, "sepa_lambda": 1.0}, per="turn")
    assert sampled(found, columns) == pytest.approx([2.0, 2.0, 8.0])


def test_hicra_by_entropy_ranks_the_tokens_of_each_turn():
    episodes = [(1.0, [[(0.1, False), (0.2, False)], [(0.8, False), (0.9, False)]]), (-1.0, [[(1.0, False)]])]
    columns = laid_out(episodes)
    columns["advantages"][0, 2:4] *= -1  # the first turn of the longer episode fails, the second succeeds
    columns["advantages"][0] *= torch.tensor([1, 1, 1, 1, 1, 1, 3, 3])
    found = call("transform", "hicra_entropy", columns, entropy_topk=0.5, alpha=0.5)
    assert sampled(found, columns) == pytest.approx([-1.0, -1.0, 4.5, 4.5, -1.0])
    found = call("transform", "hicra_entropy", columns, entropy_topk=0.5, alpha=0.5, per="turn")
    assert sampled(found, columns) == pytest.approx([-1.0, -1.0, 3.0, 4.5, -1.0])


def test_brevity_is_counted_in_tokens_or_in_turns():
    few_long, many_short = (0.0, [[(0.0, False)] * 4] * 2), (0.0, [[(0.0, False)]] * 3)
    columns = laid_out([few_long, many_short]) | {"correct": torch.tensor([True, True])}
    for name in ("dca", "dca_rloo"):
        by_tokens, by_turns = (call("advantage", name, columns, length=unit) for unit in ("tokens", "turns"))
        assert by_tokens[0] < 0 < by_tokens[1]
        assert by_turns.tolist() == pytest.approx((-by_tokens).tolist())


@settings(deadline=None, max_examples=60)
@given(EPISODES, st.sampled_from([1.0, 0.5]), st.sampled_from(["batch", "none"]))
def test_process_rewards_at_turn_ends_are_those_of_a_row_with_a_token_for_each_turn(episodes, gamma, norm):
    columns = laid_out(episodes) | {"step": 0}
    columns["process_rewards"] = columns["uncertainty"]
    found = call("transform", "process_rloo", columns, gamma=gamma, norm=norm, process_at="turn")
    sums = [[sum(value for value, _ in turn) for turn in turns] for _, turns in episodes]
    expected = process_rloo([a for a, _ in episodes], sums, [0] * len(episodes), gamma, norm)
    spread = [
        value
        for values, (_, turns) in zip(expected, episodes, strict=True)
        for value, turn in zip(values, turns, strict=True)
        for _ in turn
    ]
    assert sampled(found, columns) == pytest.approx(spread, abs=1e-9)
    assert not found[~columns["response_mask"]].any()


def test_an_observation_is_not_the_end_of_an_episode_for_process_rewards():
    columns = laid_out([(0.0, [[(1.0, False)], [(2.0, False)]]), (0.0, [[(0.0, False)]])]) | {"step": 0}
    columns["process_rewards"] = columns["uncertainty"]
    for place in ("token", "turn"):
        found = call("transform", "process_rloo", columns, norm="none", process_at=place)
        assert sampled(found, columns) == pytest.approx([3.0, 2.0, -1.5])
