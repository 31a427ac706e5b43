import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.adapters import compute_advantage
from retrain.algorithms.graph.compose import compute_composable_advantages
from tests.algorithms.conftest import call
from tests.reference import credit

pytestmark = pytest.mark.numeric

CASES = json.loads((Path(__file__).parents[1] / "data/vectors.json").read_text())["dca"]


def dca(name, correct, lengths, group_ids=None, **params):
    columns = {
        "rewards": torch.tensor(correct, dtype=torch.float64),
        "correct": torch.tensor(correct).bool(),
        "lengths": torch.tensor(lengths),
        "group_ids": torch.tensor(group_ids or [0] * len(correct)),
        "max_tokens": 100,
    }
    return call("advantage", name, columns, **params)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_published_vectors(case):
    given_, expected = case["input"], case["expected"]
    for key, name, dynamic in (
        ("dca_grpo", "dca", False),
        ("dca_grpo", "dca_grpo", False),
        ("ddca_grpo", "dca", True),
        ("dca_rloo", "dca_rloo", False),
        ("ddca_rloo", "dca_rloo", True),
    ):
        found = dca(name, given_["correct"], given_["lengths"], beta=given_["beta"], dynamic=dynamic)
        assert found.tolist() == pytest.approx(expected[key], abs=1e-9), (name, dynamic)
    assert dca("grpo_std", given_["correct"], given_["lengths"]).tolist() == pytest.approx(
        expected["grpo_std"], abs=1e-9
    )


@pytest.mark.parametrize("case", [c for c in CASES if "grpo_lp_gamma1e-3" in c["expected"]], ids=lambda c: c["id"])
def test_length_penalty_vectors(case):
    found = dca("grpo_lp", case["input"]["correct"], case["input"]["lengths"], gamma=1e-3)
    assert found.tolist() == pytest.approx(case["expected"]["grpo_lp_gamma1e-3"], abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.tuples(st.booleans(), st.integers(1, 400)), min_size=1, max_size=6), min_size=1, max_size=4),
    st.booleans(),
)
def test_equals_the_printed_formula(groups, dynamic):
    rows = [(g, *row) for g, group in enumerate(groups) for row in group]
    rows = rows[::2] + rows[1::2]
    ids, correct, lengths = (list(column) for column in zip(*rows, strict=True))
    for name, loo in (("dca", False), ("dca_rloo", True)):
        found = dca(name, [float(c) for c in correct], lengths, ids, beta=0.2, dynamic=dynamic)
        for g in set(ids):
            mine = [i for i, other in enumerate(ids) if other == g]
            expected = credit.dca([correct[i] for i in mine], [lengths[i] for i in mine], 0.2, dynamic, loo)
            assert found[mine].tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("mode", ["dca", "dca_rloo"])
@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 5000), st.floats(-5, 5)), min_size=2, max_size=8), st.floats(-3, 3)
)
def test_no_further_reward_makes_a_correct_answer_rank_below_a_wrong_one(mode, rows, weight):
    correct, lengths, other = (list(column) for column in zip(*rows, strict=True))
    rewards = [float(c) + weight * part for c, part in zip(correct, other, strict=True)]
    found = compute_advantage(rewards, lengths, mode=mode, correct=correct)
    assert found.tolist() == compute_advantage(correct, lengths, mode=mode).tolist()
    right = [a for a, c in zip(found.tolist(), correct, strict=True) if c]
    wrong = [a for a, c in zip(found.tolist(), correct, strict=True) if not c]
    assert not right or not wrong or min(right) > max(wrong)


def test_dca_in_the_pipeline_ranks_by_correctness_whatever_the_rewards_are():
    found = compute_composable_advantages(
        [0.0, 0.1, 1.0],
        [[-1.0], [-1.0], [-1.0]],
        [[0]] * 3,
        advantage_mode="dca",
        correct_G=[True, False, True],
        lengths_G=[50, 10, 20],
    ).token_advs
    assert found[1][0] < found[0][0] < found[2][0]


def test_equal_lengths_and_single_correct_answers_leave_the_accuracy_term():
    assert dca("dca", [1.0, 1.0], [7, 7]).tolist() == [0.0, 0.0]
    assert dca("dca_rloo", [1.0, 0.0], [7, 9]).tolist() == [1.0, -1.0]
    assert dca("dca_rloo", [1.0], [7]).tolist() == [0.0]
