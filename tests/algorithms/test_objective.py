from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.algorithms.objective import Objective
from retrain.errors import ComponentError
from retrain.registry import find
from tests.algorithms.conftest import make_batch

VECTORS = json.loads((Path(__file__).parents[1] / "data/vectors.json").read_text())
REDUCTIONS = ["token_mean", "sequence_mean", "dr_grpo"]


def objective(*terms, reduction="token_mean"):
    return Objective([find("loss", name).bind(params) for name, params in terms], find("reduction", reduction).bind())


def mixed():
    """The published batch: three rows of the policy, two of an expert."""
    case = VECTORS["mix"]["input"]
    mask = torch.tensor(case["mask"]).bool()
    double = {name: torch.tensor(case[name], dtype=torch.float64) for name in ("logprob", "old_logprob", "advantages")}
    batch = make_batch([[0.0] * 4] * 5, [0.0] * 5).replace(
        response_mask=mask,
        attention_mask=mask,
        advantages=double["advantages"],
        is_expert=torch.tensor(case["expert_mask"]),
    )
    return batch, {
        "logprobs": double["logprob"],
        "old_logprobs": double["old_logprob"],
        "ref_logprobs": double["old_logprob"],
        "advantages": double["advantages"],
        "response_mask": mask,
        "entropy": -double["logprob"],
    }


@pytest.mark.parametrize(("reduction", "key"), [("token_mean", "expected"), ("sequence_mean", "sequence_mean")])
def test_published_mix_vectors(reduction, key):
    batch, columns = mixed()
    mu = VECTORS["mix"]["input"]["mu"]
    terms = objective(("ppo_clip", {"weight": 1 - mu, "dual_clip": 3.0}), ("sft", {"weight": mu}), reduction=reduction)
    total, metrics = terms(columns, terms.weights(batch))
    expected = VECTORS["mix"][key]
    # the reference adds 1e-8 to its denominators
    assert total.item() == pytest.approx(expected["loss"], abs=5e-9)
    assert metrics["loss/ppo_clip"].item() == pytest.approx(expected["usual/pg_loss"], abs=5e-8)
    assert metrics["loss/sft"].item() == pytest.approx(expected["expert/sft_loss"], abs=5e-8)


@settings(deadline=None, max_examples=40)
@given(st.permutations(range(5)), st.sets(st.integers(1, 4)), st.sampled_from(REDUCTIONS))
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(order, cuts, reduction):
    batch, columns = mixed()
    terms = objective(
        ("ppo_clip", {}), ("kl", {"weight": 0.1}), ("entropy", {"weight": 0.01}), ("sft", {}), reduction=reduction
    )

    def run(parts):
        lp = columns["logprobs"].clone().requires_grad_()
        weights = terms.weights(batch)
        totals, sums = [], []
        for rows in parts:
            mine = {name: value[rows] for name, value in (columns | {"logprobs": lp, "entropy": -lp}).items()}
            total, metrics = terms(mine, {name: weight[rows] for name, weight in weights.items()})
            total.backward()
            totals.append(total.item())
            sums.append(metrics)
        return lp.grad, sum(totals), {name: sum(part[name].item() for part in sums) for name in sums[0]}

    bounds = [0, *sorted(cuts), 5]
    parts = [list(order)[a:b] for a, b in pairwise(bounds)]
    gradient, total, metrics = run(parts)
    whole_gradient, whole_total, whole_metrics = run([list(range(5))])
    torch.testing.assert_close(gradient, whole_gradient)
    assert total == pytest.approx(whole_total, abs=1e-12)
    assert metrics == pytest.approx(whole_metrics, abs=1e-12)


def test_the_expert_rows_never_meet_the_policys_terms():
    batch, _ = mixed()
    weights = objective(("ppo_clip", {}), ("sft", {"weight": 0.5})).weights(batch)
    assert weights["ppo_clip"][3:].tolist() == [[0.0] * 4] * 2
    assert weights["sft"][:3].tolist() == [[0.0] * 4] * 3
    assert weights["ppo_clip"].sum().item() == pytest.approx(1.0)
    assert weights["sft"].sum().item() == pytest.approx(0.5)


def test_live_rows():
    batch, _ = mixed()
    batch = batch.replace(advantages=batch.advantages * torch.tensor([[1.0], [0.0], [1.0], [0.0], [0.0]]).double())
    assert objective(("ppo_clip", {})).live_rows(batch).tolist() == [True, False, True, False, False]
    assert objective(("ppo_clip", {}), ("sft", {})).live_rows(batch).tolist() == [True, False, True, True, True]
    assert objective(("kl", {"weight": 0.1})).live_rows(batch).tolist() == [True, True, True, False, False]


def test_rows_left_out_change_nothing_but_the_work():
    batch, columns = mixed()
    batch = batch.replace(advantages=batch.advantages * torch.tensor([[1.0], [0.0], [1.0], [0.0], [0.0]]).double())
    columns["advantages"] = batch.advantages
    terms = objective(("ppo_clip", {}))
    rows = terms.live_rows(batch)
    weights = terms.weights(batch)
    part = {name: value[rows] for name, value in columns.items()}
    assert terms(part, {"ppo_clip": weights["ppo_clip"][rows]})[0] == terms(columns, weights)[0]


def test_what_it_reads():
    terms = objective(("ppo_clip", {}), ("kl", {"weight": 0.1}), ("entropy", {}))
    assert terms.reads == {"old_logprobs", "advantages", "response_mask", "ref_logprobs"}
    assert terms.signals == {"ref_logprobs"}
    assert "entropy" in objective(("reinforce", {}), ("entropy", {"weight": -0.1})).reads


def test_no_reference_is_read_at_weight_zero():
    assert objective(("ppo_clip", {}), ("kl", {})).signals == frozenset()


def test_refusals():
    with pytest.raises(ComponentError, match="no loss term"):
        objective(("kl", {}))
    with pytest.raises(ComponentError, match='"ppo_clip" is listed twice'):
        objective(("ppo_clip", {}), ("ppo_clip", {"eps_high": 0.28}))
