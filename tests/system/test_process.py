"""Children end with their parent, groups end as a whole, and signal handlers are put back."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from retrain.system.process import SignalHandler, end, follower
from tests.waiting import alive, until


def test_a_child_ends_with_its_parent():
    script = (
        "import os, subprocess, sys; from retrain.system.process import follower\n"
        "child = subprocess.Popen(['sleep', '6000'], preexec_fn=follower(os.getpid()))\n"
        "print(child.pid, flush=True); sys.stdin.read()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.kill()
    parent.communicate()
    until(lambda: not alive(child))


@pytest.mark.parametrize("killed", [True, False])
def test_a_scratch_folder_is_deleted_also_when_its_process_is_killed(killed):
    script = (
        "import sys; from retrain.system.process import scratch_folder\n"
        "with scratch_folder('retrain-test-') as folder:\n"
        "    (folder / 'file').write_text('1'); print(folder, flush=True); sys.stdin.read()\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    folder = Path(owner.stdout.readline().strip())
    assert (folder / "file").exists()
    if killed:
        owner.kill()
    owner.communicate()
    until(lambda: not folder.exists())


def test_a_child_whose_parent_is_gone_already_ends_at_once():
    nobody = follower(os.getppid(), code=75)
    assert subprocess.Popen(["sleep", "6000"], preexec_fn=nobody).wait() == 75


def test_end_kills_the_group_after_the_grace():
    script = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
        "print(subprocess.Popen(['sleep', '6000']).pid, flush=True)\nwhile True: time.sleep(0.1)\n"
    )
    leader = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    helper = int(leader.stdout.readline())
    end(leader, grace_s=600)
    assert leader.returncode == 3
    until(lambda: not alive(helper))
    end(leader)  # harmless


def test_signals_are_handled_inside_the_block_only():
    class Remember(SignalHandler):
        numbers = (signal.SIGUSR1, signal.SIGUSR2)

        def receive(self, number):
            arrived.append(number)

    arrived = []
    before = signal.getsignal(signal.SIGUSR1)
    with Remember():
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
    assert arrived == [signal.SIGUSR1, signal.SIGUSR2]
    assert signal.getsignal(signal.SIGUSR1) is before
