"""Rollouts as episodes, their rows, and batches made of them."""

import dataclasses
import json
import math

import pytest
import torch

from retrain.training.layout import Layout
from retrain.types import ExpertRow, Rollout, Turn

pytestmark = pytest.mark.numeric

LAYOUT = Layout(pad_id=0, device=torch.device("cpu"), max_tokens=8)


def episode(turns, ids=(7, 8, 9, 2), group=0):
    logprobs = tuple(-0.5 if any(t.start <= i < t.end for t in turns) else 0.0 for i in range(len(ids)))
    return Rollout("p", "1+1?", "2", (5, 6), ids, logprobs, "so 2", turns, group, 1.0, {"exact": 1.0}, True)


ONE = episode((Turn(0, 4, "stop", 3),))
TWO = episode((Turn(0, 1, "length", 2), Turn(3, 4, "stop", 3)))


def test_what_the_policy_did_not_sample_is_not_counted_and_not_trained_on():
    assert (TWO.length, TWO.finish_reason, TWO.weights_version) == (2, "stop", 2)
    batch = LAYOUT.batch([TWO, ONE], 0)
    assert batch.response_mask.int().tolist() == [[0, 0, 1, 0, 0, 1], [0, 0, 1, 1, 1, 1]]
    assert batch.attention_mask.all()
    assert batch.lengths.tolist() == [2, 4]
    assert batch.sampler_logprobs.tolist() == [[0, 0, -0.5, 0, 0, -0.5], [0, 0, -0.5, -0.5, -0.5, -0.5]]


@pytest.mark.parametrize("rollout", [ONE, TWO])
def test_a_row_of_json_is_the_rollout_again(rollout):
    assert Rollout.of_row(json.loads(json.dumps(rollout.row()))) == rollout
    assert Rollout.of_row(rollout.row() | {"tokens": ["a"], "advantages": [0.0]}) == rollout


def test_a_truncated_rollout_is_masked_if_that_is_asked_and_keeps_its_length():
    cut = episode((Turn(0, 4, "length", 3),))
    batch = Layout(0, torch.device("cpu"), 8, mask_truncated=True).batch([cut, ONE], 0)
    assert batch.response_mask.any(-1).tolist() == [False, True]
    assert batch.lengths.tolist() == [4, 4]


def test_expert_rows_by_hand():
    batch = LAYOUT.batch([], 0, [ExpertRow((7, 8, 9, 2), ((2, 4),)), ExpertRow((7, 2), ((1, 2),))])
    assert batch.input_ids.tolist() == [[7, 8, 9, 2], [7, 2, 0, 0]]
    assert batch.attention_mask.int().tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.response_mask.int().tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]
    assert batch.lengths.tolist() == [2, 1]
    assert batch.is_expert.all()
    assert not batch.advantages.any()


def test_reward_parts_are_columns_of_rewards_not_of_tokens():
    """With as many rewards as tokens, rows are still picked whole; experts and silent rewards are NaN."""
    named = dataclasses.replace(LAYOUT, rewards=(("exact", 1.0), ("short", 0.5), ("polite", 0.1)))
    scored = dataclasses.replace(ONE, parts={"exact": 1.0, "short": 0.25, "polite": None})
    width = len(ONE.prompt_ids) + len(ONE.completion_ids)
    batch = named.batch([scored, dataclasses.replace(scored, parts={"exact": 0.0})], 0)
    assert batch.reward_weights == (1.0, 0.5, 0.1)
    parts = torch.tensor([[1.0, 0.25, math.nan], [0.0, math.nan, math.nan]])
    torch.testing.assert_close(batch.reward_parts, parts, equal_nan=True)
    picked = batch.rows(torch.tensor([1]))
    torch.testing.assert_close(picked.reward_parts, parts[1:], equal_nan=True)
    assert picked.input_ids.shape[1] == width
    plain = LAYOUT.batch([ONE], 0)
    assert plain.reward_parts.tolist() == [[ONE.reward]]
    assert plain.reward_weights == (1.0,)


def test_turns_in_one_state_of_a_group_have_one_anchor():
    first = episode((Turn(0, 1, "stop", 0, state="a"), Turn(2, 4, "stop", 0, state="b")))
    second = episode((Turn(0, 1, "stop", 0, state="b"), Turn(3, 4, "stop", 0)))
    other = episode((Turn(0, 4, "stop", 0, state="a"),), group=1)
    anchors = LAYOUT.batch([first, second, other], 0, [ExpertRow((7, 8), ((1, 2),))]).anchor_ids.tolist()
    assert anchors == [[-1, -1, 0, -1, 1, 1], [-1, -1, 1, -1, -1, -1], [-1, -1, 2, 2, 2, 2], [-1] * 6]


def test_the_greedy_reward_of_a_prompt_stands_on_its_rows():
    known = dataclasses.replace(ONE, greedy=0.5)
    greedy = LAYOUT.batch([known, ONE], 0, [ExpertRow((7, 8), ((1, 2),))]).greedy_rewards
    torch.testing.assert_close(greedy, torch.tensor([0.5, torch.nan, torch.nan]), equal_nan=True)
