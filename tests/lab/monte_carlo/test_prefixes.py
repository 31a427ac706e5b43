from __future__ import annotations

import math

import pytest
import torch

from retrain.lab.monte_carlo.prefixes import credit, prefixes, values_at

pytestmark = pytest.mark.numeric

MASK = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 0, 0], [0, 1, 1, 0, 0]]).bool()
IDS = torch.tensor([[7, 1, 2, 3, 4], [7, 1, 5, 0, 0], [7, 1, 5, 0, 0]])


def test_rows_of_a_group_share_their_beginnings_and_groups_do_not():
    found, numbers = prefixes(IDS, MASK, torch.tensor([0, 0, 1]), MASK)
    assert [(one.group, one.ids, one.sampled) for one in found] == [
        *((0, (7,), 0), (0, (7, 1), 1), (0, (7, 1, 2), 2), (0, (7, 1, 2, 3), 3)),
        *((1, (7,), 0), (1, (7, 1), 1)),
    ]
    assert numbers.tolist() == [0, 1, 2, 3, 0, 1, 4, 5]


def test_a_value_is_the_mean_of_what_could_be_scored():
    starts = torch.tensor([[False, True, True], [False, True, False]])
    rewards = torch.tensor([[1.0, 0.0], [1.0, math.nan], [math.nan, math.nan]])
    values = values_at(starts, rewards, torch.tensor([1, 0, 2]))
    assert values.tolist() == [[0, 1, 0.5], [0, 0, 0]]


def test_tokens_get_what_they_changed():
    values = torch.tensor([[0, 0.5, 0.75, 0.25, 1], [0, 0.5, 0, 0, 0], [0, 0.25, 1, 0, 0]])
    found = credit(values, MASK, torch.tensor([1.0, 0.0, 1.0]), MASK)
    assert found.tolist() == [[0, 0.25, -0.5, 0.75, 0], [0, -0.5, 0, 0, 0], [0, 0.75, 0, 0, 0]]


def test_tokens_of_a_segment_get_what_the_segment_changed():
    values = torch.tensor([[0, 0.5, 9, 0.25, 9], [0, 0.5, 9, 0, 0], [0, 0.25, 9, 0, 0]])
    starts = torch.tensor([[0, 1, 0, 1, 0], [0, 1, 0, 0, 0], [0, 1, 0, 0, 0]]).bool()
    found = credit(values, starts, torch.tensor([1.0, 0.0, 1.0]), MASK)
    assert found.tolist() == [[0, -0.25, -0.25, 0.75, 0.75], [0, -0.5, -0.5, 0, 0], [0, 0.75, 0.75, 0, 0]]
