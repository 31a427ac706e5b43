"""Completions that are continued from prefixes, in real runs."""

from contextlib import closing

import pytest
import torch

from retrain.lab.monte_carlo.prefixes import Prefix
from retrain.run.collectors.rounds import collect
from retrain.run.reopen import reopen
from tests.small_runs import digest, rows

pytestmark = pytest.mark.slow


def test_continuations_have_streams_of_their_own_and_change_no_run(train):
    plain, watched = train(), train('logging.observe=["token_values","segment_values"]', name="watched")
    assert digest(plain) == digest(watched)
    tokens = [row.pop("oracle/tokens") for row in rows(watched / "metrics.jsonl")]
    assert min(tokens) > 100
    own = [
        {k: v for k, v in row.items() if k not in ("oracle/tokens", "vine/tokens")}
        for row in rows(watched / "metrics.jsonl")
    ]
    assert own == rows(plain / "metrics.jsonl")


def test_a_continuation_begins_with_its_prefix_and_keeps_the_budget(train):
    with closing(reopen(train("training.max_steps=1"), (), lambda *_: None)) as parts:
        batch = collect(parts, 1, 0).batch
        ids = tuple(batch.input_ids[0].tolist())
        first = int(batch.response_mask[0].int().argmax())
        prefixes = [Prefix(0, ids[:first], 0), Prefix(0, ids[: first + 11], 11)]
        rewards, tokens = parts.trained.resources["continue_from"](batch.problems, prefixes, 3, 5)
        again, _ = parts.trained.resources["continue_from"](batch.problems, prefixes, 3, 5)
    assert rewards.shape == (2, 3)
    assert torch.equal(rewards, again)
    assert 3 * 1 + 3 <= tokens <= 3 * 12 + 3  # the second prefix has one token left of 12
