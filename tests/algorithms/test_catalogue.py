"""Published methods against vectors that were computed independently of this package, in float64."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from retrain.registry import find
from tests.algorithms.conftest import call

pytestmark = pytest.mark.numeric

COMPONENTS = json.loads((Path(__file__).parents[1] / "data/catalogue.json").read_text())["components"]
LATER: set[str] = set()
"""They read columns that nothing provides yet."""
ENTRIES = [(name, entry, case) for name, entry in COMPONENTS.items() if name not in LATER for case in entry["cases"]]
CASES = [pytest.param(entry, case, id=f"{name}: {case['id']}") for name, entry, case in ENTRIES]
INTEGERS = {"group_ids", "turn_ids", "anchor_ids", "lengths"}
BOOLEANS = {"response_mask", "correct"}


def column(name, value):
    """A column in float64, its own integers or booleans; null is NaN. Weights stay a tuple."""
    if name == "reward_weights":
        return tuple(value)
    if name in INTEGERS | BOOLEANS:
        return torch.tensor(value, dtype=torch.bool if name in BOOLEANS else torch.long)
    filled = json.loads(json.dumps(value).replace("null", "NaN"))
    return torch.tensor(filled, dtype=torch.float64)


def columns_of(case):
    columns: dict[str, Any] = {name: column(name, value) for name, value in case["columns"].items()}
    if "logprobs" in columns:
        columns["logprobs"].requires_grad_()
    return {"step": 0, **columns}


@pytest.mark.parametrize("constant", ["advantages", "old_logprobs"])
def test_a_constant_column_has_no_covariance(constant):
    """Float32 of -0.7 less its mean is not 0, and noise is not covariance."""
    generator = torch.Generator().manual_seed(0)
    columns = {name: torch.randn(8, 1, generator=generator).expand(8, 50) for name in ("advantages", "old_logprobs")}
    columns |= {constant: torch.full((8, 50), -0.7), "response_mask": torch.ones(8, 50, dtype=torch.bool)}
    assert not call("signal", "high_covariance", columns, rate=0.01).any()
    kept = call("transform", "clip_cov", {**columns, "step": 0}, rate=1.0, low=0.0)
    assert torch.equal(kept, columns["advantages"])


@pytest.mark.parametrize("shape", [(2, 0), (2, 3)])
def test_nothing_covaries_in_a_batch_without_tokens(shape):
    columns = {name: torch.ones(shape) for name in ("advantages", "old_logprobs")}
    columns["response_mask"] = torch.zeros(shape, dtype=torch.bool)
    assert not call("signal", "high_covariance", columns).any()
    assert torch.equal(call("transform", "clip_cov", {**columns, "step": 0}), columns["advantages"])


def test_a_weight_of_dppo_has_no_limit_where_none_is_wanted():
    names = ("logprobs", "sampler_logprobs", "advantages")
    columns = {name: torch.full((1, 1), value).double() for name, value in zip(names, (-0.1, -4.1, 1.0), strict=True)}
    columns["response_mask"] = torch.ones(1, 1, dtype=torch.bool)
    settings = {"low": 1.0, "high": 1.0}
    limited, free = (call("loss", "dppo", columns, cap=cap, **settings).item() for cap in (20.0, "none"))
    assert (limited, free) == (pytest.approx(2.0), pytest.approx(0.1 * math.exp(4.0)))


@pytest.mark.parametrize(("advantage", "share"), [(1.0, 1.0), (0.0, 0.0), (-1.0, 0.0)])
def test_dppo_drops_tokens_whose_advantage_pushes_them_further_away_and_counts_them(advantage, share):
    """The probability is .9, and was .018."""
    bound = find("loss", "dppo").bind({})
    columns = {"logprobs": -0.1, "sampler_logprobs": -4.0, "advantages": advantage}
    columns = {name: torch.tensor([[value]]) for name, value in columns.items()} | {
        "response_mask": torch.tensor([[True]])
    }
    _, metrics = bound(*(columns[name] for name in bound.reads))
    assert metrics["policy/clip_fraction"].item() == share


@pytest.mark.parametrize(("entry", "case"), CASES)
def test_values_and_gradients_are_the_published_ones(entry, case):
    columns = columns_of(case)
    found = call(entry["kind"], entry["name"], columns, **case["params"])
    expected = torch.tensor(case["expected"], dtype=torch.float64)
    tolerance = entry.get("tolerance", 1e-9)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    mask = columns.get("response_mask")
    if mask is not None and found.dim() == 2:
        assert not found[~mask].any()
    zero = case.get("exact_zero")
    if zero is not None:
        assert not (found if zero in (True, "all") else found[torch.tensor(zero)]).any()
    if "expected_grad" in case:
        found.sum().backward()
        gradient = columns["logprobs"].grad
        expected = torch.tensor(case["expected_grad"], dtype=torch.float64)
        torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=tolerance)
        assert not gradient[~mask].any()


@pytest.mark.parametrize("entry", [pytest.param(e, id=n) for n, e in COMPONENTS.items() if n not in LATER])
def test_defaults_are_the_documented_ones(entry):
    defaults = find(entry["kind"], entry["name"]).schema().model_dump(exclude={"weight"})
    assert defaults == entry["defaults"]


PER_ROW = {"step", "reward_weights"}


def ordered(entry, case):
    """The rows of a case, its columns with NaN outside the mask, and what the component makes of them."""
    columns = columns_of(case)
    rows = next(len(value) for name, value in columns.items() if name not in PER_ROW)
    return columns, rows


@pytest.mark.parametrize(("entry", "case"), CASES)
def test_rows_may_stand_in_any_order(entry, case):
    """Each row keeps its own result: groups are found by their ids, not by where they stand."""
    columns, rows = ordered(entry, case)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
    moved = {name: value if name in PER_ROW else value.detach()[order] for name, value in columns.items()}
    params = case["params"]
    found = call(entry["kind"], entry["name"], columns, **params).detach()
    torch.testing.assert_close(call(entry["kind"], entry["name"], moved, **params), found[order], rtol=1e-9, atol=1e-9)


LOSSES = [
    pytest.param(entry, case, id=f"{name}: {case['id']}") for name, entry, case in ENTRIES if entry["kind"] == "loss"
]


@pytest.mark.parametrize(("entry", "case"), LOSSES)
def test_a_loss_looks_at_one_row_at_a_time(entry, case):
    """Splitting a batch into micro-batches changes neither values nor gradients."""
    columns, rows = ordered(entry, case)
    whole = call(entry["kind"], entry["name"], columns, **case["params"])
    parts = [
        call(entry["kind"], entry["name"], {k: v if k in PER_ROW else v[i : i + 1] for k, v in columns.items()},
             **case["params"])
        for i in range(rows)
    ]  # fmt: skip
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)


TOKENS = [
    pytest.param(entry, case, id=f"{name}: {case['id']}")
    for name, entry, case in ENTRIES
    if "response_mask" in case["columns"]
]


@pytest.mark.parametrize(("entry", "case"), TOKENS)
def test_what_stands_outside_the_mask_does_not_matter(entry, case):
    """NaN and infinity there give the same values, and losses a finite gradient that is exactly 0 there."""
    columns, _ = ordered(entry, case)
    mask = columns["response_mask"]
    found = call(entry["kind"], entry["name"], columns, **case["params"]).detach()
    for rubbish in (float("nan"), float("inf"), -1e30):
        dirty = {
            name: value.detach().masked_fill(~mask, rubbish)
            if getattr(value, "is_floating_point", bool)() and value.shape == mask.shape
            and name not in {"advantages", "turn_rewards"}
            else value
            for name, value in columns.items()
        }  # fmt: skip
        if "logprobs" in dirty:
            dirty["logprobs"] = dirty["logprobs"].detach().requires_grad_()
        result = call(entry["kind"], entry["name"], dirty, **case["params"])
        torch.testing.assert_close(result.detach(), found, rtol=1e-12, atol=1e-12)
        if "logprobs" in dirty and result.requires_grad:
            result.sum().backward()
            assert dirty["logprobs"].grad.isfinite().all()
            assert not dirty["logprobs"].grad[~mask].any()
