"""slime cannot be installed here. The stand-in has the fields of slime/utils/types.py `Sample` that slime's own
reward post-process reads, and is called as slime/ray/rollout.py calls the hook: `func(args, samples)`."""

import asyncio
import inspect
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from retrain.adapters import compute_advantage, compute_advantage_for_slime, reward_for_slime

pytestmark = pytest.mark.numeric


@dataclass
class Sample:
    group_index: int
    index: int
    prompt: str = ""
    tokens: list = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list | None = None

    def get_reward_value(self, args):
        return self.reward if not args.reward_key else self.reward[args.reward_key]


REWARDS, LENGTHS, GROUPS = [1.0, 1.0, 0.0, 0.0, 1.0, 1.0], [10, 30, 20, 5, 6, 9], [3, 3, 3, 4, 4, 4]


def args(**more):
    return SimpleNamespace(reward_key=None, rollout_max_response_len=64, advantage_estimator="grpo", **more)


def samples(**more):
    rows = zip(GROUPS, REWARDS, LENGTHS, strict=True)
    return [Sample(g, i, reward=r, response_length=n, **more) for i, (g, r, n) in enumerate(rows)]


def test_the_hook_has_the_parameters_that_slime_checks():
    assert tuple(inspect.signature(compute_advantage_for_slime).parameters) == ("args", "samples")


@pytest.mark.parametrize("mode", ["grpo", "maxrl", "dca", "grpo_lp"])
def test_rewards_become_advantages(mode):
    raw, advantages = compute_advantage_for_slime(args(retrain_mode=mode), samples())
    assert raw == REWARDS
    assert advantages == compute_advantage(REWARDS, LENGTHS, GROUPS, mode, max_tokens=64).tolist()


def test_the_default_is_dca_and_parameters_come_from_the_arguments():
    _, default = compute_advantage_for_slime(args(), samples())
    _, none = compute_advantage_for_slime(args(retrain_params={"beta": 0.0}), samples())
    assert default == compute_advantage(REWARDS, LENGTHS, GROUPS).tolist()
    assert none != default


def test_lists_of_lists_masks_and_reward_keys():
    listed = samples()
    for sample in listed:
        sample.loss_mask = [1] * sample.response_length + [0] * 7  # tool output
        sample.response_length += 7
        sample.reward = {"acc": sample.reward}
    arguments = args()
    arguments.reward_key = "acc"
    raw, advantages = compute_advantage_for_slime(arguments, [listed[:3], listed[3:]])
    assert raw == REWARDS
    assert advantages == compute_advantage(REWARDS, LENGTHS, GROUPS).tolist()


def test_the_reward_is_awaited_for_one_sample_or_a_group():
    arguments = args(retrain_reward="boxed_math", retrain_reward_params={"equivalence": "simple"})
    right, wrong = Sample(0, 0, response=r"\boxed{7}", label="7"), Sample(0, 1, response=r"\boxed{8}", label="7")
    assert asyncio.run(reward_for_slime(arguments, right)) == 1.0
    assert asyncio.run(reward_for_slime(arguments, [right, wrong])) == [1.0, 0.0]


def test_a_reward_may_read_the_length():
    long = Sample(0, 0, response="x", label="7", response_length=64)
    assert asyncio.run(reward_for_slime(args(retrain_reward="overlong"), long)) == pytest.approx(-1)
