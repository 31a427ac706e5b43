"""Runs on two ranks, one of which dies, hangs or is to stop: the exit code tells, and a resumed run is whole."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.forks import RETRAIN
from tests.small_runs import TOML, digest, rows
from tests.waiting import alive, children, ends, fork_of, kill, until

pytestmark = pytest.mark.faults
STEPS, KILLS = 20, 10
TIMEOUT_S = 15
HANGS = """
import os, time

calls = 0

def hangs(rewards):
    global calls
    calls += 1
    if calls > 9 and os.environ["RANK"] == "1":  # three steps of three groups
        time.sleep(3600)
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]
"""


def start(folder: Path, name: str, *more: str) -> subprocess.Popen:
    command = [RETRAIN, *arguments(name, *more), "--resume", "auto", "--ranks", "2"]
    environment = os.environ | {"RETRAIN_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)


def arguments(name: str, *more: str) -> list[str]:
    options = [f"logging.name={name}", f"training.max_steps={STEPS}", "checkpoint.every=1", "eval.every=6", *more]
    return ["train", "run.toml", "--plain", *(part for option in options for part in ("--set", option))]


def steps_of(folder: Path, name: str) -> int:
    file = folder / "runs" / name / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def ranks_of(launcher: subprocess.Popen) -> dict[int, int]:
    """Process of every rank, by its number.

    The launcher also starts commands that end within milliseconds, such as the probe of the sandbox: one may be gone
    between the two reads.
    """
    found = {}
    for child in children(launcher.pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            for entry in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                if entry.startswith(b"RANK="):
                    found[int(entry[5:])] = child
    return found


def log(folder: Path, name: str) -> str:
    return (folder / f"{name}.log").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the undisturbed run is."""
    place = tmp_path_factory.mktemp("ranks")
    (place / "run.toml").write_text(TOML.replace("workers = 0", "workers = 1"))
    assert ends(start(place, "whole")) == 0, log(place, "whole")
    return place


def check_whole(folder: Path, name: str) -> None:
    """The run is as if nothing had happened to it."""
    mine, whole = folder / "runs" / name, folder / "runs" / "whole"
    assert digest(mine) == digest(whole)
    for file in ("metrics.jsonl", "eval.jsonl"):
        assert rows(mine / file) == rows(whole / file)


def test_any_rank_killed_at_any_moment_leaves_a_run_that_resumes(folder):
    rng = random.Random(0)
    for _ in range(KILLS):
        done = steps_of(folder, "killed")
        goal = done + rng.choice([0, 1, 2]) if done < STEPS - 8 else 0  # the run must not end before the kill
        process = start(folder, "killed")
        until(lambda process=process, goal=goal: len(ranks_of(process)) == 2 and steps_of(folder, "killed") >= goal)
        # A step takes 0.1 to 0.5 s; the start, in which the ranks meet, one to two.
        time.sleep(rng.uniform(0, 0.2 if goal > done else 2))
        ranks = ranks_of(process)
        victim = rng.choice([0, 1])
        os.kill(fork_of(ranks[victim]), signal.SIGKILL)
        assert ends(process) == 5
        assert f"rank {victim} on " in log(folder, "killed")
        assert not any(alive(pid) for pid in ranks.values())
    assert ends(start(folder, "killed")) == 0, log(folder, "killed")[-2000:]
    check_whole(folder, "killed")


@pytest.mark.parametrize(("number", "name", "code"), [(signal.SIGTERM, "SIGTERM", 75), (signal.SIGINT, "Ctrl-C", 130)])
def test_a_signal_to_the_launcher_ends_all_ranks_after_their_step(folder, number, name, code):
    process = start(folder, name)
    until(lambda: steps_of(folder, name) >= 2, process)
    ranks = ranks_of(process)
    process.send_signal(number)
    assert ends(process) == code
    assert not any(alive(pid) for pid in ranks.values())
    assert f"stopped by {name} after step" in log(folder, name)
    assert ends(start(folder, name)) == 0
    check_whole(folder, name)


