"""Packing and micro-batching, by hand and by property."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from retrain.training.packing import Packing, micro_batches


def test_worked_example():
    packing = Packing.of(torch.tensor([[True, True, True], [True, False, False]]))
    assert packing.position_ids.tolist() == [[0, 1, 2, 0]]
    assert packing.gather.tolist() == [[0, 1, 2], [3, 0, 0]]
    assert packing.scatter.tolist() == [0, 1, 2, 3]


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=20), budget=st.integers(1, 60))
def test_every_row_once_within_the_budget_longest_first(lengths, budget):
    parts = [part.tolist() for part in micro_batches(lengths, range(len(lengths)), budget)]
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    sizes = [lengths[row] for part in parts for row in part]
    assert sizes == sorted(lengths, reverse=True)
    assert all(len(part) == 1 or len(part) * lengths[part[0]] <= budget for part in parts)


def test_only_the_rows_asked_for():
    assert [part.tolist() for part in micro_batches([3, 9, 5], [0, 2], 100)] == [[2, 0]]
    assert micro_batches([3], [], 100) == []
