"""What a worker does with runs that end well, badly, or not at all."""

import json
import os
import signal
import subprocess

import pytest

from retrain.campaign.plan.load_campaign import load_campaign
from retrain.campaign.work.campaign_directory import create
from retrain.campaign.work.campaign_worker import machine_slots
from retrain.campaign.work.run_process import crashed, gpus
from retrain.errors import ConfigError
from retrain.system.lock import identity
from tests.campaign.jobs import ENVIRONMENT, command, installed, outcomes, ran, retrain, seen, write, write_ranks
from tests.waiting import alive, descendants, ends, until


def start(folder, *arguments, program=command):
    return subprocess.Popen(
        program(*arguments), cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slow
def test_crashes_are_restarted_mistakes_are_not_and_the_rest_goes_on(tmp_path):
    conditions = {
        "good": [0],
        "vanishes": ["vanish"],
        "killed-once": [-9, 0],
        "engine": [5, 75, 0],
        "always": [-9],
        "code": [1],
        "config": [2],
        "data": [3],
        "diverged": [4],
    }
    write(tmp_path, conditions, retries=2)
    result = retrain(tmp_path, "campaign", "sweep.toml", "--plain", code=1)
    found = {name.removesuffix("/s0"): outcome for name, outcome in outcomes(tmp_path).items()}
    assert {name: outcome["status"] for name, outcome in found.items()} == {
        name: "done" if name in ("good", "killed-once", "engine") else "failed" for name in conditions
    }
    assert {name: outcome["attempts"] for name, outcome in found.items()} == {
        **dict.fromkeys(conditions, 1),
        "killed-once": 2,
        "engine": 3,
        "always": 3,
    }
    assert [found[name]["exit_code"] for name in ("good", "always", "config")] == [0, 137, 2]
    assert found["always"]["reason"] == "killed by SIGKILL: out of memory?"
    assert (found["vanishes"]["exit_code"], found["vanishes"]["reason"]) == (1, "ends with vanish")
    assert found["config"]["reason"] == "ends with 2"
    assert found["good"]["reason"] == ""
    assert all(outcome["seconds"] > 0 and outcome["host"] for outcome in found.values())
    assert "killed-once/s0  crashed: killed by SIGKILL" in result.stdout
    logs = {file.read_text() for file in (tmp_path / "runs/sweep/cells").glob("*/s0/log.txt")}
    assert all("imported already: True\n" in log for log in logs), "runs are forks"

    before = ran(tmp_path)
    assert retrain(tmp_path, "campaign", "sweep.toml", "--plain").returncode == 1
    assert ran(tmp_path) == before, "what has ended is not run again"

    (tmp_path / "codes.json").write_text("{}")  # nothing fails any more
    assert retrain(tmp_path, "campaign", "sweep.toml", "--plain", "--retry-failed").returncode == 0
    assert len(ran(tmp_path)) == len(before) + 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keep", "kept"), [("metrics", []), ("model", ["best", "model"]), ("all", ["best", "checkpoints", "model"])]
)
def test_a_run_that_is_done_keeps_what_is_asked_for_and_a_failed_one_everything(tmp_path, keep, kept):
    write(tmp_path, {"good": [0], "bad": [4]}, keep=keep)
    assert retrain(tmp_path, "campaign", "sweep.toml", "--plain").returncode == 1
    good, bad = (tmp_path / f"runs/sweep/cells/{name}/s0" for name in ("good", "bad"))
    assert weights(good) == kept
    assert weights(bad) == ["best", "checkpoints", "model"]

    left = good / "checkpoints/step-000001/weights"  # as by a worker that died after the outcome
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_text("1")
    (good / "lock").write_text(json.dumps(identity(os.getpid()) | {"group": os.getpgid(0)}))
    retrain(tmp_path, "campaign", "sweep.toml", "--plain")
    assert left.exists(), "a process is using the run"
    (good / "lock").write_text("")
    retrain(tmp_path, "campaign", "sweep.toml", "--plain")
    assert weights(good) == kept
    assert sorted(ran(tmp_path)) == ["bad/s0", "good/s0"]


