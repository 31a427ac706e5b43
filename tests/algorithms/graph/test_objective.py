import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.algorithms.graph.objective import Objective
from retrain.errors import ComponentError
from retrain.registry import find
from tests.algorithms.conftest import make_batch

pytestmark = pytest.mark.numeric

VECTORS = json.loads((Path(__file__).parents[2] / "data/vectors.json").read_text())
REDUCTIONS = ["token_mean", "sequence_mean", "dr_grpo"]


def objective(*terms, reduction="token_mean", sft_reduction=None):
    bound = [find("loss", name).bind(params) for name, params in terms]
    own = sft_reduction and find("reduction", sft_reduction).bind()
    return Objective(bound, find("reduction", reduction).bind(), sft_reduction=own)


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
        "mu": case["mu"],
    }


def total(terms, batch, columns, parts):
    """Loss, gradient and metrics of a step that sees the rows in these parts, like micro-batches or processes."""
    lp = columns["logprobs"].clone().requires_grad_()
    step = terms.step(batch)
    mine = columns | {"logprobs": lp, "entropy": -lp}
    losses, sums = [], []
    for rows in parts:
        some = {name: value if name == "mu" else value[rows] for name, value in mine.items()}
        loss, metrics = step.of(some, {name: weight[rows] for name, weight in step.weights.items()})
        loss.backward()
        losses.append(loss.item())
        sums.append(metrics)
    return sum(losses), lp.grad, {name: sum(float(part[name]) for part in sums) for name in sums[0]}


SYMMETRIC = ("ppo_clip", {"eps_low": 0.2, "eps_high": 0.2, "dual_clip": 3.0})


@pytest.mark.parametrize(("reduction", "key"), [("token_mean", "expected"), ("sequence_mean", "sequence_mean")])
def test_published_mix_vectors(reduction, key):
    batch, columns = mixed()
    loss, _, metrics = total(objective(SYMMETRIC, ("sft", {}), reduction=reduction), batch, columns, [range(5)])
    expected = VECTORS["mix"][key]
    # the reference adds 1e-8 to every denominator, for the mean of a short sequence as well
    assert loss == pytest.approx(expected["loss"], abs=1e-9 if reduction == "token_mean" else 2e-9)
    assert metrics["loss/ppo_clip"] == pytest.approx(expected["usual/pg_loss"], abs=1e-8)
    assert metrics["loss/sft"] == pytest.approx(expected["expert/sft_loss"], abs=1e-8)
    if reduction == "token_mean":
        assert loss == pytest.approx(VECTORS["mix"]["recommended"], abs=1e-9)
        assert metrics["policy/clip_fraction"] == pytest.approx(VECTORS["mix"]["clip_fraction"], abs=1e-8)
        assert metrics["policy/approx_kl"] == pytest.approx(VECTORS["mix"]["approx_kl"], abs=1e-8)


def test_two_processes_with_half_the_rows_add_up_to_one():
    """Rows of one source may all be in one process, and rows may be padded to another width."""
    batch, columns = mixed()
    terms = objective(SYMMETRIC, ("kl", {"weight": 0.1}), ("sft_phi", {"weight": 2.0}))
    whole, gradient, metrics = total(terms, batch, columns, [range(5)])
    for halves in ([[0, 1, 2], [3, 4]], [[0, 3], [1, 2, 4]]):
        loss, grad, sums = total(terms, batch, columns, halves)
        assert loss == pytest.approx(whole, abs=1e-12)
        assert sums == pytest.approx(metrics, abs=1e-12)
        torch.testing.assert_close(grad, gradient)


@settings(deadline=None, max_examples=40)
@given(
    st.permutations(range(5)), st.sets(st.integers(1, 4)), st.sampled_from(REDUCTIONS), st.sampled_from([0, 0.3, 1.0])
)
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(order, cuts, reduction, mu):
    batch, columns = mixed()
    columns["mu"] = mu
    terms = objective(
        ("ppo_clip", {}), ("kl", {"weight": 0.1}), ("entropy", {"weight": 0.01}), ("sft", {}), reduction=reduction
    )
    parts = [list(order)[a:b] for a, b in pairwise([0, *sorted(cuts), 5])]
    loss, gradient, metrics = total(terms, batch, columns, parts)
    whole_loss, whole_gradient, whole_metrics = total(terms, batch, columns, [range(5)])
    torch.testing.assert_close(gradient, whole_gradient)
    assert loss == pytest.approx(whole_loss, abs=1e-12)
    assert metrics == pytest.approx(whole_metrics, abs=1e-12)


