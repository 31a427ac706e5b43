"""Campaigns whose runs, workers and driver are killed: every cell is done once, as in an undisturbed campaign."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.campaign.jobs import ENVIRONMENT, command, outcomes, ran, write
from tests.faults.gate import gated
from tests.small_runs import TOML, digest, rows
from tests.waiting import alive, ends, fork_of, kill, until

pytestmark = pytest.mark.faults

SWEEP = """
[campaign]
seeds = 2
slots = 2
executor = "EXECUTOR"
[[campaign.conditions]]
advantage_mode = "grpo"
[[campaign.conditions]]
advantage_mode = "maxrl"
transform_mode = "gtpo"
"""
CELLS = [f"{condition}/s{seed}" for condition in ("grpo", "maxrl+gtpo") for seed in (0, 1)]


def sweep(folder: Path, executor: str = "local") -> None:
    run = gated(folder, TOML).replace("max_steps = 4", "max_steps = 8")
    text = run.replace("[checkpoint]\nevery = 2", "[checkpoint]\nevery = 1").replace(
        "every = 2\nproblems", "every = 4\nproblems"
    )
    (folder / "sweep.toml").write_text(SWEEP.replace("EXECUTOR", executor) + text)


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    with (folder / "out.txt").open("ab") as log:
        environment = ENVIRONMENT | {"RETRAIN_CACHE": str(folder.parent / "cache")}
        return subprocess.Popen([*command(*arguments), "--plain"], cwd=folder, stdout=log, stderr=log, env=environment)


def campaign(folder: Path) -> subprocess.Popen:
    return start(folder, "campaign", "sweep.toml")


def under_way(folder: Path) -> dict[str, int]:
    """Process of every run that stands at the gate, or soon will."""
    found = {}
    for lock in (folder / "runs/sweep/cells").glob("*/*/lock"):
        metrics = lock.parent / "metrics.jsonl"
        try:
            owner = json.loads(lock.read_text())
        except (OSError, ValueError):
            continue
        if alive(owner["pid"]) and metrics.exists() and metrics.read_text().count("\n") >= 3:
            found[f"{lock.parent.parent.name}/{lock.parent.name}"] = owner["pid"]
    return found


def processes(folder: Path) -> list[int]:
    """Every living process that works in a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(entry / "cwd")) == folder.resolve() and (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def quiet(tmp_path_factory) -> Path:
    """The campaign that nobody disturbed."""
    folder = tmp_path_factory.mktemp("campaigns") / "quiet"
    folder.mkdir()
    sweep(folder)
    (folder / "open").touch()
    assert ends(campaign(folder)) == 0, (folder / "out.txt").read_text()[-3000:]
    return folder


@pytest.fixture
def folder(quiet, request) -> Path:
    path = quiet.parent / request.node.name
    path.mkdir()
    return path


def assert_same(folder: Path, quiet: Path) -> None:
    """Every cell is done, with the weights and rows of the undisturbed campaign."""
    assert sorted(outcomes(folder)) == sorted(CELLS)
    assert {outcome["status"] for outcome in outcomes(folder).values()} == {"done"}
    for cell in CELLS:
        mine, theirs = (path / "runs/sweep/cells" / cell for path in (folder, quiet))
        for file in ("metrics.jsonl", "eval.jsonl"):
            assert rows(mine / file) == rows(theirs / file), (mine / "log.txt").read_text()
        assert digest(mine) == digest(theirs), (mine / "log.txt").read_text()
    until(lambda: processes(folder) == [])  # what forks for the driver ends after it


def test_a_killed_run_goes_on_from_its_checkpoint(folder, quiet):
    sweep(folder)
    driver = campaign(folder)
    cell, pid = next(iter(until(lambda: under_way(folder), driver).items()))
    os.kill(pid, signal.SIGKILL)
    (folder / "open").touch()
    assert ends(driver) == 0
    assert outcomes(folder)[cell]["attempts"] == 2
    assert "resumed after step" in (folder / "runs/sweep/cells" / cell / "log.txt").read_text()
    assert_same(folder, quiet)


def test_a_killed_driver_takes_its_runs_along_and_the_next_one_goes_on(folder, quiet):
    sweep(folder)
    first = campaign(folder)
    until(lambda: under_way(folder), first)
    kill(first)
    first.wait()
    (folder / "open").touch()
    second = campaign(folder)  # at once, while the runs of the first may still be saving
    assert ends(second) == 0, (folder / "out.txt").read_text()[-3000:]
    assert_same(folder, quiet)
    third = campaign(folder)
    assert ends(third) == 0
    assert "4 of 4 runs had already ended" in (folder / "out.txt").read_text()


def test_a_killed_workers_runs_are_taken_over(folder, quiet):
    sweep(folder, executor="dir")
    driver = campaign(folder)
    until(lambda: (folder / "runs/sweep/plan.json").exists(), driver)
    workers = [start(folder, "worker", "runs/sweep", "--slots", "1") for _ in range(2)]
    until(lambda: len(under_way(folder)) == 2)
    kill(workers[0])
    workers[0].wait()
    (folder / "open").touch()
    assert ends(workers[1]) == 0
    assert ends(driver) == 0
    assert_same(folder, quiet)


def test_a_frozen_worker_loses_its_run_and_does_not_write_its_outcome(folder, quiet):
    sweep(folder, executor="dir")
    driver = campaign(folder)
    until(lambda: (folder / "runs/sweep/plan.json").exists(), driver)
    frozen = start(folder, "worker", "runs/sweep", "--slots", "1")
    cell, pid = next(iter(until(lambda: under_way(folder), frozen).items()))
    os.kill(pid, signal.SIGSTOP)
    os.kill(fork_of(frozen.pid), signal.SIGSTOP)
    (folder / "open").touch()
    worker = start(folder, "worker", "runs/sweep", "--slots", "1")
    assert ends(worker) == 0
    outcome = outcomes(folder)[cell]
    os.kill(fork_of(frozen.pid), signal.SIGCONT)
    assert ends(frozen) == 0
    assert ends(driver) == 0
    assert outcomes(folder)[cell] == outcome
    assert outcome["attempts"] == 2
    assert_same(folder, quiet)


def test_eight_workers_execute_each_of_sixty_jobs_once(tmp_path):
    write(tmp_path, {f"job{index}": [0] for index in range(60)}, executor="dir", slots=1)
    driver = campaign(tmp_path)
    until(lambda: (tmp_path / "runs/sweep/plan.json").exists(), driver)
    workers = [start(tmp_path, "worker", "runs/sweep") for _ in range(8)]
    assert [ends(worker) for worker in workers] == [0] * 8
    assert ends(driver) == 0
    assert sorted(ran(tmp_path)) == sorted(f"job{index}/s0" for index in range(60))
    assert len(outcomes(tmp_path)) == 60
    assert {outcome["attempts"] for outcome in outcomes(tmp_path).values()} == {1}
