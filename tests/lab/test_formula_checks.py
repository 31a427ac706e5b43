from dataclasses import replace

import pytest

from retrain.lab.formula_checks import FormulaCheck, verify
from retrain.registry import find
from retrain.registry.component import REGISTERED


def failed(trials=6):
    return [check.name for check in verify(trials) if not check.ok]


def test_every_property_holds_for_what_is_built_in():
    checks = list(verify(10, seed=3))
    assert len(checks) == 10
    assert not [check for check in checks if not check.ok]
    assert {check.trials for check in checks} == {10}


def test_a_nan_is_a_failure():
    assert not FormulaCheck("x", float("nan"), 1.0, above=False, trials=1).ok
    assert not FormulaCheck("x", float("nan"), 1.0, above=True, trials=1).ok


def without_groups(correct, lengths, group_ids, turn_ids, *, beta=0.2, dynamic=False):
    return find("advantage", "dca").target(correct, lengths, group_ids * 0, turn_ids, beta=beta, dynamic=dynamic)


def longer_is_better(correct, lengths, group_ids, turn_ids, *, beta=0.2, dynamic=False):
    return find("advantage", "dca").target(correct, lengths, group_ids, turn_ids, beta=-beta, dynamic=dynamic)


def penalty_for_all(rewards, lengths, max_tokens, *, gamma=1e-3):
    return rewards - gamma * lengths


def without_others(advantages, process_rewards, group_ids, response_mask, *, gamma=1.0, norm="batch"):
    return advantages + process_rewards * response_mask


def per_batch_mean(logprobs, response_mask):
    return -logprobs / len(logprobs)


@pytest.mark.parametrize(
    ("kind", "name", "wrong", "noticed"),
    [
        ("advantage", "dca", without_groups, "sum to 0"),
        ("advantage", "dca", longer_is_better, "DCA equals its formula"),
        ("advantage", "grpo_lp", penalty_for_all, "coupled penalty"),
        ("advantage", "rloo", lambda rewards, group_ids: rewards - rewards.mean(), "leave-one-out"),
        ("transform", "process_rloo", without_others, "PRIME: its literal form"),
        ("loss", "sft", per_batch_mean, "micro-batches"),
        ("loss", "sft", per_batch_mean, "simulated ranks"),
    ],
)
def test_a_wrong_formula_is_noticed(monkeypatch, kind, name, wrong, noticed):
    right = find(kind, name)
    broken = replace(right, target=wrong)
    if wrong in (without_groups, longer_is_better):
        monkeypatch.setattr(f"{__name__}.find", lambda kind, name: right)
    monkeypatch.setitem(REGISTERED, (kind, name), broken)
    assert any(noticed in claim for claim in failed())
