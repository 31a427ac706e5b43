"""The frozen definitions of the testbed's tasks, and their premises in plans."""

from dataclasses import replace

import pytest

from retrain.config.load import load
from retrain.data.strategy import Strategy
from retrain.lab import premises
from retrain.lab.testbed import tasks_with_premise


@pytest.fixture
def loaded(tmp_path):
    """Loads a run of a task with further lines."""

    def made(name, *lines):
        file = tmp_path / "run.toml"
        file.write_text("\n".join([f'[task]\nname = "{name}"', *lines]))
        return load(file)

    return made


@pytest.mark.parametrize("name", tasks_with_premise())
def test_the_definition_of_every_task_is_that_of_the_version(name, loaded):
    found = premises.sha256(loaded(name))
    hint = f"{name} is defined otherwise than in {premises.VERSION}: undo that, or begin the next version"
    assert premises.FROZEN[name] == found, hint


DECIDED = "[strategy]\np_quick = 0.61", "[training]\nmax_steps = 59", "[eval]\nproblems = 511"
FREE = "[optimizer]\nlr = 1e-4", '[algorithm]\nadvantage_mode = "maxrl"', "[training]\nseed = 3"


@pytest.mark.parametrize("line", [*DECIDED, *FREE])
def test_what_the_testbed_decides_is_part_of_the_definition_and_a_method_or_a_run_is_not(loaded, line):
    assert (premises.sha256(loaded("strategy", line)) == premises.FROZEN["strategy"]) == (line in FREE)


def test_other_problems_are_another_definition(loaded, monkeypatch):
    before = Strategy.problem
    monkeypatch.setattr(Strategy, "problem", lambda self, index: replace(before(self, index), solution="so 0"))
    assert premises.sha256(loaded("strategy")) != premises.FROZEN["strategy"]


def test_a_report_names_the_version_and_what_differs(loaded):
    frozen = dict(premises.FROZEN)
    assert premises.version(frozen).startswith("tasks of testbed-v1 (sha256 ")
    changed = frozen | {"rare": "0" * 64}
    assert premises.version(changed).startswith("tasks of testbed-v1, except rare, which differs from testbed-v1 (sha")
    assert premises.version(changed)[-17:] != premises.version(frozen)[-17:]
    assert premises.sha256(loaded("addition")) == ""
    assert premises.version({"addition": ""}) == premises.version({}) == ""
