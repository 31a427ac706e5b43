"""Ctrl-C in a run whose servers hang, and SIGTERM in one whose servers are gone."""

import json
import signal
import socket
import subprocess
import threading

import pytest

from tests.engines.servers import ModelServer
from tests.forks import RETRAIN
from tests.waiting import ends, until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("moment", ["/inference/v1/generate", "/collective_rpc"])
def test_the_second_ctrl_c_ends_a_run_whose_servers_hang(tmp_path, toml, moment):
    """Within a request, and within a sync. The first sync is before any step, and one Ctrl-C ends it."""
    server, hanging = ModelServer(), threading.Event()

    def hang(path):
        if path == moment:
            hanging.set()
            threading.Event().wait()

    server.hook = hang
    with train(server, tmp_path, toml) as run:
        until(hanging.is_set, run)
        run.send_signal(signal.SIGINT)
        if moment == "/inference/v1/generate":
            for line in run.stdout or ():
                if "a second signal ends it at once" in line:
                    break
            run.send_signal(signal.SIGINT)
        assert ends(run) == 130, run.stdout.read()
    server.kill()


def test_sigterm_does_not_wait_for_servers_that_were_told_the_same(tmp_path, toml):
    """The server goes after two steps; the run would wait ten minutes for it."""
    server, running, syncs, once = ModelServer(), [], [], threading.Lock()

    def leave(path):
        syncs.extend([path] * (path == "/collective_rpc"))
        if len(syncs) == 3 and path == "/inference/v1/generate":
            if once.acquire(blocking=False):  # requests come together, and the second signal ends a run at once
                threading.Thread(target=server.kill).start()
                until(lambda: refuses(server.port))
                running[0].send_signal(signal.SIGTERM)
            raise ConnectionError

    server.hook = leave
    with train(server, tmp_path, toml, "vllm.restart_timeout_s=600", "checkpoint.every=0") as run:
        running.append(run)
        code, said = ends(run), run.stdout.read()
    assert code == 75, said
    assert "stopped by SIGTERM" in said
    assert "a checkpoint of step 2 is written" in said


def refuses(port):
    """Whether nobody listens there any more."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) != 0


def train(server, folder, toml, *more):
    """A run of this server in a process of its own."""
    urls = json.dumps([server.url])
    options = (f"vllm.urls={urls}", "rollout.engine=vllm-server", f'logging.dir="{folder}/runs"', *more)
    arguments = [part for option in options for part in ("--set", option)]
    command = [RETRAIN, "train", str(toml), "--plain", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
