import json
from pathlib import Path

import pytest

from retrain.registry import find

pytestmark = pytest.mark.numeric

MIX = json.loads((Path(__file__).parents[1] / "data/vectors.json").read_text())["mix"]


def mu(step, **params):
    value, metrics = find("signal", "mu").bind(params)(step)
    assert metrics == {"mix/mu": value}
    return value


def test_mu_is_a_tenth_at_every_step_unless_told_otherwise():
    assert [mu(step) for step in (0, 1, 10_000)] == [0.1] * 3
    assert mu(5, mu=0.0) == 0.0


@pytest.mark.parametrize("case", MIX["chord_mu_schedule"], ids=lambda case: f"step{case['step']}")
def test_published_chord_schedule(case):
    params = {name: case[name] for name in ("warmup", "decay", "peak", "valley")}
    assert mu(case["step"], schedule="chord", **params) == pytest.approx(case["mu"], abs=1e-12)


def test_without_a_rise_it_starts_at_the_peak_and_without_a_fall_it_drops():
    assert mu(0, schedule="chord", warmup=0) == 0.5
    assert [mu(step, schedule="chord", warmup=4, decay=0) for step in (3, 4)] == [0.375, 0.02]
