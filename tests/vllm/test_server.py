"""Real vLLM servers, as `retrain serve` starts them: what they compute, how weights reach them, and how they die.

Two servers serve every test; one that a test has killed is started again by the next that needs it.
"""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from retrain.config.load import load
from retrain.engines.vllm import weight_transfer as vllm_transfer
from retrain.engines.vllm.servers import VllmServerEngine
from retrain.engines.vllm.weight_transfer import _Client
from retrain.run.evaluate import measure
from retrain.run.reopen import reopen
from retrain.run.session import Resume, run
from retrain.system import http_client as http
from retrain.training.policy import TorchPolicy
from retrain.training.settings import LoraSettings, PolicySettings
from tests.commands import invoke
from tests.engines.models import Asked, sample
from tests.small_runs import TOML as RUN
from tests.small_runs import rows, same, stored
from tests.vllm import cpu_transfer
from tests.vllm.models import PROMPTS, saved, worst_error
from tests.waiting import ends, until

pytestmark = pytest.mark.vllm
SAMPLING = Asked(group_size=3, max_tokens=12, stop_ids=(2, 5), seed=4)
LONG = replace(SAMPLING, max_tokens=300, stop_ids=())
TOML = """
model = {{ path = "{folder}", dtype = "float32", lora = {{ r = 4 }} }}
[vllm]
max_model_len = 512
kv_cache_mb = 64
urls = ["{url}"]
{more}
"""
CALCULATOR = """
model = {{ path = "{folder}", dtype = "float32" }}
task = {{ name = "sums", params = {{ p_quick = 0.3, p_slip = 0.0 }} }}
environment = {{ name = "calculator", max_turns = 4, turn_tokens = 14 }}
training = {{ max_steps = 1, batch_size = 1, group_size = 2, max_tokens = 64, lr = 1e-6 }}
warmup = {{ steps = 700, lr = 5e-3, problems = 3200 }}
eval = {{ problems = 256, samples = 2, greedy = false }}
logging = {{ dir = "{folder}/runs" }}
"""
ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Serving:
    """`retrain serve` in a process of its own."""

    def __init__(self, folder: Path, more: str) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.toml = folder / f"run{self.url[-5:]}.toml"
        self.toml.write_text(TOML.format(folder=folder, url=self.url, more=more))
        (folder / f"plugin{self.url[-5:]}").mkdir()
        self.plugin = cpu_transfer.plugin(folder / f"plugin{self.url[-5:]}")
        self.start()

    def start(self) -> None:
        """Start it; what an earlier process of it said is lost."""
        with self.toml.with_suffix(".log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "retrain", "serve", str(self.toml)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{self.plugin}"},
            )
        self.ready = False

    def wait(self) -> "Serving":
        """Until it has said its address; a server that has ended is started again."""
        if self.process.poll() is not None:
            self.process.stdout.close()
            self.start()
        said = []
        while not self.ready:
            said.append(self.process.stdout.readline())
            if not said[-1]:
                pytest.fail("".join(said) + self.toml.with_suffix(".log").read_text()[-3000:])
            self.ready = said[-1].startswith("urls")
        assert not said or self.url in said[-1]
        return self

    @property
    def group(self) -> int:
        """The process group of vLLM's processes: its leader is the child that is no shell."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(child) for child in children if "vllm" in Path(f"/proc/{child}/cmdline").read_text())

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        ends(self.process)
        self.process.stdout.close()


def gone(group: int) -> bool:
    """Wait until no process of the group is left."""

    def empty():
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        return False

    return until(empty)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("served"), "qwen3")


@pytest.fixture(scope="module")
def pair(folder):
    """Two servers, started at the same time: the first for `nccl`, the second for `ipc` and adapters."""
    started = [Serving(folder, 'transfer = "nccl"\nlora = "merged"'), Serving(folder, 'transfer = "ipc"')]
    yield started
    for server in started:
        server.end()


@pytest.fixture
def servers(pair):
    """Both servers, and both are up."""
    return [server.wait() for server in pair]


@pytest.fixture
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def on_cpu(monkeypatch):
    """vLLM's transfers between GPUs work without them in this process, too."""
    cpu_transfer.register(monkeypatch.setattr)
    monkeypatch.setattr(vllm_transfer, "DEVICES", {"cpu"})


def change(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))


def test_logprobs_are_the_trainers_after_every_sync(servers, model, tmp_path):
    engine = VllmServerEngine(model, tmp_path, "float32", urls=[server.url for server in servers])
    for version, temperature in enumerate((0.0, 0.6, 1.0, 1.2)):
        change(model)
        engine.load_weights(model.state_dict(), version)
        groups = sample(engine, PROMPTS, replace(SAMPLING, temperature=temperature))
        assert worst_error(model, PROMPTS, groups, temperature) < 2e-5
        assert {row.weights_version for group in groups for row in group} == {version}
    counts = {"sampler/reissued": 0, "sampler/refused": 0, "sampler/servers": 2, "sampler/waited": 0}
    assert engine.metrics() == counts


