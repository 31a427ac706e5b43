"""Lists of different lengths become one batch, and what is not known stays empty."""

import pytest
import torch

from retrain.algorithms.graph.responses import padded, response_batch

pytestmark = pytest.mark.numeric


def test_responses_are_padded_and_prompts_are_left_out():
    batch = response_batch([[-1.0, -2.0], [-3.0]], [1, 0.5], [True, False], [0, 4], torch.float64)
    assert batch.sampler_logprobs.tolist() == [[-1, -2], [-3, 0]]
    assert batch.response_mask.tolist() == batch.attention_mask.tolist() == [[True, True], [True, False]]
    assert (batch.rewards.tolist(), batch.correct.tolist()) == ([1, 0.5], [True, False])
    assert (batch.lengths.tolist(), batch.group_ids.tolist()) == ([2, 1], [0, 4])
    assert batch.sampler_logprobs.dtype == batch.rewards.dtype == batch.advantages.dtype == torch.float64
    assert not batch.is_expert.any()
    assert padded([[7, 8], [9]], batch.response_mask, torch.long).tolist() == [[7, 8], [9, 0]]


def test_a_response_without_tokens_is_a_row_of_padding():
    batch = response_batch([[]], [1], [True], [0], torch.float32)
    assert batch.response_mask.tolist() == [[False]]
    assert batch.lengths.tolist() == [0]
