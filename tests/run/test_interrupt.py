"""Ctrl-C in a run whose servers hang."""

import json
import signal
import subprocess
import sys
import threading

import pytest

from tests.engines.servers import ModelServer
from tests.waiting import ends, until


@pytest.mark.parametrize("moment", ["/inference/v1/generate", "/collective_rpc"])
def test_ctrl_c_ends_a_run_whose_servers_hang(tmp_path, toml, moment):
    """Within a request, and within a sync."""
    server, hanging = ModelServer(), threading.Event()

    def hang(path):
        if path == moment:
            hanging.set()
            threading.Event().wait()

    server.hook = hang
    urls = json.dumps([server.url])
    options = (f"vllm.urls={urls}", "rollout.engine=vllm-server", f'logging.dir="{tmp_path}/runs"')
    arguments = [part for option in options for part in ("--set", option)]
    command = [sys.executable, "-m", "retrain.cli.main", "train", str(toml), "--plain", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        until(hanging.is_set, run)
        run.send_signal(signal.SIGINT)
        assert ends(run) == 130, run.stderr.read()
    server.kill()
