import math

import numpy as np
import pytest
import torch

from retrain.adapters import compute_advantage
from retrain.adapters.core import bind, portable_advantages, score
from retrain.errors import ComponentError, UserCodeError
from retrain.registry import names

pytestmark = pytest.mark.numeric

CORRECT, LENGTHS = [1, 1, 0, 1], [100, 200, 150, 400]


def test_booleans_numbers_arrays_and_lists_are_one():
    for rewards in (CORRECT, [bool(c) for c in CORRECT], np.array(CORRECT), np.array(CORRECT, dtype=bool)):
        found = compute_advantage(rewards, np.array(LENGTHS), ["a", "a", "a", "a"], "dca_rloo")
        assert found.dtype == torch.float32
        assert found.tolist() == pytest.approx([0.404763, 0.351364, -1, 0.243873], abs=1e-6)


def test_groups_may_have_any_ids_in_any_order():
    rewards, ids = [1.0, 0.0, 0.0, 1.0, 1.0, 0.5], np.array(["x", "y", "x", "y", "z", "z"], dtype=object)
    found = compute_advantage(rewards, group_ids=ids, mode="grpo")
    assert found.tolist() == [0.5, -0.5, -0.5, 0.5, 0.25, -0.25]
    assert (
        compute_advantage(rewards, group_ids=torch.tensor([7, 2, 7, 2, 9, 9]), mode="grpo").tolist() == found.tolist()
    )


def test_parameters_and_correctness_can_be_given():
    flat = compute_advantage(CORRECT, LENGTHS, beta=0.0)
    assert flat.tolist() == pytest.approx(compute_advantage(CORRECT, mode="grpo_std").tolist(), abs=1e-6)
    assert compute_advantage(CORRECT, LENGTHS, correct=[False] * 4).tolist() == [0.0] * 4


@pytest.mark.parametrize("mode", portable_advantages())
def test_every_advantage_is_finite_and_empty_for_nothing(mode):
    found = compute_advantage(CORRECT, [2, 3, 4, 5], [0, 0, 1, 1], mode)
    assert found.isfinite().all()
    assert len(compute_advantage([], [], [], mode)) == 0


def test_all_advantages_of_the_package_can_be_used_elsewhere():
    built_in = {"grpo", "grpo_std", "maxrl", "rloo", "reinforce_pp", "grpo_lp", "dca", "dca_grpo", "dca_rloo"}
    assert built_in <= set(portable_advantages()) <= set(names("advantage"))


def test_an_advantage_of_the_users_is_called_with_plain_lists():
    found = compute_advantage([1.0, 0.0, 1.0], group_ids=[0, 0, 1], mode="plugins.my_advantages.hipa_like_advantages")
    assert found.shape == (3,)
    with pytest.raises(UserCodeError, match="group 0"):
        compute_advantage([1.0, 0.0], mode="builtins.repr")


def test_what_cannot_be_computed_is_an_error_that_says_why():
    with pytest.raises(ComponentError, match='"dca" reads lengths, which was not given; it is called with: rewards'):
        compute_advantage(CORRECT)
    with pytest.raises(ComponentError, match='did you mean "dca"'):
        compute_advantage(CORRECT, LENGTHS, mode="dcaa")
    with pytest.raises(ComponentError, match=r"betta: .*it takes beta, dynamic"):
        compute_advantage(CORRECT, LENGTHS, betta=1.0)
    with pytest.raises(ComponentError, match="it takes no parameters"):
        bind("advantage", "grpo", {"x": 1})
    with pytest.raises(ValueError, match=r"lengths has shape \(3,\) for 4 rewards; give one per completion"):
        compute_advantage(CORRECT, [1, 2, 3])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"rewards": [1, math.nan, 0]}, r"rewards\[1\].* is not finite"),
        ({"lengths": [3, 4, -1]}, r"lengths\[2\].* is negative"),
        ({"rewards": [[1], [0], [1]]}, r"rewards has shape \(3, 1\)"),
        ({"rewards": [1, None, 0]}, "rewards are not numbers"),
        ({"group_ids": ["a", ["a"], "a"]}, r"group_ids\[1\] is not a single id"),
    ],
)
def test_values_that_mean_nothing_are_refused_not_spread(columns, message):
    for mode in ("grpo", "dca"):
        with pytest.raises(ValueError, match=message):
            compute_advantage(**({"rewards": [1, 0, 1], "lengths": [3, 4, 5], "mode": mode} | columns))


def test_a_reward_scores_one_completion_in_a_process_of_its_own():
    item = {"completion": r"so \boxed{0.50}", "answer": "0.5"}
    verdict = score("boxed_math", {"equivalence": "simple"}, item)
    assert (verdict.value, verdict.correct, verdict.status) == (1.0, True, "ok")
    with pytest.raises(ComponentError, match="reads length, max_tokens, which this trainer does not provide"):
        score("overlong", {}, item)
