"""The run directory: ownership, refusal, resume, and files that do not depend on interruptions."""

import gzip
import json
import os
import signal
import socket
import subprocess
import sys

import pytest
import torch

from retrain.config.schema import Checkpoint
from retrain.errors import ConfigError, ConfigProblem, DivergedError, Preempted, StorageError, UserCodeError
from retrain.storage.run_directory import RunDirectory
from retrain.storage.run_environment import environment
from retrain.storage.run_files import config_changes, read_rows
from retrain.system.lock import Lock, identity
from retrain.system.records import read_json

ROLLOUT = {"group": 0, "prompt": "p", "text": "", "reward": 1.0, "completion_ids": [1]}


class Ear:
    """An observer that remembers messages."""

    def __init__(self):
        self.texts = []

    def __call__(self, event, details):
        assert event == "message"
        self.texts.append(details["text"])


def opened(path, mode="new", ear=None, **settings):
    return RunDirectory(path, mode, Checkpoint(**settings), ear or Ear())


def run_steps(directory, start, end, every=2, after=lambda done: None):
    """What the loop does to a run directory: rows, rollouts, evaluations, checkpoints."""
    if start == 0:
        directory.append("eval.jsonl", {"step": 0, "accuracy": 0.0})
    for step in range(start, end):
        directory.append("metrics.jsonl", {"step": step, "reward/mean": step / 10})
        directory.write_rollouts(step, [ROLLOUT | {"text": f"completion of {step}"}])
        done = step + 1
        directory.append("eval.jsonl", {"step": done, "accuracy": done / 10})
        after(done)
        if done % every == 0:
            directory.save_checkpoint(done, {"loop": {"step": done, "w": torch.full((2,), float(done))}})


def content(path):
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name not in ("lock", "status.json")
    }


def test_layout_and_status_of_a_finished_run(tmp_path):
    path = tmp_path / "runs" / "a"
    with opened(path) as directory:
        assert read_json(path / "status.json") == {"outcome": "running"}
        assert Lock(path / "lock").held()
        assert not directory.resuming
        assert directory.restore() is None
        directory.write_config("[training]\n", {"config": {"training": {"lr": 0.1}}, "plugins": {}})
        directory.write_environment({"python": "3"})
        run_steps(directory, 0, 4)
    assert sorted(content(path)) == [
        "checkpoints/step-000002/loop.safetensors",
        "checkpoints/step-000002/manifest.json",
        "checkpoints/step-000002/state.json",
        "checkpoints/step-000004/loop.safetensors",
        "checkpoints/step-000004/manifest.json",
        "checkpoints/step-000004/state.json",
        "config.resolved.json",
        "config.toml",
        "environment.json",
        "eval.jsonl",
        "metrics.jsonl",
        *(f"rollouts/step-00000{step}.jsonl.gz" for step in range(4)),
    ]
    assert (path / "config.toml").read_text() == "[training]\n"
    assert read_json(directory.path / "config.resolved.json") == {"training": {"lr": 0.1}}
    assert [row["step"] for row in read_rows(path / "metrics.jsonl")] == [0, 1, 2, 3]
    assert read_rows(path / "rollouts" / "step-000003.jsonl.gz")[0]["text"] == "completion of 3"
    assert read_json(path / "status.json") == {"outcome": "finished"}
    assert not Lock(path / "lock").held()


@pytest.mark.parametrize("killed_after", [1, 2, 3, 5])
def test_an_interrupted_and_resumed_run_has_the_files_of_an_uninterrupted_one(tmp_path, killed_after):
    with opened(tmp_path / "whole") as directory:
        run_steps(directory, 0, 6)

    def kill(done):
        if done == killed_after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), opened(tmp_path / "cut") as directory:
        run_steps(directory, 0, 6, after=kill)
    assert read_json(tmp_path / "cut" / "status.json") == {"outcome": "interrupted"}
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')  # a row cut off by SIGKILL
    with opened(tmp_path / "cut", "auto") as directory:
        state = directory.restore()
        done = state["loop"]["step"] if state else 0
        assert done == killed_after - 1 if killed_after % 2 else done == killed_after - 2
        run_steps(directory, done, 6)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_an_existing_run_needs_a_flag(tmp_path):
    with opened(tmp_path / "a") as directory:
        run_steps(directory, 0, 2)
    with (
        pytest.raises(ConfigError, match=r"holds a finished run; --resume auto, --fresh, or another name") as caught,
        opened(tmp_path / "a"),
    ):
        pass
    assert caught.value.exit_code == 2
    assert not Lock(tmp_path / "a" / "lock").held()
    before = content(tmp_path / "a")
    with opened(tmp_path / "a", "resume") as directory:
        assert directory.resuming
        assert directory.restore()["loop"]["step"] == 2
    assert content(tmp_path / "a") == before
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with opened(tmp_path / "a", "fresh") as directory:
        assert not directory.resuming
        assert set(content(tmp_path / "a")) == {"notes.txt"}
        directory.append("metrics.jsonl", {"step": 0})
    with pytest.raises(ConfigError, match="holds no run to resume"), opened(tmp_path / "b", "resume"):
        pass
    with opened(tmp_path / "b", "auto") as directory:
        assert directory.restore() is None


