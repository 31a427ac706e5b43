"""A run is read by everything that reads runs, again and again, while it replaces its checkpoints.

`RETRAIN_STEPS=200 python -m pytest -m faults tests/faults/test_readers.py` reads a longer run.
"""

import os
import time
from collections import Counter

import pytest

import retrain.run.reopen  # noqa: F401 - with torch, before the processes are forked
from retrain.config.load import load
from retrain.run.session import Resume, run
from retrain.storage import checkpoint
from tests.commands import invoke
from tests.forks import finish, forked
from tests.small_runs import TOML, digest, rows
from tests.waiting import until

pytestmark = pytest.mark.faults
STEPS = int(os.environ.get("RETRAIN_STEPS", "12"))
READS = 2
READERS = {
    "eval": ("eval", "runs/read"),
    "export": ("export", "runs/read", "exported"),
    "sample": ("sample", "runs/read", "1+1?"),
    "status": ("status", "runs/read"),
    "report": ("report", "runs/read"),
}


def codes(folder, reader):
    """Exit codes of what a reader has read so far."""
    file = folder / f"{reader}.codes"
    return file.read_text().split() if file.exists() else []


def train(folder, name, keep, read):
    """Train; what is read ends only when every reader has read something in the middle of the run and of its end."""
    os.chdir(folder)

    def observe(event, details):
        if read and event == "step" and details["step"] in (STEPS // 2, STEPS - 1):
            known = {reader: len(codes(folder, reader)) for reader in READERS}
            until(lambda: all(len(codes(folder, reader)) >= known[reader] + READS for reader in READERS))

    options = [f"logging.name={name}", f"checkpoint.keep={keep}", f"training.max_steps={STEPS}", "checkpoint.every=1"]
    run(load("run.toml", options), Resume(), observe)


def read(folder, reader):
    """Run the command from the first checkpoint to the end of the run."""
    os.chdir(folder)
    until(lambda: list((folder / "runs" / "read" / "checkpoints").glob("step-*/manifest.json")))
    while not (folder / "over").exists():
        result = invoke(*READERS[reader])
        if result.exit_code not in (0, 6):
            (folder / f"{reader}.txt").write_text(f"{result.output}\n{result.exception!r}")
        with (folder / f"{reader}.codes").open("a") as file:
            file.write(f"{result.exit_code}\n")
        time.sleep(0.1)


@pytest.mark.parametrize("keep", [1, 2])
def test_no_reader_harms_a_run_that_replaces_its_checkpoints(tmp_path, keep):
    (tmp_path / "run.toml").write_text(TOML)
    finish(forked(train, tmp_path, "whole", keep, False))
    readers = [forked(read, tmp_path, reader) for reader in READERS]
    finish(forked(train, tmp_path, "read", keep, True))
    (tmp_path / "over").touch()
    for process in readers:
        finish(process)
    seen = {reader: Counter(codes(tmp_path, reader)) for reader in READERS}
    print(f"{STEPS} steps, keep = {keep}: exit codes {seen}")
    assert not [file.read_text() for file in tmp_path.glob("*.txt")]
    whole, disturbed = tmp_path / "runs" / "whole", tmp_path / "runs" / "read"
    assert digest(disturbed) == digest(whole)
    assert rows(disturbed / "metrics.jsonl") == rows(whole / "metrics.jsonl")
    kept = sorted((disturbed / "checkpoints").iterdir())
    assert [path.name for path in kept] == [f"step-{step:06d}" for step in range(STEPS - keep + 1, STEPS + 1)]
    assert [checkpoint.problem(path) for path in kept] == [None] * keep
    assert all(set(found) <= {"0", "6"} for found in seen.values()), seen
