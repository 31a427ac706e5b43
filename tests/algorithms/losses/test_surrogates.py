import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.registry import components, find
from tests.algorithms.conftest import call
from tests.reference import losses as reference

pytestmark = pytest.mark.numeric

VECTORS = json.loads((Path(__file__).parents[2] / "data/vectors.json").read_text())
POLICY_TERMS = ["reinforce", "ppo_clip", "gspo", "cispo"]
numbers = st.floats(-6, 0)
token = st.tuples(numbers, numbers, st.floats(-2, 2))


def tensors(rows):
    lp, old, advantage = (torch.tensor(column, dtype=torch.float64)[None] for column in zip(*rows, strict=True))
    return {
        "logprobs": lp.requires_grad_(),
        "old_logprobs": old,
        "ref_logprobs": old,
        "entropy": -lp,
        "advantages": advantage,
        "response_mask": torch.ones_like(lp, dtype=torch.bool),
    }


@settings(deadline=None, max_examples=80)
@given(st.lists(token, min_size=1, max_size=6))
def test_every_term_equals_the_printed_formula(rows):
    columns = tensors(rows)
    lps, olds, advantages = zip(*rows, strict=True)
    each = list(zip(*(lps, olds, advantages), strict=True))
    expected = {
        ("ppo_clip",): [reference.ppo_clip(*row, 0.2, 0.28) for row in each],
        ("ppo_clip", ("eps_low", 0.1), ("eps_high", 0.28), ("dual_clip", 3.0)): [
            reference.ppo_clip(*row, 0.1, 0.28, 3.0) for row in each
        ],
        ("gspo",): [reference.gspo(lps, olds, a) for a in advantages],
        ("cispo",): [reference.cispo(*row) for row in each],
        ("reinforce",): [-lp * a for lp, _, a in each],
        ("entropy",): list(lps),
        ("sft",): [-lp for lp in lps],
        ("sft_phi",): [-math.exp(lp) * (1 - math.exp(lp)) * lp for lp in lps],
        **{("kl", ("estimator", k)): [reference.kl(lp, old, k) for lp, old, _ in each] for k in ("k1", "k2", "k3")},
    }
    for (name, *params), want in expected.items():
        found = call("loss", name, columns, **dict(params))
        assert found[0].tolist() == pytest.approx(want, abs=1e-9), (name, params)


def test_published_ppo_vector():
    case = VECTORS["ppo_clip"]
    columns = {
        "logprobs": torch.tensor(case["new"], dtype=torch.float64),
        "old_logprobs": torch.tensor(case["old"], dtype=torch.float64),
        "advantages": torch.tensor(case["adv"], dtype=torch.float64),
        "response_mask": torch.tensor(case["mask"]).bool(),
    }
    bound = find("loss", "ppo_clip").bind({"eps_low": case["clip"], "eps_high": case["clip"]})
    values, metrics = bound(*(columns[name] for name in bound.reads))
    weight = find("reduction", "token_mean").bind()(columns["response_mask"].double())
    expected = case["expected"]
    assert (values * weight).sum().item() == pytest.approx(expected["loss_token_mean"], abs=1e-9)
    assert (metrics["policy/clip_fraction"] * weight).sum().item() == pytest.approx(expected["clipfrac"], abs=1e-9)
    assert (metrics["policy/approx_kl"] * weight).sum().item() == pytest.approx(expected["ppo_kl"], abs=1e-9)


@pytest.mark.parametrize("case", VECTORS["mix"]["chord_phi"], ids=lambda case: str(case["logprob"]))
def test_published_token_weight_of_chord_carries_no_gradient(case):
    columns = tensors([(case["logprob"], 0.0, 0.0)])
    value = call("loss", "sft_phi", columns)
    value.sum().backward()
    assert value.item() == pytest.approx(case["loss_token"], abs=1e-12)
    assert columns["logprobs"].grad.item() == pytest.approx(-case["phi"], abs=1e-12)


@pytest.mark.parametrize("name", POLICY_TERMS)
def test_gradient_at_ratio_one_is_minus_the_advantage(name):
    columns = tensors([(-1.0, -1.0, 0.7), (-2.5, -2.5, 0.7), (-0.1, -0.1, 0.7)])
    call("loss", name, columns).sum().backward()
    assert columns["logprobs"].grad[0].tolist() == pytest.approx([-0.7] * 3, abs=1e-12)


def test_no_gradient_past_the_trust_region_but_always_back_into_it():
    inside, outside = math.log(1.1), math.log(1.5)
    columns = tensors([(outside, 0.0, 1.0), (outside, 0.0, -1.0), (-outside, 0.0, -1.0), (inside, 0.0, 1.0)])
    call("loss", "ppo_clip", columns).sum().backward()
    assert columns["logprobs"].grad[0].tolist() == pytest.approx([0.0, 1.5, 0.0, -1.1])


