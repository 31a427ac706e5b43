"""A run killed at random moments and resumed ends with the weights of a run that was left alone."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.run.conftest import TOML, digest, rows

pytestmark = pytest.mark.faults
KILLS = 20


def start(folder, name):
    command = [sys.executable, "-m", "retrain.cli.main", "train", "run.toml", "--resume", "auto", "--plain"]
    options = [f"logging.name={name}", "training.max_steps=40", "checkpoint.every=1", "eval.every=10"]
    flags = [part for option in options for part in ("--set", option)]
    environment = os.environ | {"RETRAIN_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command + flags, cwd=folder, stdout=log, stderr=log, env=environment)


def test_twenty_kills_at_random_moments_leave_the_weights_as_they_would_be(tmp_path):
    (tmp_path / "run.toml").write_text(TOML.replace("workers = 0", "workers = 1"))
    assert start(tmp_path, "whole").wait(timeout=300) == 0
    rng, kills, finished = random.Random(0), 0, False
    while kills < KILLS:
        process = start(tmp_path, "killed")
        # From before the imports are done to well inside the steps and the saving of checkpoints.
        deadline = time.monotonic() + rng.uniform(1.0, 7.0)
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        finished = process.poll() == 0
        if finished:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    if not finished:
        assert start(tmp_path, "killed").wait(timeout=300) == 0, (tmp_path / "killed.log").read_text()[-2000:]
    whole, killed = tmp_path / "runs" / "whole", tmp_path / "runs" / "killed"
    assert kills >= KILLS or finished
    print(f"{kills} kills, last step {rows(killed / 'metrics.jsonl')[-1]['step']}")
    assert digest(killed) == digest(whole)
    assert rows(killed / "metrics.jsonl") == rows(whole / "metrics.jsonl")
    assert rows(killed / "eval.jsonl") == rows(whole / "eval.jsonl")


def test_sigterm_saves_and_exits_75_and_the_resumed_run_is_the_same(tmp_path):
    (tmp_path / "run.toml").write_text(TOML.replace("workers = 0", "workers = 1"))
    assert start(tmp_path, "whole").wait(timeout=300) == 0
    process = start(tmp_path, "stopped")
    checkpoints = tmp_path / "runs" / "stopped" / "checkpoints"
    while not (checkpoints / "step-000003").exists():
        time.sleep(0.02)
    process.terminate()
    assert process.wait(timeout=60) == 75
    assert start(tmp_path, "stopped").wait(timeout=300) == 0
    assert digest(tmp_path / "runs" / "stopped") == digest(tmp_path / "runs" / "whole")


def test_ctrl_c_leaves_no_process_behind_and_exits_130(tmp_path):
    (tmp_path / "run.toml").write_text(TOML.replace("workers = 0", "workers = 2"))
    process = start(tmp_path, "interrupted")
    metrics = tmp_path / "runs" / "interrupted" / "metrics.jsonl"
    while not metrics.exists():
        time.sleep(0.02)
    children = subprocess.run(["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True).stdout
    assert len(children.split()) >= 2
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    time.sleep(0.5)
    assert not [pid for pid in children.split() if os.path.exists(f"/proc/{pid}")]
