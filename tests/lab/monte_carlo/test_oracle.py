from __future__ import annotations

import pytest
import torch

from retrain.lab.monte_carlo.oracle import TokenValues, oracle
from tests.tabular_policy import Tabular

pytestmark = pytest.mark.numeric


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
