import math

import pytest
import torch

from tests.algorithms.conftest import call

pytestmark = pytest.mark.numeric

LOGPROBS = torch.tensor([[math.log(0.25), -80.0, float("nan")]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False]])


def test_surprisal_is_capped_and_zero_in_padding():
    found = call("uncertainty", "surprisal", {"sampler_logprobs": LOGPROBS, "response_mask": MASK})
    assert found.tolist() == [[pytest.approx(math.log(4)), 50.0, 0.0]]


def test_predictive_variance():
    found = call("uncertainty", "predictive_variance", {"sampler_logprobs": LOGPROBS, "response_mask": MASK})
    assert found[0].tolist() == pytest.approx([0.1875, 0.0, 0.0])


@pytest.mark.parametrize(("name", "column"), [("shannon_entropy", "entropy"), ("varentropy", "varentropy")])
def test_full_distribution_kinds_are_the_policys_columns(name, column):
    values = torch.rand(2, 3)
    assert torch.equal(call("uncertainty", name, {column: values}), values)
