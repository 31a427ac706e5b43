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


def kill_until_done(folder, name, rng):
    """Start the run until it ends, killing it at random moments; returns the steps done at each kill."""
    moments = []
    while True:
        process = start(folder, name)
        # From the imports to well inside the steps and the saving of checkpoints.
        deadline = time.monotonic() + rng.uniform(1.0, 6.0)
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.005)
        if process.poll() is not None:
            assert process.returncode == 0, (folder / f"{name}.log").read_text()[-2000:]
            return moments
        process.send_signal(signal.SIGKILL)
        process.wait()
        metrics = folder / "runs" / name / "metrics.jsonl"
        moments.append(metrics.read_text().count("\n") if metrics.exists() else 0)


def test_twenty_kills_at_random_moments_leave_the_weights_as_they_would_be(tmp_path):
    (tmp_path / "run.toml").write_text(TOML.replace("workers = 0", "workers = 1"))
    assert start(tmp_path, "whole").wait(timeout=300) == 0
    whole, rng, moments = tmp_path / "runs" / "whole", random.Random(0), []
    while len(moments) < KILLS:
        name = f"killed-{len(moments)}"
        moments += kill_until_done(tmp_path, name, rng)
        killed = tmp_path / "runs" / name
        assert digest(killed) == digest(whole)
        assert rows(killed / "metrics.jsonl") == rows(whole / "metrics.jsonl")
        assert rows(killed / "eval.jsonl") == rows(whole / "eval.jsonl")
    print(f"killed {len(moments)} times, after steps {moments}")
    assert len({moment for moment in moments if moment}) >= 5, "the kills hit different steps"


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