def test_fresh_unlinks_a_linked_folder_and_keeps_its_target(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("x")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model").symlink_to(tmp_path / "elsewhere")
    with opened(tmp_path / "a", "fresh"):
        assert not (tmp_path / "a" / "model").exists()
    assert (tmp_path / "elsewhere" / "file").read_text() == "x"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Preempted("stopped\nlines"), {"outcome": "preempted", "exit_code": 75, "error": "stopped"}),
        (DivergedError("nan"), {"outcome": "diverged", "exit_code": 4, "error": "nan"}),
        (UserCodeError("bad reward"), {"outcome": "failed", "exit_code": 1, "error": "bad reward"}),
        (ValueError("may quote anything"), {"outcome": "failed"}),
    ],
)
def test_how_a_run_ended_is_written(tmp_path, error, status):
    with pytest.raises(type(error), match=str(error)), opened(tmp_path / "a"):
        raise error
    assert read_json(tmp_path / "a" / "status.json") == status


def test_a_refused_resume_leaves_the_status_of_the_run(tmp_path):
    with opened(tmp_path / "a"):
        pass
    with pytest.raises(ConfigError, match="refused"), opened(tmp_path / "a", "auto"):
        raise ConfigError([ConfigProblem("run.toml", 1, 1, "key", "refused", "fix")])
    assert read_json(tmp_path / "a" / "status.json") == {"outcome": "finished"}