def weights(run):
    """Folders of a run with weights in them."""
    return sorted({file.relative_to(run).parts[0] for file in run.glob("*/**/weights")})


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_stopped_campaign_leaves_no_process_and_the_same_command_goes_on(tmp_path, number, code):
    write(tmp_path, {"first": [0], "a": ["hang", 0], "b": [0]}, slots=1)
    process = start(tmp_path, "campaign", "sweep.toml", "--fresh", "--plain", program=installed)
    until(lambda: len(ran(tmp_path)) == 2, process)
    below = descendants(process.pid)
    assert any(os.getsid(pid) == pid for pid in below), "the run"
    process.send_signal(number)
    assert ends(process) == code, process.stdout.read()
    printed = process.stdout.read()
    assert "1 of 3 runs are done; continue with: retrain campaign sweep.toml --plain\n" in printed, printed
    until(lambda: not any(map(alive, below)))
    assert list(outcomes(tmp_path)) == ["first/s0"]
    retrain(tmp_path, "campaign", "sweep.toml", "--plain", code=0)
    assert ran(tmp_path) == ["first/s0", "a/s0", "a/s0", "b/s0"]
    assert outcomes(tmp_path)["a/s0"]["attempts"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("part", ["leases/b/s0", "cells/b/s0/outcome.lock"])
def test_a_folder_that_cannot_be_written_ends_a_worker_with_the_path_and_its_runs_save(tmp_path, part):
    """An entry of another kind in the place of a file or folder fails like a full or read-only disk, also for root."""
    write(tmp_path, {"a": ["hang"], "b": [0]}, slots=2)
    assert retrain(tmp_path, "campaign", "sweep.toml", "--slurm").returncode == 0
    obstacle = tmp_path / "runs/sweep" / part
    if "lease" in part:
        obstacle.parent.mkdir(parents=True)
        obstacle.write_text("")
    else:
        obstacle.mkdir()
    result = retrain(tmp_path, "worker", "runs/sweep", "--plain", code=6)
    assert result.stderr.startswith(f"runs/sweep/{part.removesuffix('/outcome.lock')} cannot be written: ")
    assert "Traceback" not in result.stderr
    assert json.loads((tmp_path / "runs/sweep/leases/a/s0/1.json").read_text())["released"], "the run was not killed"

    obstacle.unlink() if "lease" in part else obstacle.rmdir()
    (tmp_path / "codes.json").write_text("{}")
    assert retrain(tmp_path, "worker", "runs/sweep", "--plain").returncode == 0
    assert {name: outcome["status"] for name, outcome in outcomes(tmp_path).items()} == {"a/s0": "done", "b/s0": "done"}


@pytest.mark.slow
def test_dir_waits_for_workers(tmp_path):
    write(tmp_path, {"a": [0], "b": [0]}, executor="dir", slots=1)
    driver = start(tmp_path, "campaign", "sweep.toml", "--plain")
    until(lambda: (tmp_path / "runs/sweep/plan.json").exists(), driver)
    retrain(tmp_path, "worker", "runs/sweep", "--limit", "1", "--plain", code=0)
    assert len(ran(tmp_path)) == 1
    assert retrain(tmp_path, "worker", "runs/sweep", "--plain").returncode == 0
    assert ends(driver) == 0
    assert "waiting for workers: retrain worker runs/sweep" in driver.stdout.read()
    assert sorted(ran(tmp_path)) == ["a/s0", "b/s0"]


@pytest.mark.slow
def test_a_worker_elsewhere_writes_to_the_folder_that_it_was_given(tmp_path):
    write(tmp_path, {"a": [1]}, executor="dir")
    there = tmp_path / "there"
    there.mkdir()
    driver = start(tmp_path, "campaign", "sweep.toml", "--plain")
    until(lambda: (tmp_path / "runs/sweep/plan.json").exists(), driver)
    driver.send_signal(signal.SIGINT)
    assert ends(driver) == 130
    for name in ("ending.py", "codes.json"):
        (there / name).write_text((tmp_path / name).read_text())
    (there / "codes.json").write_text('{"a": [0]}')
    assert retrain(there, "worker", "../runs/sweep", "--plain").returncode == 0
    assert ran(there) == ["a/s0"]
    assert outcomes(tmp_path)["a/s0"]["status"] == "done"
    assert not (there / "runs").exists()


@pytest.mark.slow
def test_a_plan_changes_where_no_run_has_started_only(tmp_path):
    write(tmp_path, {"a": [0]})
    assert retrain(tmp_path, "campaign", "sweep.toml", "--plain").returncode == 0
    run = tmp_path / "runs/sweep/cells/a/s0"
    retrain(tmp_path, "campaign", "sweep.toml", "--plain", "--set", "campaign.seeds=2", code=0)
    assert ran(tmp_path) == ["a/s0", "a/s1"]
    (run / "config.resolved.json").write_text("{}")  # what a run that got further leaves
    changed = retrain(tmp_path, "campaign", "sweep.toml", "--plain", "--set", "training.group_size=4", code=2)
    assert "[training] group_size: None -> 4 since the run was started" in changed.stderr
    assert retrain(tmp_path, "campaign", "sweep.toml", "--set", "training.group_size=4", "--fresh").returncode == 0
    assert ran(tmp_path) == ["a/s0", "a/s1", "a/s0"]


def test_a_directory_that_is_no_campaign_is_left_alone(tmp_path):
    write(tmp_path, {"a": [0]})
    (tmp_path / "runs/sweep").mkdir(parents=True)
    (tmp_path / "runs/sweep/metrics.jsonl").write_text("")
    result = retrain(tmp_path, "campaign", "sweep.toml", "--fresh", code=2)
    assert "exists and is not a campaign" in result.stderr
    missing = retrain(tmp_path, "worker", "runs/nothing", code=2)
    assert "has no plan.json" in missing.stderr


def test_an_outcome_is_written_once(tmp_path):
    (tmp_path / "sweep.toml").write_text(f"[campaign]\nseeds = 1\n[logging]\ndir = '{tmp_path}/runs'\n")
    campaign = create(load_campaign(tmp_path / "sweep.toml"))
    assert campaign.finish(campaign.jobs[0], {"status": "done"})
    before = campaign.outcome(campaign.jobs[0])
    assert before["status"] == "done"
    assert not campaign.finish(campaign.jobs[0], {"status": "failed"})
    assert campaign.outcome(campaign.jobs[0]) == before
    assert not list(campaign.run(campaign.jobs[0]).glob("*.tmp"))


def test_slots_share_cores_and_gpus(monkeypatch):
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert gpus() == ["2", "5"]
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in machine_slots(3)] == ["2", "5", "2"]
    assert len(machine_slots("auto")) == 2
    assert machine_slots(1)[0]["OMP_NUM_THREADS"] == str(cores)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine_slots("auto") == [{"OMP_NUM_THREADS": "1"}] * cores
    assert machine_slots(1) == [{"OMP_NUM_THREADS": "1"}], "what a run computes depends on its threads"


