"""What a campaign would cost and could tell."""

from dataclasses import replace

import pytest

from retrain.campaign.plan.campaign_schema import Campaign
from retrain.campaign.plan.load_campaign import load_campaign
from retrain.campaign.preview import Spread, power, preview, render, spread
from retrain.campaign.verdict.run_reader import read_campaign
from retrain.errors import RetrainError
from tests.campaign.tables import write_campaign
from tests.small_runs import TOML


@pytest.fixture
def loaded(cwd, monkeypatch):
    monkeypatch.setenv("RETRAIN_CACHE", str(cwd / "cache"))
    (cwd / "sweep.toml").write_text("[campaign]\nseeds = 8\nslots = 2\n" + TOML)
    return load_campaign("sweep.toml")


def test_power_says_by_which_test_and_what_six_seeds_add():
    three, six = power(Campaign(seeds=3), 4, Spread(0.02, "known"))[:2]
    assert three == (
        "3 paired seeds: the t test, which assumes roughly normal differences, detects 6.55 standard deviations of the "
        "paired difference (0.131 accuracy) with 80% power, in a family of 4"
    )
    assert six.startswith("6 paired seeds: the exact max-t test detects 2.")
    (eight,) = power(Campaign(seeds=8), 4, None)
    assert eight.startswith("8 paired seeds: the exact max-t test detects 1.53 standard deviations")
    assert power(Campaign(seeds=2), 1, None)[0] == ("2 paired seeds: no verdict, only differences; a verdict needs 3")
    assert power(Campaign(seeds=8, warm_starts=4), 1, None)[0].startswith("4 warm starts: the t test")
    margin = power(Campaign(seeds=8, margin=0.02), 1, Spread(0.02, "known"))[-1]
    assert margin == "equality within 0.02 is shown by about 13 paired seeds in 80%, if there is no difference"


def test_the_spread_is_that_of_the_evaluation_until_two_pairs_of_runs_have_finished(loaded):
    problems = loaded.configs[0].config.eval.problems
    worst = spread(loaded)
    assert worst.sd == pytest.approx((0.5 / problems) ** 0.5)
    assert worst.source.startswith(
        f"assumed: the binomial error of two evaluations of {problems} problems at worst-case"
    )
    assert spread(loaded, 0.1).sd == pytest.approx((0.18 / problems) ** 0.5)
    assert "the probe's accuracy 0.1" in spread(loaded, 0.1).source
    assert spread(loaded, 0.0) == worst
    loaded.directory.mkdir(parents=True)
    write_campaign(loaded.directory, conditions=("grpo", "maxrl"), seeds=range(2), failed=())
    outcome = loaded.directory / "cells/maxrl/s1/outcome.json"
    outcome.write_text('{"status": "failed"}')
    assert spread(loaded) == worst
    outcome.write_text('{"status": "done"}')
    left, right = (read_campaign(loaded.directory).done(label) for label in ("maxrl", "grpo"))
    differences = [float(left[seed].result or 0) - float(right[seed].result or 0) for seed in (0, 1)]
    measured = spread(loaded)
    assert measured.sd == pytest.approx(abs(differences[0] - differences[1]) / 2**0.5)
    assert measured.source == "measured in 2 pairs of finished runs"
    assert "measured in 2 pairs" in render(preview(loaded, probe=False))


def test_counts_runs_and_steps_without_running_anything(loaded, tmp_path):
    facts = preview(loaded, probe=False)
    assert (facts["runs"], facts["steps"], facts["executor"]) == (40, 160, "local, 2 at a time on this machine")
    assert facts["conditions"]["maxrl+gtpo"] == {
        "algorithm.advantage_mode": "maxrl",
        "algorithm.transform_mode": "gtpo",
    }
    assert 430 < facts["memory_mb"]["run"] < 600, "400 MB of them for Python and its libraries"
    text = render(facts)
    assert facts["trains"]["maxrl+gtpo"] == "maxrl, gtpo, loss ppo_clip"
    assert "-> maxrl, gtpo, loss ppo_clip" in text
    assert "5 conditions x 8 seeds" in text
    assert "(baseline)" in text
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_probe_runs_two_steps_and_adds_up_what_a_campaign_takes(loaded, tmp_path):
    several = replace(loaded, settings=loaded.settings.model_copy(update={"warm_starts": 8}))
    time = preview(several, probe=True)["time"]
    assert min(time.values()) > 0
    # Four steps, evaluated at the start, after two, and at the end; forty runs and seven warm starts in two slots.
    assert time["run_s"] == pytest.approx(time["start_s"] + 4 * time["step_s"] + 3 * time["evaluation_s"])
    assert time["campaign_s"] == pytest.approx(20 * time["run_s"] + 4 * time["warm_start_s"])
    text = render(preview(loaded, probe=False) | {"time": time})
    assert "per run" in text
    assert "warm start  8 of " in text
    assert (tmp_path / "cache").is_dir()
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_probe_that_fails_says_why_with_the_exit_code_of_its_run(cwd, monkeypatch):
    (cwd / "sweep.toml").write_text('[campaign]\n[model]\npath = "nobody/nothing"\n')
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RetrainError, match="the probe failed") as caught:
        preview(load_campaign("sweep.toml"), probe=True)
    assert caught.value.exit_code == 6
    assert "hub cannot be reached" in str(caught.value)


@pytest.mark.slow
def test_disk_and_memory_are_estimated(loaded):
    facts = preview(loaded, probe=True)
    disk, memory = facts["disk_mb"], facts["memory_mb"]
    assert disk["checkpoint"] > 2 * disk["model"] > 0, "weights and two moments"
    assert disk["run"] == disk["model"]
    unfinished = disk["model"] + 2 * disk["checkpoint"]  # the two newest of three
    assert disk["peak"] == pytest.approx(38 * disk["run"] + 2 * unfinished), "two runs at a time"
    assert disk["campaign"] == pytest.approx(40 * disk["run"])
    assert memory["at_once"] == 2 * memory["run"] > 0
    text = render(facts)
    assert 'MB per finished run by [campaign] keep = "model"; up to ' in text
    assert "memory      about " in text
