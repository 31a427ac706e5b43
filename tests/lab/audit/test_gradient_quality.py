import pytest
import torch
from scipy.special import stdtrit

from retrain.lab.audit.gradient_quality import covariance, inner, interval, log_interval, mean, moments, quality

pytestmark = pytest.mark.numeric


def test_inner_products_are_of_different_batches_and_leave_one_out():
    x, y = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def pairs(rows):
        return [float(x[a] @ y[b]) for a in rows for b in rows if a != b]

    expected = [pairs(range(5)), *(pairs([a for a in range(5) if a != left]) for left in range(5))]
    assert inner(x, y).tolist() == pytest.approx([sum(one) / len(one) for one in expected])
    assert mean(x[:, 0]).tolist()[1:] == pytest.approx([float(x[torch.arange(5) != i, 0].mean()) for i in range(5)])


def test_covariances_are_those_of_all_rows_together():
    tables = [torch.randn(n, 3, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (4, 9, 6)]
    found = covariance(torch.stack([moments(table) for table in tables]))
    for place, some in enumerate([tables, tables[1:], [tables[0], tables[2]], tables[:2]]):
        assert torch.allclose(found[place], torch.cat(some).T.cov(correction=0))


@pytest.mark.parametrize("size", [0.9, 1.8])
def test_intervals_of_16_batches_cover_the_truth(size):
    """Of gradients in 12 dimensions: bias, noise and effective batch of a second method, in 4,000 repetitions."""
    generator = torch.Generator().manual_seed(1)
    repetitions, batches, width = 4_000, 16, 12
    normal = torch.randn(3, repetitions, batches, width, generator=generator, dtype=torch.float64)
    true = torch.zeros(width, dtype=torch.float64)
    true[0] = size * 2
    turned = true.clone()
    turned[1] = size
    base, other, r = (
        true + 0.8 * normal[0],
        turned + 0.6 * (normal[0] + normal[1]),
        true + 0.5 * (normal[0] + normal[2]),
    )
    first, second = quality(base, r, base.square().sum(-1)), quality(other, r, other.square().sum(-1))
    quantile = float(stdtrit(batches - 1, 0.975))
    variances = 0.64 * width / (4 * size**2), 0.72 * width / (4 * size**2)  # 1 / (SNR cos^2); tan^2 is 1 / 4
    exact = variances[0] / (1 / 4 + variances[1])
    cases = {
        "bias": (interval(second.bias, quantile), 1 - 2 / 5**0.5),
        "noise": (interval(second.noise, quantile), 5 * size**2 / (0.72 * width)),
        "effective batch": (log_interval(second.effective_snr / first.effective_snr, quantile), exact),
    }
    covered = {
        name: float(((found[:, 1] <= truth) & (truth <= found[:, 2])).double().mean())
        for name, (found, truth) in cases.items()
    }
    assert {name: share for name, share in covered.items() if not 0.93 <= share <= 0.97} == {}


@pytest.mark.parametrize("batches", [12, 16, 32])
def test_the_oracles_figure_does_not_depend_on_its_continuations(batches):
    """1,500 repetitions: halves with as much noise as the exact gradient, or six times as much; the truth is 1.5."""
    generator, repetitions, width, noise = torch.Generator().manual_seed(2), 1_500, 40, 0.5

    def normal(variance):
        found = torch.randn(repetitions, batches, width, generator=generator, dtype=torch.float64)
        return found * (variance / width) ** 0.5

    true = torch.zeros(width, dtype=torch.float64)
    true[0] = 1
    quantile = float(stdtrit(batches - 1, 0.975))
    for continuations in (1.0, 6.0):
        exact = true + normal(noise)
        halves = exact + normal(continuations * noise), exact + normal(continuations * noise)
        base, r = exact + normal(0.5 * noise), (halves[0] + halves[1]) / 2
        oracle = quality(r, r, (halves[0] * halves[1]).sum(-1))
        ratio = oracle.effective_snr / quality(base, r, base.square().sum(-1)).effective_snr
        found = log_interval(ratio, quantile)
        told = found[found.isfinite().all(-1)]
        assert len(told) > 0.98 * repetitions
        assert float(told[:, 0].median()) == pytest.approx(1.5, abs=0.06)
        # Much noise makes intervals wide, not wrong.
        assert 0.93 <= float(((told[:, 1] <= 1.5) & (told[:, 2] >= 1.5)).double().mean()) <= 0.99
