"""How many threads a model is trained with."""

import os
import subprocess
import sys
import time

import pytest

from retrain.system import process
from retrain.system.process import ThreadWaiting, cpu_threads, thread_waiting
from tests.commands import invoke

TINY, SMALL, LARGE = 1_400_000, 20_000_000, 135_000_000


@pytest.fixture
def cores(monkeypatch):
    """Have this process believe that it may use so many cores, and that nobody has named a number of threads."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return lambda count: monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)), raising=False)


def test_a_small_model_has_two_threads_and_a_large_one_every_core(cores):
    cores(8)
    assert [cpu_threads(size) for size in (TINY, SMALL, LARGE)] == [2, 4, 8]
    cores(1)
    assert cpu_threads(LARGE) == 1


def test_those_that_share_the_cores_divide_them(cores):
    cores(8)
    assert [cpu_threads(LARGE, sharing) for sharing in (2, 3, 9)] == [4, 2, 1]


@pytest.mark.parametrize(("said", "threads"), [("3", 3), ("5,2", 5), ("", 8), ("0", 8), ("many", 8)])
def test_the_environment_decides_where_it_says_a_number(cores, monkeypatch, said, threads):
    cores(8)
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert cpu_threads(LARGE) == threads


WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@pytest.fixture
def undecided(cores, monkeypatch):
    """Have nobody named a number of threads, or how they wait; four cores."""
    cores(4)
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    yield
    for name in WAITING:
        os.environ.pop(name, None)


def settings():
    return {name: os.environ[name] for name in WAITING if name in os.environ}


@pytest.mark.parametrize(
    ("busy_cores", "chosen", "says"),
    [(0.0, {"GOMP_SPINCOUNT": "10000"}, "spin 10000 times"), (3.0, {}, "sleep while they wait: 3.0 of 4 cores")],
)
def test_threads_spin_where_other_processes_leave_the_cores_idle(undecided, monkeypatch, busy_cores, chosen, says):
    began = time.monotonic()
    monkeypatch.setattr(process, "busy_seconds", lambda: 100 + busy_cores * (time.monotonic() - began))
    waiting = ThreadWaiting()
    waiting.sleep()
    assert settings() == {"OMP_WAIT_POLICY": "passive"}
    waiting.spin_if_quiet()
    assert settings() == {"OMP_WAIT_POLICY": "passive"} | chosen
    assert says in waiting.reason
    assert time.monotonic() - began >= 0.2
    waiting.spin_if_quiet()  # it has been decided
    assert settings() == {"OMP_WAIT_POLICY": "passive"} | chosen


@pytest.mark.parametrize("name", WAITING)
def test_whoever_has_said_how_threads_wait_has_decided(undecided, name):
    value = os.environ[name] = "active" if name == "OMP_WAIT_POLICY" else "7"
    waiting = ThreadWaiting()
    waiting.sleep()
    waiting.spin_if_quiet()
    assert settings() == {name: value}
    assert waiting.reason == f"{name}={value} (from the environment)"


def test_the_command_lets_threads_sleep_before_torch_is_imported():
    script = (
        "import os, sys\nfrom retrain.cli.main import main\nsys.argv = ['retrain', '--version']\n"
        "try:\n    main()\nfinally:\n    print(os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in WAITING}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "passive False", done.stderr


@pytest.mark.parametrize("command", ["train", "explain"])
def test_it_is_decided_before_a_plug_in_can_import_torch(tmp_path, monkeypatch, command):
    done = []
    monkeypatch.setattr(thread_waiting, "spin_if_quiet", lambda: done.append("decided"))
    monkeypatch.setattr(os, "plug_in", lambda: done.append("imported"), raising=False)
    (tmp_path / "early.py").write_text("import os\nos.plug_in()\nraise ImportError\n")
    (tmp_path / "run.toml").write_text('algorithm.advantage_mode = "early.advantage"\n')
    monkeypatch.chdir(tmp_path)
    assert invoke(command, "run.toml").exit_code
    assert done == ["decided", "imported"]
