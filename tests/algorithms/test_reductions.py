import pytest
import torch

from tests.algorithms.conftest import call

pytestmark = pytest.mark.numeric

MASK = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)


def reduced(name, mask=MASK):
    return call("reduction", name, {"mask": mask, "max_tokens": 5})


def test_weights_by_hand():
    assert torch.equal(reduced("token_mean"), MASK / 4)
    torch.testing.assert_close(
        reduced("sequence_mean"), MASK / torch.tensor([[6.0], [2.0], [2.0]], dtype=torch.float64)
    )
    torch.testing.assert_close(reduced("dr_grpo"), MASK / 10)
    torch.testing.assert_close(reduced("sequence_sum"), MASK / 2)


def test_the_values_of_loss_agg_mode_are_second_names():
    for theirs, ours in (
        ("token-mean", "token_mean"),
        ("seq-mean-token-mean", "sequence_mean"),
        ("seq-mean-token-sum", "sequence_sum"),
        ("seq-mean-token-sum-norm", "dr_grpo"),
    ):
        assert torch.equal(reduced(theirs), reduced(ours))


def test_padding_in_the_denominator_would_show():
    wide = torch.nn.functional.pad(MASK, (0, 7))
    for name in ("token_mean", "sequence_mean", "sequence_sum", "dr_grpo"):
        assert torch.equal(reduced(name, wide)[:, :4], reduced(name))


def test_nothing_to_reduce():
    for name in ("token_mean", "sequence_mean", "sequence_sum", "dr_grpo"):
        assert reduced(name, MASK * 0).sum() == 0
