"""Who is alive."""

import os
import subprocess
import sys

from retrain.system.lock import alive, identity


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