@pytest.mark.parametrize("policys", REDUCTIONS)
@pytest.mark.parametrize("experts", REDUCTIONS)
def test_the_sources_may_have_different_reductions(policys, experts):
    batch, columns = mixed()
    sft, ppo, mu = ("sft", {}), ("ppo_clip", {}), columns["mu"]
    left = total(objective(ppo, reduction=policys), batch, columns, [range(5)])
    right = total(objective(sft, reduction=experts), batch, columns, [range(5)])
    both = objective(ppo, sft, reduction=policys, sft_reduction=experts)
    for parts in ([range(5)], [[0, 3], [1, 4], [2]]):
        loss, gradient, metrics = total(both, batch, columns, parts)
        assert loss == pytest.approx((1 - mu) * left[0] + mu * right[0], abs=1e-12)
        torch.testing.assert_close(gradient, (1 - mu) * left[1] + mu * right[1])
        assert metrics["loss/sft"] == pytest.approx(right[0], abs=1e-12)


def test_mu_weighs_the_sources_and_only_where_there_are_both():
    batch, columns = mixed()
    sft, ppo = ("sft", {"weight": 3.0}), ("ppo_clip", {})
    alone = {name: total(objective(term), batch, columns, [range(5)]) for name, term in (("sft", sft), ("ppo", ppo))}
    for mu in (0.0, 0.25, 1.0):
        columns["mu"] = mu
        loss, gradient, metrics = total(objective(sft, ppo), batch, columns, [range(5)])
        assert loss == pytest.approx((1 - mu) * alone["ppo"][0] + mu * alone["sft"][0], abs=1e-12)
        torch.testing.assert_close(gradient, (1 - mu) * alone["ppo"][1] + mu * alone["sft"][1])
        assert metrics["loss/sft"] == pytest.approx(alone["sft"][0] / 3, abs=1e-12)
    assert objective(sft).signals == objective(ppo).signals == frozenset()
    assert objective(sft, ppo).signals == {"mu"}


def test_a_penalty_on_the_policy_counts_as_the_policys_part():
    batch, columns = mixed()
    plain = total(objective(("ppo_clip", {}), ("sft", {})), batch, columns, [range(5)])
    held = total(objective(("ppo_clip", {}), ("kl", {"weight": 0.5}), ("sft", {})), batch, columns, [range(5)])
    assert held[2]["loss/ppo_clip"] == plain[2]["loss/ppo_clip"]
    assert held[0] == pytest.approx(plain[0] + 0.9 * 0.5 * held[2]["loss/kl"], abs=1e-12)


def test_the_expert_rows_never_meet_the_policys_terms():
    batch, _ = mixed()
    weights = objective(("ppo_clip", {}), ("sft", {"weight": 0.5})).step(batch).weights
    assert weights["ppo_clip"][3:].tolist() == [[0.0] * 4] * 2
    assert weights["sft"][:3].tolist() == [[0.0] * 4] * 3
    assert weights["ppo_clip"].sum().item() == pytest.approx(1.0)
    assert weights["sft"].sum().item() == pytest.approx(1.0)


def test_live_rows():
    batch, _ = mixed()
    batch = batch.replace(advantages=batch.advantages * torch.tensor([[1.0], [0.0], [1.0], [0.0], [0.0]]).double())
    assert objective(("ppo_clip", {})).live_rows(batch).tolist() == [True, False, True, False, False]
    assert objective(("ppo_clip", {}), ("sft", {})).live_rows(batch).tolist() == [True, False, True, True, True]
    assert objective(("kl", {"weight": 0.1})).live_rows(batch).tolist() == [True, True, True, False, False]


def test_what_it_reads():
    assert objective(("ppo_clip", {}), ("kl", {})).signals == frozenset(), "no reference at weight 0"
    terms = objective(("ppo_clip", {}), ("kl", {"weight": 0.1}), ("entropy", {}))
    assert terms.reads == {"old_logprobs", "advantages", "response_mask", "ref_logprobs"}
    assert terms.signals == {"ref_logprobs"}
    assert "entropy" in objective(("reinforce", {}), ("entropy", {"weight": -0.1})).reads


def test_refusals():
    with pytest.raises(ComponentError, match="no loss term"):
        objective(("kl", {}))
    with pytest.raises(ComponentError, match='"ppo_clip" is listed twice'):
        objective(("ppo_clip", {}), ("ppo_clip", {"eps_high": 0.28}))


def test_a_correction_that_only_drops_tokens_reports_their_share():
    """Of six tokens the two of the second row have become unlikely and are punished."""
    batch = make_batch([[0.0, 0.0]] * 3, [0.0] * 3)
    mask = torch.ones(3, 2, dtype=torch.bool)
    advantages = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0]])
    batch = batch.replace(response_mask=mask, attention_mask=mask, advantages=advantages)
    old = torch.tensor([[-0.5, -0.5], [-2.0, -2.0], [-2.0, -2.0]])
    opsm = find("transform", "opsm").bind()
    step = Objective([find("loss", "ppo_clip").bind()], find("reduction", "token_mean").bind(), (opsm,)).step(batch)
    columns = {"advantages": advantages, "old_logprobs": old, "sampler_logprobs": old * 0 - 0.5, "response_mask": mask}
    _, metrics = step.of(columns | {"logprobs": old.clone().requires_grad_()}, step.weights)
    assert metrics["policy/opsm_fraction"].item() == pytest.approx(1 / 3)
