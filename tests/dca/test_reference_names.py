"""The functions of DCA's reference implementation by their names, on lists, numpy arrays and tensors."""

import math

import numpy as np
import pytest
import torch

from retrain import dca

pytestmark = pytest.mark.numeric

CORRECT, LENGTHS = [True, True, False, True], [100, 200, 150, 400]
GRPO = [0.624970, 0.589371, -1.732051, 0.517710]
RLOO = [0.404763, 0.351364, -1, 0.243873]


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_both_advantages_on_every_kind_of_array(make):
    correct, lengths = make(CORRECT), make(LENGTHS)
    assert dca.advantage_dca_grpo(correct, lengths, 0.2).tolist() == pytest.approx(GRPO, abs=1e-6)
    assert dca.advantage_dca_rloo(correct, lengths, 0.2).tolist() == pytest.approx(RLOO, abs=1e-6)


def test_length_scores_are_of_the_correct_completions_alone():
    mean = 700 / 3
    spread = math.sqrt(sum((n - mean) ** 2 for n in (100, 200, 400)) / 3)
    wanted = [1 / (1 + math.exp(-(n - mean) / spread)) for n in (100, 200, 400)]
    found = dca.length_score_z_sigmoid(CORRECT, LENGTHS).tolist()
    assert [found[0], found[1], found[3]] == pytest.approx(wanted)
    assert found[2] == 0
    assert dca.length_score_z_sigmoid([True, True], [5, 5]).tolist() == [0.5, 0.5]


def test_the_call_for_slime_takes_whole_groups_in_order():
    batch = {"rewards": [1.0, 1.0, 0.0, 1.0] * 2, "response_lengths": LENGTHS * 2}
    found = dca.compute_advantage_for_slime(batch, adv_mode="dca", use_dynamic=False, group_size=4)
    assert found.tolist() == pytest.approx(GRPO * 2, abs=1e-6)
    rloo = dca.compute_advantage_for_slime(batch, adv_mode="dca", use_rloo=True, use_dynamic=False, group_size=4)
    assert rloo.tolist() == pytest.approx(RLOO * 2, abs=1e-6)
    whole = dca.compute_advantage_for_slime(batch)
    assert whole.tolist() == dca.compute_advantage(batch["rewards"], mode="vanilla").tolist()
    named = {"scores": [0.2, 0.9], "right": [True, False], "n": [3, 4]}
    keys = {"reward_key": "scores", "length_key": "n", "correct_key": "right"}
    assert dca.compute_advantage_for_slime(named, adv_mode="dca", **keys)[0] > 0
    with pytest.raises(ValueError, match="8 completions cannot be divided into groups of 3"):
        dca.compute_advantage_for_slime(batch, group_size=3)


def test_coupled_penalty_and_its_advantage():
    rewards = dca.rewards_coupled_lp(CORRECT, LENGTHS, 1e-3)
    assert rewards.tolist() == pytest.approx([0.9, 0.8, 0, 0.6])
    assert dca.reward_for_slime(CORRECT, LENGTHS, mode="grpo_lp").tolist() == rewards.tolist()
    assert dca.reward_for_verl(CORRECT, LENGTHS, mode="dca").tolist() == [1, 1, 0, 1]
    batch = {"rewards": [1.0, 1.0, 0.0, 1.0], "response_lengths": LENGTHS}
    found = dca.compute_advantage_for_slime(batch, adv_mode="grpo_lp", gamma=1e-3)
    wanted = dca.compute_advantage(rewards.tolist(), mode="vanilla")
    torch.testing.assert_close(found, wanted)


def test_metrics():
    assert dca.compute_accuracy([[True, False], [False, True]]) == 0.5
    assert dca.compute_avg_tokens([[10, 20], 30]) == 20
    assert dca.compute_accuracy([]) == dca.compute_avg_tokens([]) == 0
    assert dca.aes_score(0.6, 0.5, 80.0, 100.0) == pytest.approx(0.2 + 3 * 0.2)
    assert dca.aes_score(0.4, 0.5, 80.0, 100.0) == pytest.approx(0.2 - 5 * 0.2)
    assert dca.pass_at_k(3, 1, 2) == pytest.approx(2 / 3)
    assert dca.is_equivalent_math("#### 1,234", "1234")
    assert set(dca.__all__) <= set(dir(dca))


@pytest.mark.parametrize("size", [-1, -2, 0, 3, 8])
def test_groups_must_divide_the_batch(size):
    batch = {"rewards": [1.0, 0, 1, 1], "response_lengths": [10, 20, 30, 40]}
    with pytest.raises(ValueError, match="cannot be divided"):
        dca.compute_advantage_for_slime(batch, adv_mode="dca", group_size=size)


def test_a_mistyped_baseline_and_odd_lengths_are_refused():
    for mode in ("grpo-lp", "GRPO_LP", "x"):
        with pytest.raises(ValueError, match="there is no mode"):
            dca.reward_for_verl([1, 0, 1], [10, 20, 30], mode=mode)
    for lengths in ([10, 20], [10, 20, float("nan")], [10, 20, -1]):
        with pytest.raises(ValueError, match="not 3 numbers"):
            dca.rewards_coupled_lp([1, 0, 1], lengths)


def test_metrics_of_arrays_and_of_nothing():
    assert dca.compute_avg_tokens(np.array([1, 2])) == 1.5
    assert dca.compute_accuracy(np.array([[1, 0]])) == 1.0
    assert dca.compute_accuracy([[]]) == dca.compute_accuracy([]) == dca.compute_avg_tokens([]) == 0.0