def test_a_launcher_that_is_killed_takes_its_ranks_with_it(folder):
    process = start(folder, "orphaned")
    until(lambda: steps_of(folder, "orphaned") >= 1, process)
    ranks = ranks_of(process)
    kill(process)
    until(lambda: not any(alive(pid) for pid in ranks.values()))


def test_a_rank_that_hangs_is_named_with_its_phase_after_the_timeout(folder):
    (folder / "hanging.py").write_text(HANGS)
    process = start(folder, "hanging", 'algorithm.advantage_mode="hanging.hangs"', f"distributed.timeout_s={TIMEOUT_S}")
    until(lambda: steps_of(folder, "hanging") >= 3, process)
    assert ends(process) == 5
    waited = re.search(r"rank 1 does not answer: rank 0 waited (\d+) s in the credit of step 3", log(folder, "hanging"))
    assert waited is not None
    assert int(waited[1]) >= TIMEOUT_S


def test_what_rank_1_alone_raises_is_shown_and_decides_the_exit_code(folder):
    code = 'import os\n\ndef fails(rewards):\n    assert os.environ["RANK"] == "0", "only rank 0 can do this"\n'
    (folder / "failing.py").write_text(f"{code}    return rewards\n")
    assert ends(start(folder, "failing", 'algorithm.advantage_mode="failing.fails"')) == 1
    assert log(folder, "failing").count("only rank 0 can do this") >= 1
    assert log(folder, "failing").count(f'File "{folder}/failing.py", line 4, in fails') == 1
    ended = json.loads((folder / "runs" / "failing" / "status.json").read_text())
    assert ended["exit_code"] == 1
    assert "only rank 0 can do this" in ended["error"]


def test_torchs_own_launcher_runs_the_command(folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"RETRAIN_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command += ["-m", "retrain", *arguments("torchrun")]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    check_whole(folder, "torchrun")


SRUN = """#!/bin/bash
# As SLURM's: SIGTERM to srun itself kills the tasks, and a task that fails ends the others.
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank setsid "${@:2}" &
    tasks="$tasks -$!"
done
echo $tasks > step
trap 'kill -KILL -- $tasks; exit 137' TERM
code=0
for task in $tasks; do wait -n || { code=$?; kill -KILL -- $tasks; }; done
exit $code
"""
SCANCEL = """#!/bin/bash
[ "$*" = "--signal=TERM $SLURM_JOB_ID.0" ] && kill -TERM -- $(cat step)
"""
SCONTROL = '#!/bin/bash\n[ $1 = show ] && echo localhost || echo "$@" >> scontrol.log\n'


def test_the_slurm_script_runs_a_task_per_rank_and_requeues_what_was_stopped(folder):
    """With stand-ins for SLURM's commands: two tasks on this machine."""
    shims = {"srun": SRUN, "scancel": SCANCEL, "scontrol": SCONTROL}
    (folder / "bin").mkdir()
    for name, text in shims.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    given = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": "2"}
    environment = os.environ | given | {"RETRAIN_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    ask = [RETRAIN, *arguments("slurm"), "--ranks", "2", "--slurm", "1"]
    script = subprocess.run(ask, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout
    (folder / "job.sh").write_text(script)
    lock = folder / "runs" / "slurm" / "lock"
    for stopped in (True, False):
        if not stopped:  # its machine was lost before it could be put back
            lock.write_text(json.dumps({"host": "gone", "machine": "gone", "pid": 1, "born": "1"}))
            environment["SLURM_RESTART_COUNT"] = "1"
        job = subprocess.Popen(["bash", "job.sh"], cwd=folder, env=environment)
        if stopped:
            until(lambda: steps_of(folder, "slurm") >= 2, job)
            job.send_signal(signal.SIGTERM)
        assert ends(job) == (75 if stopped else 0)
    assert (folder / "scontrol.log").read_text() == f"requeue {os.getpid()}\n"
    check_whole(folder, "slurm")