@pytest.mark.parametrize(("index", "transfer"), [(0, "nccl"), (1, "ipc")])
def test_logprobs_are_the_trainers_after_every_transfer_of_vllms_own(servers, model, tmp_path, on_cpu, index, transfer):
    """A trainer may break off in the middle of an update, with one of three matrices that are loaded together."""
    url = servers[index].url
    engine = VllmServerEngine(model, tmp_path, "float32", urls=[url], transfer=transfer, request_timeout_s=60.0)
    for version in (1, 2, 3):
        change(model)
        if version == 2:
            engine.close()
            abort_update(_Client(url, http.Calls(20.0)), transfer, model.state_dict()[QUERIES])
        engine.load_weights(model.state_dict(), version)
        groups = sample(engine, PROMPTS, SAMPLING)
        assert worst_error(model, PROMPTS, groups, 1.0) < 2e-5
        assert {row.weights_version for group in groups for row in group} == {version}
    assert not (tmp_path / "vllm" / "model.safetensors").exists()
    engine.close()


QUERIES = "model.layers.0.self_attn.q_proj.weight"


def abort_update(client, transfer, queries):
    """Begin an update; memory can be shared for a part of it, and a broadcast cannot be aborted without a hang."""
    client.start_weight_update()
    if transfer == "ipc":
        meta = {"names": [QUERIES], "dtype_names": ["float32"], "shapes": [list(queries.shape)]}
        client.update_weights({**meta, "ipc_handles": [{"cpu": cpu_transfer.share(queries * 0.0)[1]}]})


def with_adapter(folder):
    """A policy that trains an adapter, and a function that changes the adapter."""
    policy = TorchPolicy(
        AutoModelForCausalLM.from_pretrained(folder),
        PolicySettings(lora=LoraSettings(r=4, target_modules="all-linear")),
    )

    def go():
        with torch.no_grad():
            for name, parameter in policy.adapter.named_parameters():
                if "lora_" in name:
                    parameter.add_(0.05 * torch.randn_like(parameter))

    return policy, go


def test_adapters_replace_each_other_and_a_server_started_anew_gets_base_and_adapter(servers, folder, tmp_path, on_cpu):
    """The server is killed in the middle of a batch, with the command that started it; no process of it is left."""
    server = servers[1]
    policy, change_adapter = with_adapter(folder)
    engine = VllmServerEngine(
        policy.model, tmp_path, "float32", urls=[server.url], transfer="ipc", restart_timeout_s=300.0
    )
    change(policy.model.get_base_model() if hasattr(policy.model, "get_base_model") else policy.model)
    engine.load_weights(policy.reference_weights(), 0)
    for version in (0, 1, 2):
        change_adapter()
        policy.save_adapter(tmp_path / "adapter")
        engine.load_adapter(tmp_path / "adapter", version)
        groups = sample(engine, PROMPTS, SAMPLING)
        assert worst_error(policy.model, PROMPTS, groups, 1.0) < 2e-5
        assert {row.weights_version for group in groups for row in group} == {version}
    group = server.group

    def both():
        os.kill(group, signal.SIGKILL)
        server.process.kill()
        server.process.wait()
        assert gone(group)
        server.wait()

    killer = threading.Timer(0.3, both)
    killer.start()
    groups = [sample(engine, PROMPTS, LONG) for _ in range(4)]
    killer.join()
    assert all(worst_error(policy.model, PROMPTS, sampled, 1.0) < 1e-4 for sampled in groups)
    assert engine.metrics()["sampler/reissued"] > 0
    engine.close()


def overlap(monkeypatch, url):
    """Have a server in the middle of requests when it next loads weights: those before wait, and run when it does."""
    request, call = http.Calls.request, http.Calls.__call__
    held, loads = threading.Event(), threading.Event()

    async def held_back(calls, asked, *rest, **options):
        while asked.startswith(url + "/inference") and not loads.is_set():
            held.set()
            await asyncio.sleep(0.01)
        return await request(calls, asked, *rest, **options)

    def loaded(calls, asked, *rest, **options):
        if asked.startswith(url + "/pause") and held.is_set() and not loads.is_set():
            loads.set()
            until(lambda: re.search(r"vllm:num_requests_running\{.*\} [1-9]", call(calls, url + "/metrics")))
        return call(calls, asked, *rest, **options)

    monkeypatch.setattr(http.Calls, "request", held_back)
    monkeypatch.setattr(http.Calls, "__call__", loaded)


def options(servers, folder, tmp_path, name):
    urls = json.dumps([server.url for server in servers])
    where = (f'logging.dir="{tmp_path}/runs"', f"logging.name={name}", f'model.path="{folder}"', "warmup.steps=0")
    exact = ("model.dtype=float32", "vllm.dtype=float32", "rollout.parity_every=1", "training.lr=1e-3")
    limits = ("vllm.request_timeout_s=60", "vllm.restart_timeout_s=1", "rollout.engine=vllm-server")
    return [part for one in (f"vllm.urls={urls}", *where, *exact, *limits) for part in ("--set", one)]


