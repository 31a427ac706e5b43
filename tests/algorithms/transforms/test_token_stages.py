import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.algorithms.transforms.token_stages import transform_chain
from tests.algorithms.conftest import call, make_batch, pad
from tests.reference import credit

pytestmark = pytest.mark.numeric

tokens = st.lists(st.tuples(st.floats(-8, 0), st.booleans()), min_size=1, max_size=7)
batches = st.lists(st.tuples(st.floats(-2, 2), tokens), min_size=1, max_size=4)
NAN = float("nan")


def columns(rows, fill=0.0, width=9):
    """Columns of [(advantage, [(logprob, planning), ...]), ...]; `fill` is what padding of the inputs holds."""
    logprobs = [[lp for lp, _ in tokens] for _, tokens in rows]
    batch = make_batch(logprobs, [0.0] * len(rows), width=width, fill=fill)
    mask = batch.response_mask
    return {
        "advantages": torch.tensor([a for a, _ in rows], dtype=torch.float64)[:, None] * mask,
        "uncertainty": pad([credit.surprisal(row) for row in logprobs], width, fill=fill),
        "planning_mask": pad([[float(p) for _, p in tokens] for _, tokens in rows], width).bool(),
        "response_mask": mask,
        "sampler_logprobs": batch.sampler_logprobs,
        "group_ids": batch.group_ids,
    }


def ragged(tensor, rows):
    return [tensor[i, : len(tokens)].tolist() for i, (_, tokens) in enumerate(rows)]


def test_documented_modes():
    assert transform_chain("none") == ()
    assert transform_chain("sepa") == transform_chain("gtpo_sepa") == ("sepa", "gtpo")
    assert transform_chain("gtpo_hicra") == ("gtpo", "hicra")
    assert transform_chain("my.plugin") == ("my.plugin",)
    assert transform_chain(["whiten", "my.plugin"]) == ("whiten", "my.plugin")


def test_gtpo_by_hand():
    rows = [(1.0, [(-1.0, False), (-3.0, False)])]
    assert ragged(call("transform", "gtpo", columns(rows), beta=0.5), rows)[0] == pytest.approx([0.75, 1.25])


@settings(deadline=None, max_examples=60)
@given(batches, st.floats(0, 4))
def test_gtpo_equals_the_printed_formula(rows, beta):
    found = ragged(call("transform", "gtpo", columns(rows, NAN), beta=beta), rows)
    for (advantage, tokens), row in zip(rows, found, strict=True):
        expected = credit.gtpo(advantage, credit.surprisal([lp for lp, _ in tokens]), beta)
        assert row == pytest.approx(expected, abs=1e-9)


def test_gtpo_leaves_a_sequence_without_surprise_alone():
    rows = [(1.5, [(0.0, False), (-1e-8, False)]), (1.0, [(-2.0, False)])]
    assert ragged(call("transform", "gtpo", columns(rows), beta=3.0), rows)[0] == [1.5, 1.5]


@settings(deadline=None, max_examples=60)
@given(batches, st.floats(-0.5, 1.5))
def test_sepa_equals_the_printed_formula_and_keeps_the_mean(rows, lam):
    given_ = columns(rows, NAN) | {"sepa_lambda": lam}
    found = ragged(call("transform", "sepa", given_), rows)
    for (_, tokens), row in zip(rows, found, strict=True):
        h, planning = credit.surprisal([lp for lp, _ in tokens]), [p for _, p in tokens]
        assert row == pytest.approx(credit.sepa(h, planning, lam), abs=1e-9)
        assert sum(row) == pytest.approx(sum(h), abs=1e-9)


def test_surprisal_mask_keeps_the_top_share_of_each_group():
    rows = [(1.0, [(-1.0, False), (-4.0, False)]), (2.0, [(-3.0, False), (-2.0, False)]), (1.0, [(-0.5, False)])]
    given_ = columns(rows) | {"group_ids": torch.tensor([4, 4, 1])}
    assert ragged(call("transform", "surprisal_mask", given_, rho=0.5), rows) == [[0, 1], [2, 0], [1]]
    assert ragged(call("transform", "surprisal_mask", given_), rows) == [[1, 1], [2, 2], [1]]
    assert ragged(call("transform", "surprisal_mask", given_, rho=1.0), rows) == [[1, 1], [2, 2], [1]]


@settings(deadline=None, max_examples=40)
@given(batches)
def test_whiten_equals_the_printed_formula(rows):
    found = ragged(call("transform", "whiten", columns(rows)), rows)
    expected = credit.whiten([[a] * len(tokens) for a, tokens in rows])
    for row, want in zip(found, expected, strict=True):
        assert row == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("rows", [1, 3])
def test_whiten_gives_equal_advantages_no_credit(rows):
    given_ = columns([(0.1, [(-1.0, False)] * 7)] * rows)
    given_["advantages"] = given_["advantages"].float()
    assert call("transform", "whiten", given_).abs().max() == 0
    assert call("transform", "whiten", columns([(3.0, [(-1.0, False)])])).sum() == 0


def mismatch(name, differences, **params):
    rows = [(1.0, [(-1.0, False)] * len(row)) for row in differences]
    given_ = columns(rows, NAN)
    given_["old_logprobs"] = given_["sampler_logprobs"] + pad(differences, 9)
    return ragged(call("transform", name, given_, **params), rows)


def test_tis_truncates_and_mis_drops():
    log = math.log
    assert mismatch("tis", [[0.0, log(3), log(0.1)]])[0] == pytest.approx([1, 2, 0.1])
    assert mismatch("mis", [[0.0, log(3), log(0.4), log(5.5)]])[0] == pytest.approx([1, 3, 0, 0])
    assert mismatch("tis", [[500.0, -500.0]])[0] == pytest.approx([2, math.exp(-20)])


def test_levels_of_the_mismatch_ratio():
    log = math.log
    assert mismatch("tis", [[log(0.5), log(0.8)]], level="sequence")[0] == pytest.approx([0.4, 0.4])
    assert mismatch("tis", [[log(0.4), log(0.9)], [0.0]], level="geometric") == [pytest.approx([0.6, 0.6]), [1.0]]
    assert mismatch("mis", [[log(0.5), log(0.8)]], level="sequence")[0] == [0, 0]


@pytest.mark.parametrize("name", ["gtpo", "sepa", "hicra", "surprisal_mask", "whiten", "tis", "mis"])
def test_rows_padding_and_what_padding_holds_do_not_matter(name):
    rows = [
        (1.0, [(-1.0, True), (-4.0, False)]),
        (-2.0, [(-3.0, False), (-2.0, True), (-1.5, False)]),
        (0.5, [(-1.0, False)]),
    ]
    params = {"rho": 0.5} if name == "surprisal_mask" else {}

    def run(rows, width, fill):
        given_ = columns(rows, fill, width) | {"sepa_lambda": 0.3}
        given_["old_logprobs"] = given_["sampler_logprobs"] * 1.1
        return ragged(call("transform", name, given_, **params), rows)

    plain = run(rows, 3, 0.0)
    for other in (run(rows, 8, NAN), run(rows[::-1], 5, math.inf)[::-1]):
        for a, b in zip(other, plain, strict=True):
            assert a == pytest.approx(b, abs=1e-12)