@settings(deadline=None, max_examples=80)
@given(st.lists(token, min_size=1, max_size=6), st.sampled_from([(3e-4, 4e-4), (0.2, 0.28)]))
def test_gspo_gives_each_token_the_gradient_of_its_own_advantage(rows, eps):
    columns = tensors(rows)
    values = call("loss", "gspo", columns, eps_low=eps[0], eps_high=eps[1])
    values.sum().backward()
    expected, derivatives = reference.gspo_token(*zip(*rows, strict=True), *eps)
    assert values[0].tolist() == pytest.approx(expected, abs=1e-9)
    assert columns["logprobs"].grad[0].tolist() == pytest.approx(derivatives, abs=1e-9)


@settings(deadline=None, max_examples=80)
@given(st.lists(token, min_size=1, max_size=6), st.sampled_from([(3e-4, 4e-4), (0.2, 0.28)]))
def test_gspo_with_the_arithmetic_mean_of_ratios(rows, eps):
    """GRPO-S, arXiv:2508.04349: the value is that of the mean ratio, the derivative that of each token's own."""
    columns = tensors(rows)
    values = call("loss", "gspo", columns, eps_low=eps[0], eps_high=eps[1], ratio_mean="arithmetic")
    values.sum().backward()
    ratios = [math.exp(lp - old) for lp, old, _ in rows]
    mean = sum(ratios) / len(ratios)
    bounded = min(max(mean, 1 - eps[0]), 1 + eps[1])
    expected = [-min(mean * advantage, bounded * advantage) for *_, advantage in rows]
    moved = [mean * advantage <= bounded * advantage for *_, advantage in rows]
    derivatives = [-r * row[2] * free for r, row, free in zip(ratios, rows, moved, strict=True)]
    assert values[0].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert columns["logprobs"].grad[0].tolist() == pytest.approx(derivatives, rel=1e-9, abs=1e-9)


def test_gspo_with_the_arithmetic_mean_gives_an_empty_row_no_gradient():
    columns = tensors([(-1.0, -1.5, 1.0)])
    columns["response_mask"][:] = False
    call("loss", "gspo", columns, ratio_mean="arithmetic").sum().backward()
    assert columns["logprobs"].grad.tolist() == [[0.0]]


@settings(deadline=None, max_examples=80)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6), st.floats(-2, 2), st.booleans())
def test_gspo_of_a_sequence_advantage_is_the_objective_of_whole_sequences(pairs, advantage, small):
    scale = 1e-4 if small else 1.0
    columns = tensors([(lp, lp + scale * old, advantage) for lp, old in pairs])
    call("loss", "gspo", columns).mean().backward()
    token_form, columns["logprobs"].grad = columns["logprobs"].grad, None
    s = (columns["logprobs"] - columns["old_logprobs"]).mean().exp()
    torch.min(s * advantage, s.clamp(1 - 3e-4, 1 + 4e-4) * advantage).neg().backward()
    assert torch.allclose(token_form, columns["logprobs"].grad, rtol=0, atol=1e-12)


def test_cispo_cuts_the_weight_and_keeps_the_gradient():
    columns = tensors([(3.0, 0.0, 1.0), (0.5, 0.0, 1.0)])
    call("loss", "cispo", columns).sum().backward()
    assert columns["logprobs"].grad[0].tolist() == pytest.approx([-5.0, -math.exp(0.5)])


@pytest.mark.parametrize("name", sorted(c.name for c in components("loss") if c.source == "built-in"))
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_whatever_padding_holds_gives_zero_loss_and_zero_gradient_there(name, poison):
    bound = find("loss", name).bind()
    mask = torch.tensor([[False, True, True, False]])
    columns = {
        column: torch.tensor([[poison, -1.0, -700.0, poison]], dtype=torch.float64, requires_grad=True)
        for column in ("logprobs", "old_logprobs", "ref_logprobs", "entropy", "advantages")
    }
    columns["old_logprobs"] = torch.tensor([[poison, -700.0, -1.0, poison]], dtype=torch.float64)
    columns["sampler_logprobs"] = columns["old_logprobs"]
    columns["high_covariance"] = torch.tensor([[poison, 1.0, 1.0, poison]], dtype=torch.float64)
    values = call("loss", name, columns | {"response_mask": mask, "entropy_coefficient": 0.5})
    values.sum().backward()
    assert values.isfinite().all()
    assert values[~mask].tolist() == [0.0, 0.0]
    for column in bound.reads:
        gradient = getattr(columns.get(column), "grad", None)
        if gradient is not None:
            assert gradient.isfinite().all()
            assert gradient[~mask].tolist() == [0.0, 0.0]
