import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.algorithms.advantages.group_baselines import grpo_std
from retrain.algorithms.advantages.reward_scale import gdpo
from retrain.functional.groups import group_mean, group_size, group_std, group_sum, has_credit, leave_one_out

pytestmark = pytest.mark.numeric

rows = st.lists(st.tuples(st.integers(-3, 3), st.floats(-10, 10), st.booleans()), min_size=1, max_size=15)


@settings(deadline=None, max_examples=60)
@given(rows)
def test_every_statistic_equals_a_loop_over_groups(rows):
    ids = torch.tensor([g for g, _, _ in rows])
    values = torch.tensor([v for _, v, _ in rows], dtype=torch.float64)
    members = torch.tensor([m for _, _, m in rows])
    mean, std = group_mean(values, ids, members), group_std(values, ids, members)
    everyone, total, size = group_mean(values, ids), group_sum(values, ids), group_size(ids, members)
    for i, (group, value, member) in enumerate(rows):
        mine = [v for g, v, m in rows if g == group and m]
        both = [v for g, v, _ in rows if g == group]
        assert size[i] == len(mine)
        assert total[i].item() == pytest.approx(sum(both), abs=1e-9)
        assert everyone[i].item() == pytest.approx(statistics.fmean(both), abs=1e-9)
        assert mean[i].item() == pytest.approx(statistics.fmean(mine) if mine else 0.0, abs=1e-9)
        assert std[i].item() == pytest.approx(statistics.pstdev(mine) if mine else 0.0, abs=2e-5)
        if member and len(mine) > 1:
            rest = (sum(mine) - value) / (len(mine) - 1)
            assert leave_one_out(values, ids, members)[i].item() == pytest.approx(value - rest, abs=1e-9)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-7, -123.456])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_mean_of_equal_values_is_exactly_that_value(value, dtype):
    values = torch.full((7,), value, dtype=dtype)
    assert torch.equal(group_mean(values, torch.zeros(7, dtype=torch.long)), values)
    assert group_std(values, torch.zeros(7, dtype=torch.long)).sum() == 0


@pytest.mark.parametrize("value", [0.2, 1.0, -3.0, 1e4])
def test_values_that_differ_by_rounding_have_no_deviation(value):
    """Rewards that are sums in another order; divided by their deviation they would be advantages of about 1."""
    ids = torch.zeros(4, dtype=torch.long)
    values = torch.tensor([value, value * (1 + 2e-7), value, value])
    assert len(values.unique()) == 2
    assert group_std(values, ids).sum() == 0
    assert grpo_std(values, ids).abs().sum() == 0
    assert gdpo(values[:, None], [1.0], ids).abs().sum() == 0
    assert (grpo_std(torch.tensor([value, value * (1 + 1e-5), value, value]), ids) != 0).all()


def test_ddof_and_groups_too_small_for_it():
    ids = torch.tensor([0, 0, 1])
    assert group_std(torch.tensor([1.0, 3.0, 5.0]), ids, ddof=1).tolist() == pytest.approx([2**0.5, 2**0.5, 0.0])


@pytest.mark.parametrize(
    ("rewards", "advantages", "expected"),
    [
        ([0.2, 0.2], [1.5e-8, -1.5e-8], False),  # rounding of the rewards
        ([1e4, 1e4], [1e-3, 1e-3], False),
        ([1e-4, 1e-4], [1e-11, 1e-11], False),
        ([1e-4, 1e-4], [5e-5, 5e-5], True),  # an all-correct bonus
        ([1e-4, 2e-4], [-5e-5, 5e-5], True),
        ([1e6, -1e6], [1.0, -1.0], True),  # normalized advantages of large rewards
        ([1.0, 0.0], [1e-9, -1e-9], True),  # small, but the largest of the batch
        ([1.0, 0.0], [0.0, 0.0], False),
    ],
)
def test_a_group_has_credit_above_the_rounding_of_its_rewards(rewards, advantages, expected):
    columns = torch.tensor(advantages)[:, None].repeat(1, 3)
    found = has_credit(columns, torch.tensor(rewards), torch.tensor([4, 4]))
    assert found.tolist() == [expected, expected]


def test_credit_far_below_that_of_another_group_is_rounding():
    advantages = torch.tensor([[1.0], [-1.0], [1e-8], [-1e-8]])
    found = has_credit(advantages, torch.tensor([1.0, 0.0, 0.3, 0.3]), torch.tensor([0, 0, 1, 1]))
    assert found.tolist() == [True, True, False, False]
