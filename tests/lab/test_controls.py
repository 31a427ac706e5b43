"""Credit whose effect is known beforehand, and the placebo of any other."""

import pytest
import torch

from retrain.config.load import load
from retrain.errors import ConfigError
from retrain.lab.controls import RandomCredit, permuted_in_rows, reversed_grpo, shuffled
from retrain.run.session import Resume
from tests.small_runs import digest, rows

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


def ragged():
    """Token credit of five rows with 0 to 7 response tokens, gaps and equal values among them, and its mask."""
    torch.manual_seed(11)
    credit, mask = torch.randn(5, 9), torch.zeros(5, 9, dtype=torch.bool)
    mask[0, 2:9] = mask[1, 4] = mask[3, [1, 2, 6, 8]] = mask[4, 3:8] = True
    credit[4, 3:8] = credit[4, 3]
    return credit.where(mask, 99.0), mask


def test_the_placebo_keeps_sum_signs_and_sizes_of_a_row_and_changes_their_places():
    credit, mask = ragged()
    orders = set()
    for step in range(30):
        found, metrics = shuffled(credit, mask, step)
        for row in range(5):
            assert found[row][mask[row]].sort().values.equal(credit[row][mask[row]].sort().values)
        assert found[~mask].equal(credit[~mask])
        assert found[4].equal(credit[4])
        moved = (found != credit)[mask].double().mean()
        assert metrics == {"shuffled/moved": pytest.approx(float(moved))}
        orders.add(tuple(found[0].tolist()))
    assert len(orders) == 30
    assert len({tuple(shuffled(credit, mask, step)[0][3, mask[3]].tolist()) for step in range(300)}) == 24


def test_the_placebo_is_every_order_equally_often_and_of_the_steps_seed_alone():
    values, mask = torch.arange(4.0).expand(6000, 4), torch.ones(6000, 4, dtype=torch.bool)
    place = permuted_in_rows(values, mask, seed=3)
    counts = torch.stack([(place == value).double().mean(0) for value in range(4)])
    assert (counts - 0.25).abs().max() < 0.03
    credit, mask = ragged()
    torch.manual_seed(5)
    first, _ = shuffled(credit, mask, 0)
    torch.rand(3)  # others have drawn, and padding is wider
    wide, wide_mask = (torch.nn.functional.pad(one, (2, 3)) for one in (credit, mask))
    assert shuffled(wide, wide_mask, 0)[0][:, 2:-3].equal(first)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert not shuffled(credit, mask, 1)[0].equal(first)
    torch.rand(3)
    assert torch.rand(1).equal(drawn), "the global stream is not used"
    torch.manual_seed(6)
    assert not shuffled(credit, mask, 0)[0].equal(first)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ('transform_mode = ["gtpo", "shuffled"]', None),
        ('transform_mode = ["sepa", "gtpo", "shuffled", "tis"]', None),
        ('transform_mode = "shuffled"\nalgorithm_mode = "oracle"', None),
        ('transform_mode = "shuffled"', "run.toml:4:1: .* nothing before it gives tokens credit of their own"),
        ('transform_mode = "shuffled"\nalgorithm_mode = "hicra"', "nothing before it gives tokens credit"),
        ('transform_mode = ["gtpo", "tis", "shuffled"]', 'would move the corrections of "tis".*; put it before tis'),
        ('transform_mode = ["gtpo", "shuffled", "hicra", "shuffled"]', "it is there twice"),
        ('transform_mode = ["sepa", "shuffled"]', "no later stage reads it"),
    ],
)
def test_the_placebo_stands_behind_token_credit_and_before_corrections(tmp_path, keys, problem):
    (tmp_path / "run.toml").write_text(f'[task]\nname = "addition"\n[algorithm]\n{keys}\n')
    if problem is None:
        load(tmp_path / "run.toml")
    else:
        with pytest.raises(ConfigError, match=problem):
            load(tmp_path / "run.toml")


@pytest.mark.slow
def test_a_run_with_the_placebo_resumes_to_the_same_bits(train, stopped):
    options = ('algorithm.transform_mode=["gtpo", "shuffled"]', "gtpo.beta=1.0", "checkpoint.every=0")
    whole = train(*options, name="whole")
    stopped(*options, name="parts", steps=2)
    assert digest(train(*options, name="parts", resume=Resume(mode="auto"))) == digest(whole)
    assert digest(train('algorithm.transform_mode="gtpo"', *options[1:], name="gtpo")) != digest(whole)
    moved = [row["shuffled/moved"] for row in rows(whole / "metrics.jsonl")]
    assert max(moved) > 0.3
