from __future__ import annotations

import pytest
import torch

from retrain.lab.monte_carlo.vine import SegmentStarts, SegmentValues, vine
from tests.tabular_policy import Tabular

pytestmark = pytest.mark.numeric


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
