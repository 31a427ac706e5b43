import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.conftest import call
from tests.reference import credit

pytestmark = pytest.mark.numeric

NAMES = ["grpo", "grpo_std", "maxrl", "rloo"]
groups_of_rewards = st.lists(
    st.lists(st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-3, 3)), min_size=1, max_size=6), min_size=1, max_size=5
)


def advantage(name, rewards, group_ids, **params):
    columns = {
        "rewards": torch.as_tensor(rewards, dtype=torch.float64),
        "group_ids": torch.as_tensor(group_ids),
        "max_tokens": 100,
    }
    columns["correct"] = columns["rewards"] > 0.5
    columns["lengths"] = torch.arange(1, len(columns["rewards"]) + 1)
    return call("advantage", name, columns, **params)


def test_one_group_by_hand():
    assert advantage("grpo", [1, 0, 0, 1], [0] * 4).tolist() == [0.5, -0.5, -0.5, 0.5]
    assert advantage("reinforce_pp", [1, 0, 0, 1], [0] * 4).tolist() == [0.5, -0.5, -0.5, 0.5]
    assert advantage("grpo_std", [1, 0, 0, 1], [0] * 4).tolist() == pytest.approx([1, -1, -1, 1])
    assert advantage("maxrl", [1, 0, 0, 0], [0] * 4).tolist() == pytest.approx([3, -1, -1, -1], rel=1e-5)
    assert advantage("rloo", [1, 0, 0, 1], [0] * 4).tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


@settings(deadline=None, max_examples=60)
@given(groups_of_rewards, st.randoms(use_true_random=False))
def test_equals_the_printed_formula_for_ragged_groups_in_any_order(groups, rng):
    rows = [(g, r) for g, rewards in enumerate(groups) for r in rewards]
    order = list(range(len(rows)))
    rng.shuffle(order)
    for name in NAMES:
        expected = [a for rewards in groups for a in getattr(credit, name)(rewards)]
        found = advantage(name, [rows[i][1] for i in order], [7 * rows[i][0] - 3 for i in order])
        # a spread at the edge of eps is divided by about eps, which magnifies rounding
        torch.testing.assert_close(found, torch.tensor([expected[i] for i in order]).double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [*NAMES, "reinforce_pp"])
def test_equal_rewards_give_exactly_zero_in_float32(name):
    columns = {"rewards": torch.full((3,), 0.1), "group_ids": torch.zeros(3, dtype=torch.long)}
    found = call("advantage", name, columns)
    assert found.dtype == torch.float32
    assert found.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", NAMES)
def test_a_group_of_one_and_an_empty_batch(name):
    assert advantage(name, [0.7], [5]).tolist() == [0.0]
    assert advantage(name, torch.zeros(0), torch.zeros(0, dtype=torch.long)).tolist() == []


def test_maxrl_is_zero_for_means_at_or_below_eps():
    assert advantage("maxrl", [-1, 0, 0.5], [0] * 3).tolist() == [0, 0, 0]
    assert advantage("maxrl", [0.4, 0.0], [0] * 2, eps=0.2).tolist() == [0, 0]


def test_grpo_std_takes_the_parameters_of_other_trainers():
    found = advantage("grpo_std", [1, 0, 0, 0], [0] * 4, ddof=1, eps=1e-4)
    assert found[0].item() == pytest.approx(0.75 / (0.5 + 1e-4), abs=1e-12)


@pytest.mark.parametrize(("gamma", "warned"), [(0.01, False), (0.02, True)])
def test_a_penalty_with_which_a_long_correct_answer_scores_below_a_wrong_one_is_warned_of(gamma, warned, recwarn):
    found = advantage("grpo_lp", [1, 1, 0, 0], [0] * 4, gamma=gamma)
    penalized = [1 - gamma, 1 - 2 * gamma, 0, 0]
    assert found.tolist() == pytest.approx(credit.grpo_std(penalized), rel=1e-6)
    said = [str(warning.message) for warning in recwarn.list]
    assert len(said) == warned
    assert all("gamma 0.02 * max_tokens 100 > 1" in text and text.endswith("use gamma <= 0.01") for text in said)
