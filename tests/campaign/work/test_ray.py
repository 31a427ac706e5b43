"""The executor `ray` without Ray: what a configuration may say, and what a task does on its node."""

import _thread
import importlib.util
import re
import threading
from pathlib import Path

import pytest

from retrain.campaign.plan.load_campaign import load_campaign
from retrain.campaign.work.campaign_directory import create
from retrain.campaign.work.programs import ray_task as work
from retrain.errors import ConfigError, install
from tests.campaign.jobs import outcomes, ran, write
from tests.waiting import until


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    def make(conditions) -> Path:
        write(tmp_path, conditions)
        monkeypatch.chdir(tmp_path)
        return tmp_path / create(load_campaign("sweep.toml")).path

    return make


@pytest.mark.slow
def test_a_task_does_its_run_and_no_other(campaign, tmp_path):
    path = campaign({"a": [0], "b": [0]})
    assert work(str(tmp_path), str(path), "b/s0", 1) == (0, "")
    assert work(str(tmp_path), str(path), "b/s0", 1) == (0, "")  # it has ended: there is nothing to do
    assert ran(tmp_path) == ["b/s0"]
    assert outcomes(tmp_path)["b/s0"]["status"] == "done"


@pytest.mark.slow
def test_a_cancelled_task_lets_its_run_save(campaign, tmp_path):
    path = campaign({"a": ["hang", 0]})
    watch = threading.Thread(target=lambda: (until(lambda: ran(tmp_path)), _thread.interrupt_main()))
    watch.start()
    code, said = work(str(tmp_path), str(path), "a/s0", 1)
    watch.join()
    assert code == 75, said
    assert "stopped; the runs have saved" in said
    assert work(str(tmp_path), str(path), "a/s0", 1) == (0, "")
    assert outcomes(tmp_path)["a/s0"]["attempts"] == 2


def test_a_node_that_does_not_see_the_campaign_says_so(tmp_path):
    code, said = work(str(tmp_path), str(tmp_path / "elsewhere"), "a/s0", 1)
    assert code == 2
    assert "has no plan.json" in said


@pytest.mark.parametrize(
    ("table", "installed", "message"),
    [
        ("", False, f"ray is not installed; {install('ray')}"),
        ('address = "ray://head:10001"', True, "[ray] address"),
        ("gpus_per_run = -1", True, "[ray] gpus_per_run"),
        ("cpus = 1", True, "[ray] cpus"),
    ],
)
def test_mistakes_are_found_before_anything_runs(tmp_path, monkeypatch, table, installed, message):
    write(tmp_path, {"a": [0]}, executor="ray")
    with (tmp_path / "sweep.toml").open("a") as file:
        file.write(f"[ray]\n{table}\n")
    monkeypatch.chdir(tmp_path)
    find_spec = importlib.util.find_spec

    def found(name, package=None):
        return (installed or None) if name == "ray" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_campaign("sweep.toml")