def test_a_second_process_is_refused_by_name_and_a_dead_one_is_replaced(tmp_path):
    source = (
        "import sys, time; from pathlib import Path; from retrain.system.lock import Lock;"
        "Lock(Path(sys.argv[1])).acquire(); print('held', flush=True); time.sleep(6000)"
    )
    path = tmp_path / "a"
    path.mkdir()
    owner = subprocess.Popen([sys.executable, "-c", source, str(path / "lock")], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline() == "held\n"
        refusal = f"in use by process {owner.pid} on host {socket.gethostname()}"
        with pytest.raises(ConfigError, match=refusal), opened(path):
            pass
        assert Lock(path / "lock").held()
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    assert not Lock(path / "lock").held()
    with opened(path):
        assert Lock(path / "lock").owner()["pid"] == os.getpid()


def test_locks_of_other_hosts_reused_process_ids_and_half_written_ones(tmp_path):
    lock = Lock(tmp_path / "lock")
    assert lock.owner() is None
    lock.path.write_text(json.dumps({"host": "elsewhere", "machine": "elsewhere", "pid": 1, "born": None}))
    with pytest.raises(ConfigError, match=r"on host elsewhere; if that process has ended, .*delete .*lock"):
        lock.acquire()
    lock.release()
    assert lock.owner()["host"] == "elsewhere"  # not ours to free
    lock.path.write_text(json.dumps(identity(os.getpid()) | {"born": "0"}))
    assert not lock.held()  # the process id was reused: its start time differs
    lock.path.write_text('{"host": "els')
    lock.acquire()
    assert lock.held()
    lock.release()
    assert not lock.held()
    lock.path.write_text(json.dumps(identity(1) | {"born": None}))
    assert isinstance(lock.held(), bool)  # a process of another user: no error


@pytest.mark.parametrize("pid", [10**30, 2**31, 0, -1])
def test_the_lock_of_a_process_that_cannot_exist_is_taken_over(tmp_path, pid):
    (tmp_path / "a").mkdir()
    lock = Lock(tmp_path / "a" / "lock")
    lock.path.write_text(json.dumps(identity(1) | {"pid": pid}))
    assert not lock.held()
    with opened(tmp_path / "a"):
        assert lock.owner()["pid"] == os.getpid()


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("mode", ["new", "auto", "fresh"])
def test_a_lock_that_is_a_link_is_refused_and_its_target_is_left_alone(tmp_path, link, mode):
    target = tmp_path / "precious"
    target.write_text("mine")
    (tmp_path / "a").mkdir()
    link(target, tmp_path / "a" / "lock")
    with pytest.raises(StorageError, match="lock is a link or a special file; remove it"), opened(tmp_path / "a", mode):
        pass
    assert target.read_text() == "mine"


def test_a_lock_that_became_a_hard_link_is_not_emptied(tmp_path):
    with pytest.raises(StorageError, match="lock is a link"), opened(tmp_path / "a"):
        os.link(tmp_path / "a" / "lock", tmp_path / "second")
    assert json.loads((tmp_path / "second").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("name", ["checkpoints", "best", "rollouts", "model"])
def test_a_folder_that_is_a_link_is_refused_and_nothing_changes_where_it_leads(tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    for staged in ("step-000009", ".tmp-step-000001"):
        (elsewhere / staged).mkdir(parents=True)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).symlink_to(elsewhere)
    with pytest.raises(StorageError, match=f"{name} is a link"), opened(tmp_path / "a", "auto"):
        pass
    assert sorted(entry.name for entry in elsewhere.iterdir()) == [".tmp-step-000001", "step-000009"]


def test_a_directory_that_cannot_be_written_is_a_storage_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written: ") as caught, opened(tmp_path / "file" / "runs" / "a"):
        pass
    assert caught.value.exit_code == 6


def test_dots_are_not_a_name(tmp_path):
    with pytest.raises(ConfigError, match="is not the name of a directory"), opened(tmp_path / ".."):
        pass


def test_rollouts_are_deterministic_and_readable_by_gzip(tmp_path):
    rows = [{"text": "é\n", "advantages": [0.5]}]
    with opened(tmp_path / "a") as directory:
        first = directory.write_rollouts(7, iter(rows)).read_bytes()
        second = directory.write_rollouts(7, rows, name="diverged").read_bytes()
    assert first == second
    assert json.loads(gzip.decompress(first)) == rows[0]
    assert (tmp_path / "a" / "rollouts" / "diverged-000007.jsonl.gz").is_file()


def test_metrics_that_are_not_finite_survive(tmp_path):
    with opened(tmp_path / "a") as directory:
        directory.append("metrics.jsonl", {"step": 0, "loss": float("nan"), "grad": float("inf")})
    row = read_rows(tmp_path / "a" / "metrics.jsonl")[0]
    assert row["loss"] != row["loss"]
    assert row["grad"] == float("inf")


def test_a_failed_save_is_an_error(tmp_path):
    with opened(tmp_path / "b") as directory:
        (tmp_path / "b" / "checkpoints").write_text("in the way")
        with pytest.raises(StorageError, match="cannot be written"):
            directory.save_checkpoint(1, {"loop": {}})


def test_a_bad_newest_checkpoint_is_named_and_files_go_back_to_the_previous_one(tmp_path):
    path, ear = tmp_path / "a", Ear()
    with opened(path) as directory:
        run_steps(directory, 0, 4)
    os.truncate(path / "checkpoints" / "step-000004" / "loop.safetensors", 10)
    with opened(path, "resume", ear) as directory:
        assert directory.restore()["loop"]["step"] == 2
    assert "loop.safetensors" in ear.texts[0]
    assert [row["step"] for row in read_rows(path / "metrics.jsonl")] == [0, 1]
    assert [row["step"] for row in read_rows(path / "eval.jsonl")] == [0, 1, 2]
    assert sorted(file.name[:11] for file in path.glob("rollouts/*")) == ["step-000000", "step-000001"]


def test_a_row_that_is_not_json_is_a_storage_error(tmp_path):
    with opened(tmp_path / "a") as directory:
        directory.append("metrics.jsonl", {"step": 0})
    (tmp_path / "a" / "metrics.jsonl").write_text("{\n")
    with pytest.raises(StorageError, match=r"metrics\.jsonl:1: not JSON"), opened(tmp_path / "a", "auto") as directory:
        directory.restore()


OLD = {"training": {"lr": 0.1, "max_steps": 4}, "rewards": [{"name": "exact"}], "loss": {"names": ("a", "b")}}


def test_changes_are_refused_with_both_values_unless_allowed():
    assert config_changes(OLD, json.loads(json.dumps(OLD)), ()) == []
    new = {
        "training": {"lr": 0.2, "max_steps": 8},
        "rewards": [{"name": "other"}],
        "loss": {"names": ["a", "b"]},
        "x": 1,
    }
    first = "training.lr: differs from the run to be resumed: 0.1 -> 0.2; --allow-change training.lr"
    with pytest.raises(ConfigError, match=first) as caught:
        config_changes(OLD, new, ["training.max_steps"])
    text = str(caught.value)
    assert 'rewards.0.name: differs from the run to be resumed: "exact" -> "other"' in text
    assert "x: differs from the run to be resumed: null -> 1" in text
    assert "max_steps" not in text
    assert caught.value.exit_code == 2
    assert config_changes(OLD, new, ["training", "rewards", "x"]) == [
        'rewards.0.name: "exact" -> "other"',
        "training.lr: 0.1 -> 0.2",
        "training.max_steps: 4 -> 8",
        "x: null -> 1",
    ]
    assert config_changes({"logging": {"name": "a"}}, {"logging": {"name": "b"}}, ()) == ['logging.name: "a" -> "b"']
    with pytest.raises(ConfigError, match=r"training\.lr"):
        config_changes(OLD, new, ["train", "rewards", "x"])  # a prefix of a name allows nothing


def test_the_environment_tells_versions_and_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "canary-4711")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    found = environment()
    installed, imported = found["packages"]["torch"], torch.__version__  # the second may name its build: 2.13.0+cu130
    assert installed.partition("+")[0] == imported.partition("+")[0]
    assert found["variables"] == {"OMP_NUM_THREADS": "1"} | {
        key: os.environ[key] for key in ("CUDA_VISIBLE_DEVICES",) if key in os.environ
    }
    assert found["git"] is None
    assert "canary" not in json.dumps(found)
    subprocess.run(
        "git init -q . && git -c user.name=n -c user.email=e commit -q --allow-empty -m m", shell=True, check=True
    )
    assert len(environment()["git"]) == 40
    monkeypatch.setenv("PATH", "")
    assert environment()["git"] is None
