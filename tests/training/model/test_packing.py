"""Packing and micro-batching, by hand and by property."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from retrain.training.model.forward import Packing, micro_batches


def test_worked_example():
    ids = torch.tensor([[5, 6, 7], [8, 0, 0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    packing = Packing.of(ids, mask, torch.zeros_like(mask))
    assert packing.position_ids.tolist() == [[0, 1, 2, 0]]
    assert packing.gather.tolist() == [[0, 1, 2], [3, 0, 0]]
    assert packing.scatter.tolist() == [0, 1, 2, 3]


def test_a_prompt_shared_by_rows_stands_in_the_list_once():
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0], [5, 6, 6, 4]])
    mask = ids > 0
    scored = torch.tensor([[False, False, True, True], [False, False, True, False], [False, False, False, True]])
    packing = Packing.of(ids, mask, scored)
    assert ids[packing.kept].tolist() == [5, 6, 7, 8, 9, 5, 6, 6, 4]  # the third prompt is 5 6 6, another one
    assert packing.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 1, 2, 3]]
    assert packing.gather.tolist() == [[0, 1, 2, 3], [0, 1, 4, 0], [5, 6, 7, 8]]
    assert packing.scatter.tolist() == [0, 1, 2, 3, 6, 8, 9, 10, 11]


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
