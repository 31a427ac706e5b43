"""Who is alive."""

import os
import subprocess
import sys

import pytest

from retrain.errors import StorageError
from retrain.system.lock import Lock, alive, identity


def test_a_process_is_alive_until_it_has_ended_even_if_nobody_has_noticed():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = identity(child.pid)
    assert alive(owner)
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended and stays a zombie
    assert not alive(owner)
    child.wait()
    assert not alive(owner)


def test_a_reused_process_id_is_another_process():
    assert alive(identity(os.getpid()))
    assert not alive(identity(os.getpid()) | {"born": "1"})


def test_nobody_can_tell_of_another_host():
    assert alive(identity(2**22) | {"host": "elsewhere"})


def test_a_pipe_in_the_place_of_a_lock_names_no_owner_and_is_refused(tmp_path):
    """Opening it would wait for a writer for ever, and so would the status of every run."""
    lock = Lock(tmp_path / "lock")
    os.mkfifo(lock.path)
    assert lock.owner() is None
    assert not lock.held()
    with pytest.raises(StorageError, match="is a link or a special file"):
        lock.acquire()
