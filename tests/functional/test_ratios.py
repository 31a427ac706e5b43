import math

import pytest
import torch

from retrain.functional.ratios import log_ratio

pytestmark = pytest.mark.numeric

NAN, INF = float("nan"), float("inf")
NEW = torch.tensor([[NAN, -1.0, -2.0, INF], [-0.5, 7.0, NAN, NAN]], dtype=torch.float64)
OLD = torch.tensor([[-INF, -1.5, -4.0, NAN], [-0.5, -99.0, 0.0, -INF]], dtype=torch.float64)
MASK = torch.tensor([[False, True, True, False], [True, True, False, False]])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [[0, 0.5, 2.0, 0], [0, 20.0, 0, 0]]),
        ("sequence", [[0, 2.5, 2.5, 0], [20.0, 20.0, 0, 0]]),
        ("geometric", [[0, 1.25, 1.25, 0], [20.0, 20.0, 0, 0]]),
    ],
)
def test_levels_clamp_and_mask(level, expected):
    new = NEW.clone().requires_grad_()
    found = log_ratio(new, OLD, MASK, level)
    assert found.tolist() == expected
    found.exp().sum().backward()
    assert new.grad.isfinite().all()
    assert new.grad[~MASK].tolist() == [0.0] * 4
    expected_gradient = {"token": math.exp(0.5), "sequence": 2 * math.exp(2.5), "geometric": math.exp(1.25)}
    assert new.grad[0, 1].item() == pytest.approx(expected_gradient[level])
