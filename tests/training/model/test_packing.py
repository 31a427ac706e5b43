"""Packing and micro-batching, by hand and by property."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from retrain.training.model.forward import micro_batches
from retrain.training.model.packing import Packing
from retrain.training.policy import TorchPolicy
from retrain.training.settings import PolicySettings
from tests.training.small_models import make_batch, make_model, make_objective

pytestmark = pytest.mark.numeric


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives inside this block."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        sizes = [one.numel() for one in tree_leaves(found) if isinstance(one, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_on_a_long_row_holds_no_table_of_its_length_squared(dtype):
    """Four heads share two of keys. Where a model is not packed, the mask of rows of two lengths is such a table."""
    length = 1024
    ids = torch.arange(2 * length).view(2, length) % 31 + 1
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, length // 2 :] = False
    scored = mask & (torch.arange(length) > 0)
    batch = make_batch(rows=2).replace(
        input_ids=ids * mask,
        attention_mask=mask,
        response_mask=scored,
        sampler_logprobs=-3.0 * scored,
        advantages=1.0 * scored,
        lengths=scored.sum(-1),
    )
    policy, found = TorchPolicy(make_model(), PolicySettings(dtype=dtype)), []
    for policy.forward.packed_limit in (float("inf"), 0.0):
        with Largest() as largest:
            policy.update(batch, make_objective())
        found.append(largest.elements)
    assert found[0] <= 256 * length < length**2 <= found[1]


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
    packing = Packing.of(ids, mask, scored, ragged=True)
    assert ids[packing.kept].tolist() == [5, 6, 7, 8, 9, 5, 6, 6, 4]  # the third prompt is 5 6 6, another one
    assert packing.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 1, 2, 3]]
    assert packing.gather.tolist() == [[0, 1, 2, 3], [0, 1, 4, 0], [5, 6, 7, 8]]
    assert packing.scatter.tolist() == [0, 1, 2, 3, 6, 8, 9, 10, 11]
    assert packing.bounds is not None
    queries, keys, cells = packing.bounds
    assert queries.tolist() == [0, 4, 5, 9]  # the second row asks for its last token only
    assert keys.tolist() == [0, 4, 7, 11]
    assert cells.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6, 7, 8]


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
