"""Values of prefixes: shared beginnings, and the credit of the oracle and of VinePPO."""

import math

import pytest
import torch

from retrain.lab.monte_carlo.oracle import TokenValues, oracle
from retrain.lab.monte_carlo.prefixes import credit, prefixes, values_at
from retrain.lab.monte_carlo.vine import SegmentStarts, SegmentValues, vine
from tests.tabular_policy import Tabular

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


def test_values_and_advantages_are_those_of_the_enumerated_tree():
    policy = Tabular()
    batch = policy.batch(torch.arange(27), group_size=27)
    signal = TokenValues(policy.continue_from, seed=1, continuations=60_000)
    values, metrics = signal({}, batch.input_ids, batch.response_mask, batch.group_ids, 0)
    found = oracle(values, batch.rewards, batch.response_mask)
    assert (values[:, 1:] - policy.values[:, :3]).abs().max() < 0.01
    assert (found[:, 1:] - policy.advantages).abs().max() < 0.01
    assert policy.advantages.abs().max() > 0.3
    assert metrics == {"oracle/tokens": 13 * 60_000}


class Letters(list):
    def decode(self, ids, **_):
        return "".join(self[index] for index in ids)


def test_segments_are_lines_or_so_many_tokens():
    ids = torch.tensor([[0, 1, 2, 3, 1, 2], [1, 3, 3, 1, 0, 0]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0]]).bool()
    letters = Letters(["a", "b", "c\n", "\n\n"])
    assert SegmentStarts(letters)(ids, mask).int().tolist() == [[0, 1, 0, 1, 1, 0], [0, 1, 1, 1, 0, 0]]
    assert SegmentStarts(letters, every=2)(ids, mask).int().tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 0, 1, 0, 0]]


def test_two_tokens_share_what_they_changed_together():
    policy = Tabular()
    batch = policy.batch(torch.arange(27), group_size=27)
    starts = SegmentStarts(Letters("abcdefgh"), every=2)(batch.input_ids, batch.response_mask)
    signal = SegmentValues(policy.continue_from, seed=1, continuations=60_000)
    values, _ = signal({}, batch.input_ids, batch.response_mask, batch.group_ids, starts, 0)
    found = vine(values, starts, batch.rewards, batch.response_mask)[:, 1:]
    start, middle, end = policy.values[:, 0], policy.values[:, 2], policy.values[:, 3]
    assert (found - torch.stack([middle - start, middle - start, end - middle], 1)).abs().max() < 0.01