def test_a_slot_has_a_gpu_for_every_rank(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in machine_slots("auto", ranks=2)] == ["0,1", "2,3"]
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in machine_slots("auto", ranks=2, most=3)] == ["0,1"]
    with pytest.raises(ConfigError, match="runs of 2 ranks need 2 GPUs each, and this machine has 1"):
        machine_slots("auto", ranks=2, most=1)


@pytest.mark.slow
def test_runs_of_ranks_are_started_side_by_side_on_the_gpus_that_a_worker_may_use(tmp_path, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, "CUDA_VISIBLE_DEVICES", "3,5,6,7,8")
    write_ranks(tmp_path, 2, executor="dir")
    script = retrain(tmp_path, "campaign", "sweep.toml", "--slurm").stdout
    assert "#SBATCH --cpus-per-task=4" in script
    assert "#SBATCH --gres=gpu:2" in script
    retrain(tmp_path, "worker", "runs/sweep", "--gpus", "4", "--plain", code=0)
    assert seen(tmp_path) == [(rank, "2", gpus, "1") for rank in "01" for gpus in ("3,5", "6,7")]


def test_which_ends_are_worth_a_restart():
    assert [code for code in (*range(8), 75, 130, 137, 143, -9, -15) if crashed(code)] == [
        5,
        75,
        130,
        137,
        143,
        -9,
        -15,
    ]
