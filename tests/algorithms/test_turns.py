"""Credit by turns: worked examples, and the gradient by exact enumeration of a game whose length the policy decides."""

from itertools import product
from math import exp

import pytest
import torch

from tests.algorithms.conftest import call

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


@pytest.mark.parametrize("among", ["reached", "all"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_gradient_of_turn_returns_is_that_of_the_expected_reward(among, size):
    found = gradient(lambda batch: call("transform", "turn_returns", batch, among=among), 1.0, size)
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
    found = call("transform", "turn_returns", batch, among="all", gamma=0.5)
    expected = [[2 - 2.5, 2 - 2.0], [2 - 2.5, 4 - 1.0], [3 - 2.0, 0.0]]
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