def train(tmp_path, arguments):
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    return invoke("train", str(file), "--plain", *arguments)


def test_two_ranks_sample_with_two_servers_as_one_process_does(servers, folder, tmp_path):
    one, two = (options(servers, folder, tmp_path, name) for name in ("one", "two"))
    assert train(tmp_path, one).exit_code == 0
    command = [sys.executable, "-m", "retrain", "train", str(tmp_path / "run.toml"), "--ranks", "2", "--plain"]
    ended = subprocess.run([*command, *two], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert same(tmp_path / "runs" / "two", tmp_path / "runs" / "one") <= 1e-5
    assert {row["sampler/servers"] for row in rows(tmp_path / "runs" / "two" / "metrics.jsonl")} == {2}


CONTINUOUS = (
    *("rollout.mode=continuous", "rollout.max_staleness=2", "reward_pool.workers=1"),
    *("training.max_tokens=160", "logging.rollouts_every=1", "checkpoint.every=1", "checkpoint.keep=1"),
    "eval.problems=0",
)


def problems(run, steps):
    """Ids of the problems of all groups that were trained on."""
    return [id for step in range(steps) for id in dict.fromkeys(row["problem_id"] for row in stored(run, step))]


def test_a_continuous_run_gets_weights_between_tokens_and_a_lost_server_comes_back(
    servers, folder, tmp_path, monkeypatch
):
    overlap(monkeypatch, servers[0].url)
    monkeypatch.setattr("retrain.engines.vllm.servers.HEALTH_EVERY_S", 0.5)
    lost = servers[1]
    group = lost.group

    def observe(event, details):
        if event == "step" and details["step"] == 1:
            os.killpg(group, signal.SIGKILL)
            ends(lost.process)
        if event == "step" and details["step"] == 4:
            lost.wait()

    file = tmp_path / "run.toml"
    file.write_text(RUN)
    flags = options(servers, folder, tmp_path, "continuous")[1::2]
    trained = run(load(file, [*flags, *CONTINUOUS, "training.max_steps=10"]), Resume(), observe)
    metrics = rows(trained / "metrics.jsonl")
    assert len(metrics) == 10
    assert metrics[0]["sampler/servers"] == 2
    assert min(row["sampler/servers"] for row in metrics[2:6]) == 1
    assert metrics[-1]["sampler/servers"] == 2
    assert all(row["parity/logp_diff_max"] < 1e-4 for row in metrics)
    assert sum(row["rollout/staleness_mixed"] for row in metrics) > 0
    mixed = [turn for step in range(10) for row in stored(trained, step) for turn in row["turns"] if "versions" in turn]
    assert mixed
    assert all(len(turn["versions"]) == turn["end"] - turn["start"] for turn in mixed)
    assert all(sorted(turn["versions"]) == turn["versions"] for turn in mixed), "weights only become newer"
    assert len(problems(trained, 10)) == len({*problems(trained, 10)}), "no prompt is lost, and none comes twice"


def test_episodes_of_the_same_weights_are_equal_in_distribution_on_every_engine(servers, folder, tmp_path):
    file = tmp_path / "calculator.toml"
    file.write_text(CALCULATOR.format(folder=folder))
    trained = run(load(file, []), Resume(), lambda *_: None)

    def played(*overrides):
        with closing(reopen(trained, overrides, lambda *_: None)) as parts:
            return measure(parts, 1).row

    urls, exact = json.dumps([server.url for server in servers]), "vllm.dtype=float32"
    embedded = played()
    waves = played("rollout.engine=vllm", exact, "vllm.kv_cache_mb=64")
    threads = played("rollout.engine=vllm", exact, "vllm.kv_cache_mb=64", "environment.threads=16")
    remote = played("rollout.engine=vllm-server", exact, f"vllm.urls={urls}", "environment.threads=16")
    print([(one["accuracy"], one["turns"], one["avg_tokens"]) for one in (embedded, waves, threads, remote)])
    share, episodes = embedded["accuracy"], 512
    assert 0.05 < share < 0.95
    for other in (waves, threads, remote):  # four standard errors; of the turns, which are 1 to 4, at the most
        assert abs(other["accuracy"] - share) < 4 * (2 * share * (1 - share) / episodes) ** 0.5
        assert abs(other["turns"] - embedded["turns"]) < 4 * 1.5 * (2 / episodes) ** 0.5
        # What vLLM draws does not depend on what it samples at the same time, but for rounding.
        assert abs(other["accuracy"] - waves["accuracy"]) < 6 / episodes
        assert abs(other["avg_tokens"] - waves["avg_tokens"]) < 0.2
