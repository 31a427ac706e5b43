import math

import pytest
import torch

from retrain.functional.mismatch import Mismatch, is_stale

pytestmark = pytest.mark.numeric

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


def policies(update, count=60, rounding=0.0, seed=0):
    """Log-probs [count] of an old and a new policy, as a trainer computes them, and of both as a sampler does."""
    generator = torch.Generator().manual_seed(seed)

    def noise():
        return rounding * torch.randn(count, generator=generator)

    old = -torch.rand(count, generator=generator)
    new = old + update * torch.randn(count, generator=generator)
    return {"old": old + noise(), "new": new + noise(), "at_old": old + noise(), "at_new": new + noise()}


def verdict(found, sampler):
    return is_stale(found[sampler], found["new"], found["old"])


@pytest.mark.parametrize(("update", "rounding"), [(1e-5, 1e-7), (1e-2, 1e-3), (1.0, 1e-2)])
def test_a_sampler_that_has_stayed_behind_is_stale_and_one_that_has_not_is_not(update, rounding):
    found = policies(update, rounding=rounding)
    assert verdict(found, "at_old")
    assert not verdict(found, "at_new")


def test_half_an_update_is_the_border():
    found = policies(1e-2)
    for share, stale in ((0.0, True), (0.45, True), (0.55, False), (1.0, False)):
        assert is_stale(found["old"].lerp(found["new"], share), found["new"], found["old"]) == stale


@pytest.mark.parametrize("update", [0.0, 1e-9, 1e-5])
@pytest.mark.parametrize("sampler", ["at_old", "at_new"])
def test_an_update_below_the_rounding_gives_no_verdict(update, sampler):
    assert not any(verdict(policies(update, 400, 1e-3, seed), sampler) for seed in range(200))


def test_few_tokens_and_no_update_give_no_verdict():
    assert not verdict(policies(1.0, count=52), "at_old"), "27 votes that agree"
    assert verdict(policies(1.0, count=54), "at_old")
    assert not verdict(policies(0.0), "at_old")
    assert not is_stale(torch.zeros(0), torch.zeros(0), torch.zeros(0))


def test_a_coarse_sampler_is_not_taken_for_a_stale_one():
    """Its log-probs are too low by more than the update: nearer to the old policy wherever the update raised them."""
    found = policies(0.0)
    new = found["old"] + 0.01
    assert not is_stale(new - 0.05, new, found["old"])
