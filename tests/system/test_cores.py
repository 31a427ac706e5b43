"""How many threads a model is trained with."""

import os
import subprocess
import sys

import pytest

from retrain.system.process import cpu_threads, wait_asleep

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


@pytest.mark.parametrize("name", WAITING)
def test_whoever_has_said_how_threads_wait_has_decided(monkeypatch, name):
    for one in WAITING:
        monkeypatch.delenv(one, raising=False)
    monkeypatch.setenv(name, "active" if name == "OMP_WAIT_POLICY" else "7")
    before = dict(os.environ)
    wait_asleep()
    assert dict(os.environ) == before


def test_the_command_lets_threads_sleep_before_torch_is_imported():
    script = (
        "import os, sys\nfrom retrain.cli.main import main\nsys.argv = ['retrain', '--version']\n"
        "try:\n    main()\nfinally:\n    print(os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in WAITING}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "passive False", done.stderr
