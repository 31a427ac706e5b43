import json

import pytest
import torch

from retrain.registry import find
from tests.algorithms.conftest import make_batch

pytestmark = pytest.mark.numeric


def schedule(total_steps=200, **params):
    given = {"steps": 500, "delay_steps": 50, **params}
    return find("signal", "sepa_lambda").bind(given).build({"total_steps": total_steps})


def step_batch(step, rate=1.0, uncertainty=(1.0, 3.0, 9.0), planning=(0, 0, 1)):
    """Ten rows of three tokens; the last is planning."""
    rewards = [float(i < round(10 * rate)) for i in range(10)]
    batch = make_batch([[-1.0] * 3] * 10, rewards, step=step)
    shape = batch.response_mask.shape
    return batch.replace(
        uncertainty=torch.tensor(uncertainty).double().expand(shape),
        planning_mask=torch.tensor(planning).expand(shape).bool(),
    )


def run(part, steps, rates=None, **batch):
    """The weight at every step of a life cycle."""
    weights = []
    for step in range(steps):
        b = step_batch(step, rates[step] if rates else 1.0, **batch)
        part.before(b)
        weights.append(part(*(b.column(name) for name in ("step", "uncertainty", "planning_mask", "response_mask")))[0])
        part.after(b)
    return weights


def test_linear_ramp_after_the_delay():
    assert run(schedule(steps=4, delay_steps=2), 9) == [0, 0, 0, 0.25, 0.5, 0.75, 1, 1, 1]
    assert run(schedule(steps=0), 3) == [0, 0, 0]


@pytest.mark.parametrize("total", [2, 5, 20, 60, 200])
def test_by_default_the_weight_reaches_one_at_four_fifths_of_the_run(total):
    weights = run(schedule(total, steps="auto", delay_steps="auto"), total)
    assert weights[: total // 20 + 1] == [0.0] * (total // 20 + 1)
    assert weights[max(total * 4 // 5, 1) :] == [1.0] * (total - max(total * 4 // 5, 1))
    assert weights == sorted(weights)


def test_a_late_gate_makes_the_automatic_rise_steeper():
    rates = [0.0] * 10 + [1.0] * 10
    weights = run(schedule(20, steps="auto", delay_steps="auto"), 20, rates)
    assert weights[:12] == [0.0] * 12
    assert weights[16:] == [1.0] * 4
    late = run(schedule(20, steps="auto", delay_steps=2), 20, [0.0] * 18 + [1.0] * 2)
    assert late == [0.0] * 20


def test_gate_opens_once_and_starts_the_ramp():
    rates = [0.0, 0.1, 0.2, 0.0, 0.0, 0.0]
    part = schedule(steps=2, delay_steps=0, correct_rate_gate=0.2)
    assert run(part, 6, rates) == [0, 0, 0, 0.5, 1, 1]
    late = schedule(steps=2, delay_steps=0, correct_rate_gate=0.2, ramp_from="start")
    assert run(late, 6, rates) == [0, 0, 1, 1, 1, 1]
    assert run(schedule(steps=2, delay_steps=0), 4, [0.0] * 4) == [0, 0, 0, 0]


def test_auto_follows_the_collapse_of_execution_variance():
    part = schedule(schedule="auto", steps=0, warmup_steps=2, correct_rate_gate=0.0)
    assert run(part, 4) == [0, 0, 0, 0]
    variance = 1.0
    for step in range(4, 604):
        part.after(step_batch(step, uncertainty=(2.0, 2.0, 9.0)))
        variance *= 0.99
    assert part.at(604) == pytest.approx(1 - min(variance / 0.2, 1.0), abs=1e-9)
    assert part.at(604) > 0.9


def test_auto_without_variance_is_linear():
    part = schedule(schedule="auto", steps=10, delay_steps=0, warmup_steps=1)
    assert run(part, 3, uncertainty=(2.0, 2.0, 9.0)) == pytest.approx([0, 0.1, 0.2])


def test_a_batch_without_execution_tokens_is_no_collapse():
    part = schedule(schedule="auto", warmup_steps=2)
    run(part, 5)
    state = part.state_dict()
    part.after(step_batch(5, planning=(1, 1, 1)))
    assert part.state_dict() == state


def test_state_survives_a_checkpoint():
    part = schedule(schedule="auto", steps=50, delay_steps=1, warmup_steps=2)
    run(part, 5)
    part.after(step_batch(5, uncertainty=(2.0, 2.1, 9.0)))
    again = schedule(schedule="auto", steps=50, delay_steps=1, warmup_steps=2)
    again.load_state_dict(json.loads(json.dumps(part.state_dict())))
    assert [again.at(step) for step in range(6, 60)] == [part.at(step) for step in range(6, 60)]
    assert again.state_dict() == part.state_dict()


def test_metrics_are_global_sums_over_tokens():
    part = schedule(correct_rate_gate=0.0)
    uncertainty = torch.tensor([[1.0, 3.0, 9.0], [5.0, 7.0, float("nan")]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    planning = torch.tensor([[False, False, True], [False, True, True]])
    value, metrics = part(0, uncertainty, planning, mask)
    assert value == 0
    assert metrics == pytest.approx(
        {
            "sepa/lambda": 0.0,
            "sepa/gate_open": 0.0,
            "sepa/exec_entropy_mean": 3.0,
            "sepa/exec_entropy_var": 8 / 3,
            "sepa/plan_entropy_mean": 8.0,
            "sepa/plan_entropy_var": 1.0,
        }
    )
