"""The client against a real vLLM server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from retrain.engines import VllmServerEngine
from retrain.errors import EngineError
from retrain.types import Sampling
from tests.run.conftest import rows
from tests.vllm.models import PROMPTS, saved, worst_error

pytestmark = pytest.mark.vllm
SAMPLING = Sampling(group_size=3, max_tokens=12, stop_ids=(2, 5), seed=4)
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}
FLAGS = (
    "--skip-tokenizer-init --enable-scale-out --generation-config vllm --logprobs-mode processed_logprobs "
    "--dtype float32 --kv-cache-memory-bytes 67108864 --max-model-len 512 --enforce-eager --host 127.0.0.1"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(folder of the model, address, process) of a server."""
    folder = saved(tmp_path_factory.mktemp("served"), "qwen3")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *FLAGS.split()]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            env={**os.environ, **ENVIRONMENT},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert process.poll() is None, (folder / "log").read_text()[-3000:]
        time.sleep(1)
    yield folder, f"http://127.0.0.1:{port}", process
    with suppress(ProcessLookupError):  # a group of its own: a killed server leaves helpers behind
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_logprobs_are_the_trainers_after_every_sync(server, tmp_path):
    folder, url, _ = server
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = VllmServerEngine(model, tmp_path, urls=[url])
    for version, temperature in enumerate((0.0, 0.6, 1.0, 1.2)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        engine.load_weights(model.state_dict(), version)
        groups = engine.sample(PROMPTS, replace(SAMPLING, temperature=temperature))
        assert worst_error(model, PROMPTS, groups, temperature) < 2e-5
        assert {row.weights_version for group in groups for row in group} == {version}


def test_a_run_trains(server, train):
    folder, url, _ = server
    options = ("rollout.engine=vllm-server", f'vllm_server.urls=["{url}"]', f'model.path="{folder}"', "warmup.steps=0")
    run = train(*options, "training.lr=1e-3")
    metrics = rows(run / "metrics.jsonl")
    assert len(metrics) == 4
    assert all(row["parity/logp_diff_max"] < 1e-4 for row in metrics)


def test_a_server_that_is_killed_while_it_samples_is_an_error_with_its_reason(server, tmp_path):
    folder, url, process = server
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = VllmServerEngine(model, tmp_path, urls=[url], restart_timeout_s=2.0)
    engine.load_weights(model.state_dict(), 0)
    threading.Timer(0.5, process.kill).start()

    def sample_on():
        for _ in range(50):
            engine.sample(PROMPTS, replace(SAMPLING, max_tokens=300, stop_ids=()))

    with pytest.raises(EngineError, match=r"no vLLM server is left.*http://127\.0\.0\.1"):
        sample_on()
