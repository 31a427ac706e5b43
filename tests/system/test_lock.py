"""Who is alive."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from retrain.errors import ConfigError, StorageError
from retrain.system.lock import Lock, alive, identity, machine


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


BOOT = "1b4e28ba-2fa1-11d2-883f-0016d3cca427"


@pytest.mark.parametrize("other", ["", f"{BOOT} pid:[4026531836]", machine().replace("pid:", "pid:1")])
def test_a_process_of_another_machine_may_be_alive_also_if_both_have_one_hostname(tmp_path, other):
    """Virtual machines called localhost: PID namespaces have the same inode there, boot ids differ."""
    elsewhere = identity(2**22) | {"machine": other}
    assert elsewhere["host"] == identity(os.getpid())["host"]
    assert alive(elsewhere)
    assert not alive(identity(2**22))

    lock = Lock(tmp_path / "lock")
    lock.path.write_text(json.dumps(elsewhere))
    with pytest.raises(
        ConfigError, match=r"if that process has ended, also by a restart of its machine, delete .*lock"
    ):
        lock.acquire()
    lock.release()
    assert lock.owner()["pid"] == 2**22, "the lock is not ours to release"


@pytest.mark.skipif(not Path("/proc/self/ns/pid").is_symlink(), reason="only Linux has a boot id")
def test_a_machine_is_its_boot_id_and_pid_namespace():
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert machine() == f"{boot} {os.readlink('/proc/self/ns/pid')}"


def test_a_pipe_in_the_place_of_a_lock_names_no_owner_and_is_refused(tmp_path):
    """Opening it would wait for a writer for ever, and so would the status of every run."""
    lock = Lock(tmp_path / "lock")
    os.mkfifo(lock.path)
    assert lock.owner() is None
    assert not lock.held()
    with pytest.raises(StorageError, match="is a link or a special file"):
        lock.acquire()
