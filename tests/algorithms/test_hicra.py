import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.algorithms.graph.pipeline import Pipeline
from retrain.registry import find
from tests.algorithms.conftest import call, make_batch, pad
from tests.algorithms.transforms.test_token_stages import batches, columns, ragged
from tests.reference import credit

pytestmark = pytest.mark.numeric

NAN = float("nan")
tokens = st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.booleans()), min_size=1, max_size=8)
sequences = st.lists(st.tuples(st.integers(0, 2), st.floats(-2, 2), tokens), min_size=1, max_size=7)


@settings(deadline=None, max_examples=60)
@given(batches, st.floats(0, 1))
def test_hicra_equals_the_printed_formula_and_keeps_signs(rows, alpha):
    found = call("transform", "hicra", columns(rows), alpha=alpha)
    for (advantage, tokens), row in zip(rows, ragged(found, rows), strict=True):
        expected = credit.hicra([advantage] * len(tokens), [int(p) for _, p in tokens], alpha)
        assert row == pytest.approx(expected, abs=1e-12)
        assert all(value * advantage >= 0 for value in row)


def test_hicra_damps_failures_on_planning_tokens():
    rows = [(1.0, [(-1.0, True), (-1.0, False)]), (-1.0, [(-1.0, True)])]
    assert ragged(call("transform", "hicra", columns(rows)), rows) == [[1.2, 1.0], [-0.8]]


def given_columns(rows, width=9, fill=0.0):
    """Columns of [(group, advantage, [(entropy, planning), ...]), ...]."""
    lists = [tokens for _, _, tokens in rows]
    mask = torch.tensor([[t < len(row) for t in range(width)] for row in lists])
    return {
        "advantages": torch.tensor([a for _, a, _ in rows], dtype=torch.float64)[:, None] * mask,
        "entropy": pad([[h for h, _ in row] for row in lists], width, fill=fill),
        "planning_mask": pad([[float(p) for _, p in row] for row in lists], width).bool(),
        "lengths": torch.tensor([len(row) for row in lists]),
        "group_ids": torch.tensor([group for group, _, _ in rows]),
        "response_mask": mask,
    }


def by_hand(rows, alpha=0.2, k=0.3, rule="ceil", use_planning=False):
    literal = [(group, len(tokens), [(a, h, p) for h, p in tokens]) for group, a, tokens in rows]
    return credit.hicra_entropy(literal, alpha, k, rule, use_planning)


def responses(found, rows):
    return [found[i, : len(tokens)].tolist() for i, (_, _, tokens) in enumerate(rows)]


def plain(*entropies):
    return [(h, False) for h in entropies]


def test_entropy_form_by_hand():
    rows = [
        (0, 1.0, plain(0.1, 0.9, 0.2, 0.8)),  # right and long: ceil(0.3 * 4) = 2 tokens
        (0, 1.0, plain(0.5)),  # right and short
        (0, -1.0, plain(0.9, 0.9, 0.9, 0.9)),  # long and wrong
        (1, 2.0, plain(0.9, 0.1)),  # alone: never longer than its mean
    ]
    found = responses(call("transform", "hicra_entropy", given_columns(rows)), rows)
    assert found == [[1.0, 1.2, 1.0, 1.2], [1.0], [-1.0] * 4, [2.0, 2.0]]
    strict = responses(call("transform", "hicra_entropy", given_columns(rows), threshold_rule="strict"), rows)
    assert strict[0] == [1.0, 1.2, 1.0, 1.0]  # above sorted[int(0.7 * 4)] = 0.8


def test_planning_tokens_join_and_bypass_the_gate():
    rows = [(0, -1.0, [(0.0, True), (0.9, False)]), (0, 1.0, [(0.0, True), (0.5, False)])]
    found = call("transform", "hicra_entropy", given_columns(rows), use_planning_tokens=True)
    assert responses(found, rows) == [[-0.8, -1.0], [1.2, 1.0]]


