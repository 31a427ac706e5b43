import pytest
import torch

from retrain.registry import find

pytestmark = pytest.mark.numeric


def test_groups_are_dropped_by_advantage_and_counted_by_reason():
    advantages = torch.tensor([[0.0, 0.0], [0.0, 0.5], [0, 0], [0, 0], [0, 0], [0, 0], [0, 0], [0, 0], [0, 0]])
    correct = torch.tensor([True, True, True, True, True, False, False, True, False])
    group_ids = torch.tensor([7, 7, 3, 3, 3, -2, -2, 5, 5])
    keep, metrics = find("filter", "uninformative").bind()(advantages, correct, group_ids)
    assert keep.tolist() == [True, True, False, False, False, False, False, False, False]
    assert metrics == {"skipped/all_correct": 1.0, "skipped/all_wrong": 1.0, "skipped/other": 1.0}


def test_none_keeps_everything():
    assert find("filter", "none").bind()(torch.tensor([0, 4])).tolist() == [True, True]
