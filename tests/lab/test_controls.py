"""Credit whose effect is known beforehand."""

import torch

from retrain.lab.controls import RandomCredit, reversed_grpo

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.5])
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])
GRPO = torch.tensor([2 / 3, -1 / 3, -1 / 3, 1 / 6, 1 / 6, -1 / 3])


def test_reversed_credit_has_the_wrong_sign():
    torch.testing.assert_close(reversed_grpo(REWARDS, GROUPS), -GRPO)


def test_random_credit_is_grpos_in_another_order_for_every_step_and_seed():
    credit = RandomCredit(seed=0)
    found = [credit(REWARDS, GROUPS, step) for step in range(20)]
    for one in found:
        torch.testing.assert_close(one.sort().values, GRPO.sort().values)
    assert len({tuple(one.tolist()) for one in found}) > 10
    assert torch.equal(found[3], RandomCredit(seed=0)(REWARDS, GROUPS, 3))
    assert any(not torch.equal(one, RandomCredit(seed=1)(REWARDS, GROUPS, step)) for step, one in enumerate(found))


def test_random_credit_tells_nothing_about_rewards():
    credit = RandomCredit(seed=0)
    mean = torch.stack([credit(REWARDS, GROUPS, step) for step in range(2000)]).mean(0)
    assert mean.abs().max() < 0.05
