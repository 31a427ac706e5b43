"""Real vLLM servers, as `retrain serve` starts them: what they compute, and what happens when they die."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from retrain.engines import VllmServerEngine
from retrain.types import Sampling
from tests.run.conftest import rows
from tests.vllm.models import PROMPTS, saved, worst_error

pytestmark = pytest.mark.vllm
SAMPLING = Sampling(group_size=3, max_tokens=12, stop_ids=(2, 5), seed=4)
TOML = '[model]\npath = "{folder}"\n\n[vllm]\nmax_model_len = 512\nkv_cache_mb = 64\nurls = ["{url}"]\n'


class Serving:
    """`retrain serve` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.toml = folder / f"run{self.url[-5:]}.toml"
        self.toml.write_text(TOML.format(folder=folder, url=self.url))
        self.start()

    def start(self) -> None:
        self.log = self.toml.with_suffix(".log").open("w")
        command = [sys.executable, "-m", "retrain.cli.main", "serve", str(self.toml)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)

    def wait(self) -> Serving:
        """Until it has said its address."""
        said = []
        for line in self.process.stdout:
            said.append(line)
            if line.startswith("urls"):
                assert self.url in line
                return self
        pytest.fail("".join(said) + self.toml.with_suffix(".log").read_text()[-3000:])

    @property
    def group(self) -> int:
        """The process group of vLLM's processes."""
        [child] = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(60)
        self.process.stdout.close()
        self.log.close()


def gone(group: int) -> bool:
    """Whether no process of the group is left within some seconds."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.3)
    return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("served"), "qwen3")


@pytest.fixture(scope="module")
def servers(folder):
    """Two servers, started at the same time."""
    pair = [Serving(folder), Serving(folder)]
    yield [server.wait() for server in pair]
    for server in pair:
        server.end()


@pytest.fixture
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def test_logprobs_are_the_trainers_after_every_sync(servers, model, tmp_path):
    engine = VllmServerEngine(model, tmp_path, urls=[server.url for server in servers])
    for version, temperature in enumerate((0.0, 0.6, 1.0, 1.2)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        engine.load_weights(model.state_dict(), version)
        groups = engine.sample(PROMPTS, replace(SAMPLING, temperature=temperature))
        assert worst_error(model, PROMPTS, groups, temperature) < 2e-5
        assert {row.weights_version for group in groups for row in group} == {version}
    assert engine.metrics() == {"sampler/reissued": 0, "sampler/refused": 0, "sampler/servers": 2}


def test_a_run_trains_with_the_file_that_the_server_was_started_with(servers, folder, train):
    urls = ", ".join(f'"{server.url}"' for server in servers)
    options = ("rollout.engine=vllm-server", f"vllm.urls=[{urls}]", f'model.path="{folder}"', "warmup.steps=0")
    run = train(*options, "vllm.dtype=float32", "training.lr=1e-3")
    metrics = rows(run / "metrics.jsonl")
    assert len(metrics) == 4
    assert all(row["parity/logp_diff_max"] < 1e-4 for row in metrics)
    assert all(row["sampler/servers"] == 2 for row in metrics)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_what_a_server_leaves_undone_the_other_does(servers, model, tmp_path, how):
    """The second server is frozen or killed in the middle of a batch; afterwards it is back, or its process is gone."""
    engine = VllmServerEngine(model, tmp_path, urls=[server.url for server in servers], request_timeout_s=20.0)
    engine.load_weights(model.state_dict(), 7)
    group = servers[1].group
    threading.Timer(0.3, os.killpg, [group, how]).start()
    groups = [engine.sample(PROMPTS, replace(SAMPLING, max_tokens=300, stop_ids=())) for _ in range(4)]
    assert all(worst_error(model, PROMPTS, sampled, 1.0) < 1e-4 for sampled in groups)
    assert engine.metrics()["sampler/servers"] == 1
    if how == signal.SIGSTOP:
        os.killpg(group, signal.SIGCONT)
    else:
        assert servers[1].process.wait(60) == 5
        assert gone(group)
        servers[1].start()
        servers[1].wait()
    engine.load_weights(model.state_dict(), 8)
    sampled = engine.sample(PROMPTS, SAMPLING)
    assert worst_error(model, PROMPTS, sampled, 1.0) < 2e-5
    assert engine.metrics()["sampler/servers"] == 2


@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_no_process_is_left_when_the_command_is_stopped_or_killed(servers, how, code):
    server = servers[0] if how == signal.SIGTERM else servers[1]
    group = server.group
    server.process.send_signal(how)
    assert server.process.wait(60) == code
    assert gone(group)
