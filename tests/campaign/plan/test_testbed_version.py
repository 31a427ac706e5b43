"""The frozen definitions of the testbed's tasks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from retrain.campaign.plan import testbed_version
from retrain.config.load import load
from retrain.data.strategy import Strategy
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
    found = testbed_version.sha256(loaded(name))
    hint = f"{name} is defined otherwise than in {testbed_version.VERSION}: undo that, or begin the next version"
    assert testbed_version.FROZEN[name] == found, hint


@pytest.mark.parametrize("line", ["[strategy]\np_quick = 0.61", "[training]\nmax_steps = 59", "[eval]\nproblems = 511"])
def test_a_setting_that_the_testbed_decides_is_part_of_the_definition(loaded, line):
    assert testbed_version.sha256(loaded("strategy", line)) != testbed_version.FROZEN["strategy"]


@pytest.mark.parametrize(
    "line", ["[optimizer]\nlr = 1e-4", '[algorithm]\nadvantage_mode = "maxrl"', "[training]\nseed = 3"]
)
def test_what_belongs_to_a_method_or_a_run_is_not(loaded, line):
    assert testbed_version.sha256(loaded("strategy", line)) == testbed_version.FROZEN["strategy"]


def test_other_problems_are_another_definition(loaded, monkeypatch):
    before = Strategy.problem
    monkeypatch.setattr(Strategy, "problem", lambda self, index: replace(before(self, index), solution="so 0"))
    assert testbed_version.sha256(loaded("strategy")) != testbed_version.FROZEN["strategy"]


def test_a_report_names_the_version_and_what_differs(loaded):
    frozen = dict(testbed_version.FROZEN)
    assert testbed_version.version(frozen).startswith("tasks of testbed-v1 (sha256 ")
    changed = frozen | {"rare": "0" * 64}
    assert testbed_version.version(changed).startswith(
        "tasks of testbed-v1, except rare, which differs from testbed-v1 (sha"
    )
    assert testbed_version.version(changed)[-17:] != testbed_version.version(frozen)[-17:]
    assert testbed_version.sha256(loaded("addition")) == ""
    assert testbed_version.version({"addition": ""}) == testbed_version.version({}) == ""
