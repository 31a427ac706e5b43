"""What a worker does about the run that another worker left behind."""

import json
import os
import signal
import subprocess

import pytest

from retrain.campaign.work.run_process import evict
from retrain.system.lock import Lock, identity, machine

PARENT = "sleep 1000 & echo $!; wait"
"""A launcher whose rank holds the lock: both are in the process group that the launcher leads."""


@pytest.fixture
def lock(tmp_path):
    return Lock(tmp_path / "lock")


def test_a_run_whose_machine_is_gone_is_free_whichever_of_its_ranks_held_it(lock, tmp_path):
    lock.path.write_text(json.dumps({"host": "gone", "machine": "gone", "pid": 101, "born": "1", "group": 100}))
    evict(tmp_path, {"child": {"machine": "gone", "pid": 99}})
    assert lock.owner() is not None  # of a process that this worker's predecessor did not start
    evict(tmp_path, {"child": {"machine": "gone", "pid": 100}})
    assert lock.owner() is None


def test_a_run_that_was_left_behind_here_is_killed_with_its_launcher(lock, tmp_path):
    launcher = subprocess.Popen(["bash", "-c", PARENT], stdout=subprocess.PIPE, text=True, start_new_session=True)
    rank = int(launcher.stdout.readline())
    lock.path.write_text(json.dumps(identity(rank) | {"group": launcher.pid}))
    evict(tmp_path, {"child": {"machine": machine(), "pid": launcher.pid}})
    assert launcher.wait() == -signal.SIGKILL
    assert not lock.held()


def test_a_lock_tells_the_process_group(lock):
    lock.acquire()
    assert lock.owner()["group"] == os.getpgid(0)
