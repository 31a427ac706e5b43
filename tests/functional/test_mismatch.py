from __future__ import annotations

import math

import pytest
import torch

from retrain.functional.mismatch import Mismatch

D = torch.tensor([[0.1, -0.2, 9.0], [0.0, 9.0, 9.0]])
MASK = torch.tensor([[True, True, False], [True, False, False]])
SAMPLER = torch.full((2, 3), -1.0)


def test_by_hand_and_over_micro_batches():
    whole = Mismatch.of(SAMPLER + D, SAMPLER, MASK)
    first, second = (Mismatch.of((SAMPLER + D)[n : n + 1], SAMPLER[n : n + 1], MASK[n : n + 1]) for n in (0, 1))
    parts = first + second
    rho = [math.exp(d) for d in (0.1, -0.2, 0.0)]
    expected = {
        "mismatch/logp_diff_mean": 0.1,
        "mismatch/logp_diff_max": 0.2,
        "mismatch/kl": sum(r - 1 - d for r, d in zip(rho, (0.1, -0.2, 0.0), strict=True)) / 3,
        "mismatch/ratio_min": rho[1],
        "mismatch/ratio_max": rho[0],
        "mismatch/ess": sum(rho) ** 2 / (3 * sum(r * r for r in rho)),
    }
    assert whole.metrics() == pytest.approx(expected, rel=1e-5)
    assert parts.metrics() == pytest.approx(whole.metrics())


def test_a_micro_batch_without_tokens_adds_nothing():
    none = Mismatch.of(SAMPLER, SAMPLER, MASK & False)
    assert none.metrics() == {}
    whole = Mismatch.of(SAMPLER + D, SAMPLER, MASK)
    assert (whole + none).metrics() == whole.metrics()


def test_equal_log_probs_have_full_effective_size():
    found = Mismatch.of(SAMPLER, SAMPLER, MASK).metrics()
    assert found["mismatch/ess"] == found["mismatch/ratio_min"] == found["mismatch/ratio_max"] == 1.0
