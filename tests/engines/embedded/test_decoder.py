"""Chunks, padding and compaction."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.engines.embedded.decoder import Slots, chunks, completions, left_padded, packed, uniforms
from retrain.types import Completion, Request, Sampling

pytestmark = pytest.mark.numeric


def test_prompts_are_padded_on_their_left():
    ids, pad = left_padded([[1, 2, 3], [4]], torch.device("cpu"))
    assert ids.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert pad.tolist() == [0, 2]


def test_completions_are_cut_after_the_first_stop_id():
    ids = torch.tensor([[1, 2, 9], [3, 3, 3], [9, 8, 1], [4, 4, 8]])
    logprobs = -torch.arange(12.0).view(4, 3)
    requests = [Request((1,), 2, 3, 0), Request((1,), 2, 3, 1)]
    first, second = completions(ids, logprobs, requests, Sampling(stop_ids=(8, 9)), 5)
    assert first == [
        Completion((1, 2, 9), (0.0, -1.0, -2.0), "stop", 5),
        Completion((3, 3, 3), (-3.0, -4.0, -5.0), "length", 5),
    ]
    assert second == [Completion((9,), (-6.0,), "stop", 5), Completion((4, 4, 8), (-9.0, -10.0, -11.0), "stop", 5)]


@pytest.mark.parametrize(
    ("budget", "expected"), [(10, [[1, 3], [0], [2]]), (100, [[1, 3, 0, 2]]), (1, [[1], [3], [0], [2]])]
)
def test_chunks_go_by_length_and_fit_the_budget(budget, expected):
    # Lengths 6 2 9 5: two prompts padded to 5 take 10.
    requests = [Request((1,) * length, 1, 1, 0) for length in (6, 2, 9, 5)]
    assert list(chunks(requests, budget, lambda prompts, rows, length, most: prompts * length)) == expected


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=20).filter(lambda done: not all(done)))
def test_packing_keeps_the_running_rows_and_moves_few(flags):
    done = torch.tensor(flags)
    running = int((~done).sum())
    rows = packed(done, running)
    assert sorted(rows.tolist()) == (~done).nonzero()[:, 0].tolist()
    assert (rows >= torch.arange(running)).all()
    assert int((rows != torch.arange(running)).sum()) == int(done[:running].sum())


def test_slots_of_kept_rows_move_with_them():
    slots = Slots(torch.tensor([0, 1]), torch.tensor([2, 2]), width=4)
    slots.update(torch.arange(12.0).view(2, 1, 2, 3), -torch.arange(12.0).view(2, 1, 2, 3), 0)
    slots.used = 2
    keys, values = slots.append(torch.arange(100.0, 112.0).view(4, 1, 3), torch.zeros(4, 1, 3), 0)
    before, pads = keys.clone(), slots.visible().clone()
    slots.used = 3
    assert values[3, 0, 0].tolist() == [-6.0, -7.0, -8.0]
    slots.keep(torch.tensor([0, 3]))
    assert torch.equal(slots.keys[0][..., :3], before[[0, 3]])
    assert slots.pad.tolist() == [0, 1]
    assert torch.equal(slots.visible()[..., :3], pads[[0, 3]])
    assert pads.flatten(1).tolist() == [[0, 0, 0]] * 2 + [[-torch.inf, 0, 0]] * 2


def test_a_completion_is_cut_at_the_budget_of_its_request():
    ids, requests = torch.tensor([[1, 2, 9], [3, 9, 3]]), [Request((1,), 1, 1, 0), Request((1,), 1, 2, 1)]
    [short], [stopped] = completions(ids, torch.zeros(2, 3), requests, Sampling(stop_ids=(9,)), 0)
    assert (short.ids, short.finish_reason) == ((1,), "length")
    assert (stopped.ids, stopped.finish_reason) == ((3, 9), "stop")


def test_the_numbers_of_a_request_depend_on_its_stream_alone():
    asked = [Request((1,), 2, 5, stream) for stream in (0, 1, 2)]
    together = uniforms(asked, 3)
    assert together.shape == (5, 6)
    assert torch.equal(uniforms(asked[1:2], 3), together[:, 2:4])
    assert together.unique().numel() == together.numel()
    ragged = uniforms([asked[2], Request((1,), 2, 3, 1)], 3)
    assert torch.equal(ragged[:, :2], together[:, 4:])
    assert torch.equal(ragged[:3, 2:], together[:3, 2:4])
