"""A run killed at random moments and resumed ends with the weights of a run that was left alone."""

import hashlib
import json
import os
import random
import signal
import subprocess
import threading
import time

import pytest

import retrain.run.build  # noqa: F401 - with torch, before the processes are forked
from retrain.config.load import load
from retrain.run.session import Resume, run
from retrain.storage import checkpoint
from tests.faults.gate import gated
from tests.forks import RETRAIN, finish, forked
from tests.small_runs import TOML, digest, rows
from tests.waiting import PATIENCE_S, alive, children, ends, until

pytestmark = pytest.mark.faults
KILLS = 20
LONG = ("training.max_steps=40", "checkpoint.every=1", "eval.every=10")


def start(folder, name, *more):
    command = [RETRAIN, "train", "run.toml", "--resume", "auto", "--plain"]
    options = [f"logging.name={name}", *LONG, *more]
    flags = [part for option in options for part in ("--set", option)]
    environment = os.environ | {"RETRAIN_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command + flags, cwd=folder, stdout=log, stderr=log, env=environment)


CHANCE = """
from zlib import crc32

from retrain import Observation

def chance(completion):
    return float(crc32(completion.encode()) % 2)

def talk(answer, rng):
    reply = yield None
    while rng.random() < 0.8:
        reply = yield Observation(f"{rng.randrange(10)} {crc32(reply.encode()) % 10}?", reward=rng.random())
    return rng.random()
"""
SMALL = """
training.batch_size=2 training.max_tokens=8 warmup.steps=0 eval.problems=0 checkpoint.every=1 reward_pool.workers=0
logging.rollouts_every=0
""".split()  # noqa: SIM905
PRIME = (
    'algorithm.transform_mode=["process_rloo", "whiten"]',
    "prime.lr=1e-3",
    "algorithm.filter=accuracy_band",
    "rollout.resample=uninformative",
)
MIX = (
    'loss=[{name = "ppo_clip"}, {name = "sft"}]',
    'expert.path="expert.jsonl"',
    "mix.schedule=chord",
    "mix.warmup=3",
    "mix.decay=4",
)
GAME = (
    'environment.name="by_chance.talk"',
    "environment.turn_tokens=4",
    "training.max_tokens=24",
    "algorithm.transform_mode=turn_returns",
)
METHODS = {
    "prime": PRIME,
    "prime_lora": (*PRIME, "model.lora={r = 2}", "prime.update=before", "prime.loss=dpo", "training.lr=1e-2"),
    "mix": MIX,
    "sepa": ("algorithm.transform_mode=gtpo_sepa", "sepa.schedule=auto", "sepa.warmup_steps=2", "sepa.delay_steps=1"),
    "overlap": ("rollout.overlap=1", "reward_pool.workers=1", "rollout.parity_every=2", "training.lr=1e-3"),
    "game": (*GAME, "reward_pool.workers=1"),
    "overlap_game": (*GAME, "reward_pool.workers=1", "rollout.overlap=1"),
    "overlap_mix": ("rollout.overlap=1", "reward_pool.workers=1", *MIX),
    "hicra_entropy": ("algorithm.transform_mode=hicra_entropy", "training.epochs=2", "training.minibatches=2"),
}


def kill_until_done(folder, name, rng, options):
    """Start the run until it ends, killing it at random moments; returns the steps done at each kill."""
    moments, metrics = [], folder / "runs" / name / "metrics.jsonl"
    while True:
        # From the loading to well inside the steps and the saving of checkpoints.
        further = rng.choice([0, 1, 2, 3, 5, 8])
        goal = steps_of(metrics) + further
        process = forked(_train, folder, name, options)
        while process.is_alive() and steps_of(metrics) < goal:
            time.sleep(0.005)
        process.join(rng.uniform(0.0, 0.2 if further else 1.0))
        if process.exitcode is not None:
            assert process.exitcode == 0, (folder / f"{name}.log").read_text()[-2000:]
            return moments
        process.kill()
        process.join()
        moments.append(steps_of(metrics))


@pytest.mark.parametrize(
    "more", [pytest.param((), id="one turn"), pytest.param((*GAME, "warmup.steps=0"), id="episodes")]
)
def test_twenty_kills_at_random_moments_leave_the_weights_as_they_would_be(tmp_path, more):
    (tmp_path / "by_chance.py").write_text(CHANCE)
    (tmp_path / "run.toml").write_text(TOML.replace("workers = 0", "workers = 1"))
    options = (*LONG, *more)
    finish(forked(_train, tmp_path, "whole", options))
    whole, rng, moments = tmp_path / "runs" / "whole", random.Random(0), []
    while len(moments) < KILLS:
        name = f"killed-{len(moments)}"
        moments += kill_until_done(tmp_path, name, rng, options)
        killed = tmp_path / "runs" / name
        assert digest(killed) == digest(whole)
        assert rows(killed / "metrics.jsonl") == rows(whole / "metrics.jsonl")
        assert rows(killed / "eval.jsonl") == rows(whole / "eval.jsonl")
    print(f"killed {len(moments)} times, after steps {moments}")
    assert len({moment for moment in moments if moment}) >= 5, "the kills hit different steps"


STEPS, KILLS_EACH = 8, 3


def final_state(folder):
    """The last checkpoint by file: hashes of the tensors, and everything that is not a tensor."""
    folder = folder / "checkpoints" / f"step-{STEPS:06d}"
    assert checkpoint.problem(folder) is None
    manifest, state = (json.loads((folder / name).read_text()) for name in ("manifest.json", "state.json"))
    return manifest["files"], state


def exported(folder):
    """sha256 of every weight file that the run left, those of a process reward model among them."""
    folder = folder / "model"
    files = sorted(folder.rglob("*.safetensors"))
    return {file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _train(folder, name, options, fatal=None, seconds=0.0):
    """Train; a process that is killed some seconds after its fatal step has been told ends itself."""

    def die():
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    def observe(event, details):
        print(event, details, file=log)
        if event == "step" and details["step"] + 1 == fatal:
            threading.Thread(target=die, daemon=True).start()

    os.chdir(folder)
    with (folder / f"{name}.log").open("a") as log:
        run(load("run.toml", [f"logging.name={name}", *options]), Resume("auto"), observe)


def kill_in_steps(folder, name, options, rng):
    """Start the run and kill it once it has gone some steps further, at a random moment of the next; steps done."""
    metrics = folder / "runs" / name / "metrics.jsonl"
    goal = min(steps_of(metrics) + rng.randint(1, 2), STEPS - 1)
    process = forked(_train, folder, name, options, goal, rng.uniform(0.0, 0.1))
    process.join(timeout=PATIENCE_S)
    assert process.exitcode in (-signal.SIGKILL, 0)
    return steps_of(metrics)


def steps_of(metrics):
    return metrics.read_text().count("\n") if metrics.exists() else 0


@pytest.mark.parametrize("method", METHODS)
def test_the_state_of_every_method_survives_kills(tmp_path, method):
    if method == "prime_lora":
        pytest.importorskip("peft")
    (tmp_path / "by_chance.py").write_text(CHANCE)
    answers = [{"prompt": f"{n}+1?\n", "completion": f"so {n + 1}"} for n in range(5)]
    (tmp_path / "expert.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    (tmp_path / "run.toml").write_text('[training]\ngroup_size = 4\n[[rewards]]\nname = "by_chance.chance"\n')
    options = (*SMALL, f"training.max_steps={STEPS}", *METHODS[method])
    whole, killed = tmp_path / "runs" / "whole", tmp_path / "runs" / "killed"
    finish(forked(_train, tmp_path, "killed", options))
    killed.rename(whole)  # one name for both: a checkpoint keeps the configuration, and the name is part of it
    rng = random.Random(method)
    moments = [kill_in_steps(tmp_path, "killed", options, rng) for _ in range(KILLS_EACH)]
    finish(forked(_train, tmp_path, "killed", options))
    print(f"{method}: killed after steps {moments}")
    assert "resumed after step" in (tmp_path / "killed.log").read_text()
    assert rows(killed / "metrics.jsonl") == rows(whole / "metrics.jsonl")
    assert final_state(killed) == final_state(whole)
    assert exported(killed) == exported(whole)
    assert any(row.get("grad/norm", 0) > 0 for row in rows(whole / "metrics.jsonl"))


@pytest.mark.parametrize("overlap", [0, 1])
def test_sigterm_saves_and_exits_75_and_the_resumed_run_is_the_same(tmp_path, overlap):
    options = (f"rollout.overlap={overlap}", "training.max_steps=8")
    (tmp_path / "run.toml").write_text(gated(tmp_path, TOML))
    (tmp_path / "open").touch()
    finish(forked(_train, tmp_path, "whole", (*LONG, *options)))
    (tmp_path / "open").unlink()
    process = start(tmp_path, "stopped", *options)
    until(lambda: steps_of(tmp_path / "runs" / "stopped" / "metrics.jsonl"), process)
    process.terminate()
    (tmp_path / "open").touch()
    assert ends(process) == 75
    assert ends(start(tmp_path, "stopped", *options)) == 0
    assert digest(tmp_path / "runs" / "stopped") == digest(tmp_path / "runs" / "whole")


def test_a_second_sigterm_ends_at_once_and_the_resumed_run_is_the_same(tmp_path):
    (tmp_path / "run.toml").write_text(gated(tmp_path, TOML))
    options = ("training.max_steps=6", "reward_pool.workers=0")
    (tmp_path / "open").touch()
    finish(forked(_train, tmp_path, "whole", (*LONG, *options)))
    (tmp_path / "open").unlink()
    process, run = start(tmp_path, "stopped", *options), tmp_path / "runs" / "stopped"
    until(lambda: (tmp_path / "held").exists(), process)  # the fourth step never ends: its reward waits
    sent = 0
    while process.poll() is None:  # signals that arrive together count once
        process.terminate()
        sent += 1
        time.sleep(0.2)
        assert sent < 5 * PATIENCE_S
    assert (process.returncode, sent > 1) == (75, True)
    kept = sorted((run / "checkpoints").glob("step-*"))
    assert kept
    assert [checkpoint.problem(path) for path in kept] == [None] * len(kept)
    (tmp_path / "open").touch()
    assert ends(start(tmp_path, "stopped", *options)) == 0
    assert digest(run) == digest(tmp_path / "runs" / "whole")


@pytest.mark.parametrize("overlap", [0, 1])
def test_ctrl_c_leaves_no_process_behind_and_exits_130(tmp_path, overlap):
    (tmp_path / "run.toml").write_text(gated(tmp_path, TOML).replace("workers = 1", "workers = 2"))
    process = start(tmp_path, "interrupted", f"rollout.overlap={overlap}")
    until(lambda: steps_of(tmp_path / "runs" / "interrupted" / "metrics.jsonl"), process)
    workers = children(process.pid)
    assert len(workers) >= 2
    process.send_signal(signal.SIGINT)
    (tmp_path / "open").touch()
    assert ends(process) == 130, (tmp_path / "interrupted.log").read_text()
    until(lambda: not any(alive(pid) for pid in workers))
