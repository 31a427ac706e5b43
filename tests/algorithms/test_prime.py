"""PRIME's transform and filter, by their public names."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.registry import ParameterError, find
from tests.algorithms.conftest import call, pad
from tests.reference import credit
from tests.reference import prime as printed

pytestmark = pytest.mark.numeric

VECTORS = json.loads((Path(__file__).parents[1] / "data/prime.json").read_text())
CASE = VECTORS["prime"][0]
ROWS = st.lists(st.lists(st.floats(-2, 2, width=32), max_size=5), min_size=1, max_size=7)


def process_rloo(
    rewards, episode, groups, *, dtype=torch.float64, width=None, fill=0.0, start=0, step=0, chain=(), **params
):
    """Advantages of ragged rows as lists; `start` columns of prompt, `fill` outside the response."""
    width = start + (width or max(1, *map(len, rewards)))
    mask = torch.tensor([[start <= t < start + len(row) for t in range(width)] for row in rewards])
    columns = {
        "advantages": torch.tensor(episode, dtype=dtype)[:, None] * mask,
        "process_rewards": pad([[fill] * start + list(row) for row in rewards], width, dtype, fill),
        "group_ids": torch.tensor(groups),
        "response_mask": mask,
        "step": step,
    }
    columns["advantages"] = call("transform", "process_rloo", columns, **params)
    for name in chain:
        columns["advantages"] = call("transform", name, columns)
    assert columns["advantages"].dtype == dtype
    assert not columns["advantages"][~mask].any()
    return [columns["advantages"][i][mask[i]].tolist() for i in range(len(rewards))]


def close(found, expected, tolerance=1e-9):
    assert [len(row) for row in found] == [len(row) for row in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=tolerance)


def vector_rows(dtype, **options):
    lengths, rewards = CASE["input"]["lens"], CASE["expected"]["process_reward_beta_q"]
    group = {"rewards": torch.tensor(CASE["input"]["acc"], dtype=dtype), "group_ids": torch.zeros(4, dtype=torch.int64)}
    episode = call("advantage", "rloo", group)
    assert episode.tolist() == pytest.approx(CASE["expected"]["outcome_loo"], abs=1e-6)
    rows = [row[:length] for row, length in zip(rewards, lengths, strict=True)]
    return process_rloo(rows, episode.tolist(), [0] * 4, dtype=dtype, **options)


def trimmed(rows):
    return [row[:length] for row, length in zip(rows, CASE["input"]["lens"], strict=True)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=str)
def test_published_vectors(dtype, tolerance):
    default = CASE["expected"]["default"]
    close(vector_rows(dtype, norm="none"), trimmed(CASE["expected"]["literal"]), tolerance)
    close(vector_rows(dtype), trimmed(default["returns"]), tolerance)
    close(vector_rows(dtype, chain=["whiten"]), trimmed(default["advantages_whitened"]), tolerance)
    close(vector_rows(dtype, fill=float("nan"), width=9, start=2), trimmed(default["returns"]), tolerance)


@settings(deadline=None, max_examples=80)
@given(ROWS, st.data(), st.sampled_from([1.0, 0.9, 0.0]), st.sampled_from(["batch", "none"]))
def test_equals_the_printed_formula(rewards, data, gamma, norm):
    groups = data.draw(st.lists(st.integers(0, 2), min_size=len(rewards), max_size=len(rewards)))
    episode = data.draw(st.lists(st.floats(-1, 1), min_size=len(rewards), max_size=len(rewards)))
    expected = printed.process_rloo(episode, rewards, groups, gamma, norm)
    close(process_rloo(rewards, episode, groups, gamma=gamma, norm=norm), expected)
    whitened = process_rloo(rewards, episode, groups, gamma=gamma, norm=norm, chain=["whiten"])
    close(whitened, credit.whiten(expected), 1e-6)


@settings(deadline=None, max_examples=40)
@given(ROWS, st.randoms(use_true_random=False), st.integers(0, 3), st.sampled_from([1.0, 0.5]))
def test_order_of_rows_padding_and_precision_change_nothing(rewards, random, more, gamma):
    groups, episode = [i % 3 for i in range(len(rewards))], [i / 10 for i in range(len(rewards))]
    straight = process_rloo(rewards, episode, groups, gamma=gamma)
    order = list(range(len(rewards)))
    random.shuffle(order)
    width = max(1, *map(len, rewards)) + more

    def shuffled(dtype):
        rows = ([x[i] for i in order] for x in (rewards, episode, groups))
        return process_rloo(*rows, gamma=gamma, width=width, fill=7.0, start=more, dtype=dtype)

    close(shuffled(torch.float64), [straight[i] for i in order])
    close(shuffled(torch.float32), [straight[i] for i in order], 1e-4)


def test_tokens_that_the_policy_did_not_choose_take_no_time_and_count_nowhere():
    mask = torch.tensor([[True, False, False, True], [True, True, False, False]])
    columns = {
        "advantages": torch.zeros(2, 4).double(),
        "process_rewards": torch.tensor([[1.0, 50.0, float("inf"), 3.0], [0.0, 2.0, 9.0, 9.0]]).double(),
        "group_ids": torch.tensor([5, 5]),
        "response_mask": mask,
        "step": 0,
    }
    found = call("transform", "process_rloo", columns, gamma=0.5, norm="none")
    assert found.tolist() == [[1.0, 0.0, 0.0, 2.0], [-2.0, 0.0, 0.0, 0.0]]


def test_the_process_term_counts_from_the_step_of_the_delay_on():
    rewards, episode, groups = [[1.0, 2.0], [3.0]], [0.5, -0.5], [0, 0]
    for step in (0, 3, 9):
        assert process_rloo(rewards, episode, groups, step=step, delay=10) == [[0.5, 0.5], [-0.5]]
    for step in (10, 11):
        assert process_rloo(rewards, episode, groups, step=step, delay=10) == process_rloo(rewards, episode, groups)


def test_rewards_of_zero_leave_the_episode_alone():
    assert process_rloo([[0.0, 0.0], [0.0]], [0.5, -0.5], [0, 0]) == [[0.5, 0.5], [-0.5]]


@pytest.mark.parametrize("params", [{"gamma": 1.5}, {"gamma": -0.1}, {"norm": "group"}, {"beta": 0.1}, {"delay": -1}])
def test_parameters_outside_their_range_are_refused(params):
    with pytest.raises(ParameterError, match=next(iter(params))):
        find("transform", "process_rloo").bind(params)


@pytest.mark.parametrize(("size", "right", "strict", "inclusive"), VECTORS["prime_filter"])
def test_band_vectors(size, right, strict, inclusive):
    columns = {"correct": torch.arange(size) < right, "group_ids": torch.full((size,), 3)}
    assert call("filter", "accuracy_band", columns).tolist() == [strict] * size
    assert call("filter", "accuracy_band", columns, inclusive=True).tolist() == [inclusive] * size


def test_band_counts_what_it_drops_by_group():
    correct = torch.tensor([1, 1, 0, 0, 0, 1, 1, 1, 1, 0]).bool()
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 3, 3])
    keep, counts = find("filter", "accuracy_band").bind({"high": 0.7})(correct, groups)
    assert keep.tolist() == [False] * 4 + [True] * 2 + [False] * 4
    assert counts == {"skipped/all_correct": 1.0, "skipped/all_wrong": 1.0, "skipped/other": 1.0}