def test_equal_entropies_select_the_earlier_tokens():
    rows = [(0, 1.0, plain(0.5, 0.5, 0.5, 0.5)), (0, 0.0, plain(0.1))]
    assert responses(call("transform", "hicra_entropy", given_columns(rows)), rows)[0] == [1.2, 1.2, 1.0, 1.0]


@settings(deadline=None, max_examples=80)
@given(
    sequences,
    st.floats(0, 1),
    st.sampled_from([0.0, 0.2, 0.3, 0.5, 1.0]),
    st.sampled_from(["ceil", "strict"]),
    st.booleans(),
)
def test_entropy_form_equals_the_reference(rows, alpha, k, rule, use_planning):
    params = {"alpha": alpha, "entropy_topk": k, "threshold_rule": rule, "use_planning_tokens": use_planning}
    found = responses(call("transform", "hicra_entropy", given_columns(rows, fill=NAN), **params), rows)
    for row, expected in zip(found, by_hand(rows, alpha, k, rule, use_planning), strict=True):
        assert row == pytest.approx(expected, abs=1e-12)


def test_tokens_of_a_tool_neither_count_nor_gain():
    given_ = given_columns([(0, 1.0, plain(0.2, 9.0, 9.0, 0.9, 0.1)), (0, 0.0, plain(0.1))])
    given_["response_mask"][0, 1:3] = False  # two tokens that the policy did not choose
    given_["advantages"] = given_["advantages"].where(given_["response_mask"], 0.0)
    given_["lengths"] = given_["response_mask"].sum(-1)
    found = call("transform", "hicra_entropy", given_, entropy_topk=0.3)
    assert found[0, :5].tolist() == [1.0, 0.0, 0.0, 1.2, 1.0]  # ceil(0.3 * 3) = 1 token


@pytest.mark.parametrize(("advantages", "first"), [([-0.5, 2.0, 0.0], -0.4), ([-1.0, 1.0, 0.0], -1.0)])
def test_the_gate_sees_the_advantage_of_the_whole_sequence(advantages, first):
    given_ = given_columns([(0, 1.0, plain(0.9, 0.1, 0.2)), (0, 0.0, plain(0.1))])
    given_["advantages"][0, :3] = torch.tensor(advantages)
    found = call("transform", "hicra_entropy", given_)
    assert found[0, :3].tolist() == [first, *advantages[1:]]


def example(lengths=(4, 1, 2, 3)):
    batch = make_batch([[-1.0] * n for n in lengths], [1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0])
    entropy = torch.arange(float(batch.response_mask.numel()), dtype=torch.float64).view(batch.response_mask.shape)
    return batch.replace(entropy=entropy, planning_mask=torch.zeros_like(batch.response_mask), sepa_lambda=0.0)


def pipeline(*chain):
    credit = [find("advantage", "grpo").bind(), *(find("transform", name).bind() for name in chain)]
    signals = {"uncertainty": find("uncertainty", "surprisal").bind()}
    given = frozenset({"planning_mask", "sepa_lambda"})
    return Pipeline.resolve(credit, find("filter", "none").bind(), signals.get, given=given)


def test_credit_asks_for_the_policys_entropy_and_never_compounds():
    assigned = pipeline("hicra_entropy")
    assert assigned.policy_columns == {"entropy"}
    once, metrics = assigned.credit(example())
    again, repeated = assigned.credit(once)
    assert torch.equal(again.advantages, once.advantages)
    assert repeated == metrics
    assert once.advantages[0].tolist() == pytest.approx([0.5, 0.5, 0.6, 0.6])
    # of 10 tokens, 2 of the completion of 4 and 1 of that of 3 (the mean is 2.5)
    assert metrics["hicra/amplified_token_ratio"] == pytest.approx(3 / 10)
    assert metrics["hicra/advantage_shift"] == pytest.approx(0.2 * 0.5 * 3 / 10)
