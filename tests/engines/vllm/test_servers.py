"""The client of vLLM servers against servers that die, hang, lag behind and lie; tests/vllm has a real one."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from peft import LoraConfig
from safetensors.torch import load_file

from retrain.engines.vllm import servers as module
from retrain.engines.vllm.servers import VllmServerEngine
from retrain.errors import EngineError
from retrain.system.http_client import is_loopback
from retrain.types import Request, Sampling
from tests.engines.models import Asked, flat, sample, tiny
from tests.engines.servers import DAMAGE, Server
from tests.waiting import PATIENCE_S, until

SAMPLING = Asked(group_size=2, max_tokens=3, stop_ids=(2,), seed=4)
PROMPTS = [[5, 9, 11], [7], [3, 4], [13, 2]]


@pytest.fixture
def servers():
    pair = [Server(), Server()]
    yield pair
    for server in pair:
        server.kill()


@pytest.fixture
def model():
    return tiny("qwen3")


def client(servers, model, tmp_path, **options):
    options = {"request_timeout_s": PATIENCE_S, "start_timeout_s": 0.1, "restart_timeout_s": 0.1} | options
    return VllmServerEngine(model, tmp_path, "bfloat16", urls=[f"{server.url}/" for server in servers], **options)


@pytest.fixture
def engine(servers, model, tmp_path):
    """A client whose servers have the model's weights, as version 7."""
    made = client(servers, model, tmp_path)
    made.load_weights(model.state_dict(), 7)
    return made


def test_every_server_loads_the_weights_and_they_share_the_prompts(servers, model, tmp_path, engine):
    groups = sample(engine, PROMPTS, SAMPLING)
    assert [[row.ids[0] for row in group] for group in groups] == [[5, 5], [7, 7], [3, 3], [13, 13]]
    assert {row.weights_version for row in flat(groups)} == {7}
    assert [server.asked for server in servers] == [2, 2]
    assert "lm_head.weight" in load_file(tmp_path / "vllm" / "model.safetensors"), "tied entries are written as well"


def test_greedy_completions_are_sampled_once_and_repeated(servers, model, tmp_path):
    engine = client(servers, model, tmp_path)
    engine.load_weights(model.state_dict(), 0)
    greedy = Asked(group_size=3, max_tokens=2, temperature=0.0)
    assert [len(group) for group in sample(engine, PROMPTS, greedy)] == [3, 3, 3, 3]


LATE = ("hang", "trickle")
ANSWERS = (*LATE, *DAMAGE, "drop", "stale", "mixed", "short", "brief", "long", "few", "/inference/v1/generate")
LABEL = "/update_weight_version"
SYNC = ("/pause", "/collective_rpc", "/reset_prefix_cache", LABEL, "/resume")


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("fault", ANSWERS)
def test_what_one_server_fails_at_the_other_does(servers, model, tmp_path, fault):
    engine = client(servers, model, tmp_path, **({"request_timeout_s": 4.0} if fault in LATE else {}))
    engine.load_weights(model.state_dict(), 7)
    servers[0].fault = fault
    groups = sample(engine, PROMPTS, SAMPLING)
    assert [group[0].ids for group in groups] == [(5, 5, 5), (7, 7, 7), (3, 3, 3), (13, 13, 13)]
    asked = servers[0].asked
    sample(engine, PROMPTS, SAMPLING)
    assert servers[0].asked == asked, "it is not asked again before it has loaded current weights"
    servers[0].fault = ""
    engine.load_weights(model.state_dict(), 8)
    sample(engine, PROMPTS, SAMPLING)
    assert servers[0].asked > asked


@pytest.mark.parametrize("fault", [*SYNC, "cached"])
def test_a_server_whose_sync_fails_is_left_out(servers, model, tmp_path, fault):
    engine = client(servers, model, tmp_path)
    servers[1].fault = fault
    engine.load_weights(model.state_dict(), 7)
    sample(engine, PROMPTS, SAMPLING)
    assert [server.asked for server in servers] == [4, 0]
    servers[0].fault = fault
    with pytest.raises(EngineError, match=r"no vLLM server is usable; http.*127\.0\.0\.1"):
        engine.load_weights(model.state_dict(), 8)
    with pytest.raises(EngineError, match="no weights"):
        sample(engine, PROMPTS, SAMPLING)


@pytest.mark.slow
def test_a_server_that_was_started_again_is_given_the_current_weights(servers, model, tmp_path):
    engine = client(servers[:1], model, tmp_path, restart_timeout_s=PATIENCE_S)
    engine.load_weights(model.state_dict(), 7)
    servers[0].kill()
    threading.Timer(0.5, servers[0].start, [servers[0].port]).start()
    assert {row.weights_version for row in flat(sample(engine, PROMPTS, SAMPLING))} == {7}
    assert servers[0].loaded == 2


def test_a_failure_that_stays_ends_after_the_retries(servers, model, tmp_path):
    engine = client(
        servers,
        model,
        tmp_path,
    )
    engine.load_weights(model.state_dict(), 7)
    for server in servers:
        server.fault = "stale"
    with pytest.raises(EngineError, match=r"failed 4 times.*sampled from the weights older"):
        sample(engine, PROMPTS[:1], SAMPLING)


def test_a_request_that_is_refused_is_not_repeated(servers, model, tmp_path):
    engine = client(servers[:1], model, tmp_path)
    engine.load_weights(model.state_dict(), 7)
    servers[0].fault = "refuse"
    with pytest.raises(EngineError, match="refuses the request"):
        sample(engine, PROMPTS[:1], SAMPLING)
    assert servers[0].asked == 1


def test_what_is_no_usable_server_shows_at_the_start(servers, model, tmp_path):
    servers[0].version = "0.31.1"
    with pytest.raises(EngineError, match=r"is vLLM 0\.31\.1"):
        client(servers[:1], model, tmp_path)
    servers[0].version, servers[0].dev = "0.33.1", False
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
        client(servers[:1], model, tmp_path)
    with pytest.raises(EngineError, match="refused; start it with `retrain serve`"):
        VllmServerEngine(model, tmp_path, "bfloat16", urls=["http://127.0.0.1:9"], start_timeout_s=0.1)


@pytest.mark.slow
def test_a_run_waits_for_a_server_that_is_starting(servers, model, tmp_path, caplog):
    for server in servers:
        server.kill()
    threading.Thread(target=lambda: until(lambda: caplog.records) and servers[1].start()).start()
    engine = client(servers, model, tmp_path, start_timeout_s=PATIENCE_S)
    assert f"vLLM servers at {servers[1].url}; without {servers[0].url}" in engine.describe()
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"waiting for a vLLM server to answer at {servers[0].url}, {servers[1].url} (0 of at most")
    assert "[vllm] start_timeout_s" in line


def test_the_key_is_sent_with_every_request(servers, model, tmp_path, monkeypatch):
    monkeypatch.setenv("OUR_SERVERS", "key-of-ours")
    engine = client(servers, model, tmp_path, api_key_env="OUR_SERVERS")
    engine.load_weights(model.state_dict(), 7)
    sample(engine, PROMPTS, SAMPLING)
    assert {key for server in servers for key in server.keys} == {"Bearer key-of-ours"}


def test_one_of_two_servers_is_enough_to_start(servers, model, tmp_path):
    servers[1].kill()
    engine = client(servers, model, tmp_path)
    assert f"vLLM servers at {servers[0].url}; without {servers[1].url}" in engine.describe()
    engine.load_weights(model.state_dict(), 7)
    sample(engine, PROMPTS, SAMPLING)
    assert servers[0].asked == 4
    servers[1].start()
    engine.load_weights(model.state_dict(), 8)
    sample(engine, PROMPTS, SAMPLING)
    assert servers[1].asked == 2
    assert engine.describe() == f"vLLM servers at {servers[0].url}, {servers[1].url}"


def test_addresses_that_other_machines_reach_are_refused(servers, model, tmp_path):
    for url in ("http://10.0.0.5:8000", "http://sampler:8000"):
        with pytest.raises(EngineError, match=r"other machines.*allow_remote = true"):
            VllmServerEngine(model, tmp_path, "bfloat16", urls=[url])
    unknown = {"urls": ["http://nowhere.invalid:8000"], "allow_remote": True, "start_timeout_s": 0.1}
    with pytest.raises(EngineError, match="start it"):
        VllmServerEngine(model, tmp_path, "bfloat16", **unknown)
    assert is_loopback("http://localhost:1")
    assert is_loopback("http://[::1]:1")


def test_weights_of_another_model_are_refused(servers, model, tmp_path):
    engine = client(servers, model, tmp_path)
    with pytest.raises(EngineError, match="is missing"):
        engine.load_weights(dict(model.named_parameters()), 0)


def test_what_went_wrong_is_counted(servers, model, engine):
    sample(engine, PROMPTS, SAMPLING)
    counts = {"sampler/reissued": 0, "sampler/refused": 0, "sampler/servers": 2, "sampler/waited": 0}
    assert engine.metrics() == counts
    servers[0].fault = "stale"
    sample(engine, PROMPTS, SAMPLING)
    stale = engine.metrics()
    assert 1 <= stale["sampler/reissued"] == stale["sampler/refused"] <= 2, "the second may come after the first"
    assert stale["sampler/servers"] == 1
    servers[0].fault = "drop"
    engine.load_weights(model.state_dict(), 8)
    sample(engine, PROMPTS, SAMPLING)
    dropped = engine.metrics()
    assert 1 <= dropped["sampler/reissued"] <= 2
    assert (dropped["sampler/refused"], dropped["sampler/servers"]) == (0, 1)


@pytest.mark.parametrize("moment", ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"])
def test_a_server_that_dies_within_a_sync_is_asked_for_nothing_until_it_has_all_weights(
    servers, model, tmp_path, moment
):
    engine = client(servers, model, tmp_path)
    engine.load_weights(model.state_dict(), 7)

    def die(path):
        if path == moment:
            servers[0].kill()
            raise ConnectionError

    servers[0].hook = die
    engine.load_weights(model.state_dict(), 8)
    assert {row.weights_version for row in flat(sample(engine, PROMPTS, SAMPLING))} == {8}
    assert [server.asked for server in servers] == [0, 4]
    servers[0].hook = lambda path: None
    servers[0].seen.clear()
    servers[0].paused = False  # as a new process is
    servers[0].start()
    engine.load_weights(model.state_dict(), 9)
    sample(engine, PROMPTS, SAMPLING)
    assert servers[0].seen == ["/pause", LABEL, *SYNC[1:], "/inference/v1/generate", "/inference/v1/generate"]


def test_a_server_started_anew_without_the_clients_knowledge_is_not_believed(servers, model, tmp_path):
    """It answers at once, from weights that nobody gave it."""
    engine = client(servers[:1], model, tmp_path)
    engine.load_weights(model.state_dict(), 7)
    servers[0].kill()
    servers[0].start()
    assert {row.weights_version for row in flat(sample(engine, PROMPTS[:1], SAMPLING))} == {7}
    assert (servers[0].loaded, servers[0].asked) == (2, 2)
    assert engine.metrics()["sampler/refused"] == 1


def test_many_requests_do_not_wait_one_after_the_other_for_a_server_that_never_returns(servers, model, tmp_path):
    engine = client(servers[:1], model, tmp_path)
    engine.load_weights(model.state_dict(), 7)
    servers[0].kill()
    with pytest.raises(EngineError, match="no vLLM server is usable"):
        sample(engine, PROMPTS * 16, SAMPLING)
    assert engine._revivals == 1


def interrupted(condition):
    """Have Ctrl-C arrive in the main thread once the condition holds."""
    hanging = threading.Thread(target=lambda: until(condition) and os.kill(os.getpid(), signal.SIGINT), daemon=True)
    hanging.start()
    return pytest.raises(KeyboardInterrupt)


@pytest.mark.parametrize("where", ["/pause", "/collective_rpc", "/resume"])
def test_a_server_that_hangs_within_a_sync_is_left_out(servers, model, tmp_path, monkeypatch, where):
    monkeypatch.setattr(module, "_LATE_S", 0.3)
    engine = client(servers, model, tmp_path, request_timeout_s=PATIENCE_S)
    gate = threading.Event()
    servers[0].hook = lambda path: path == where and gate.wait()
    began = time.monotonic()
    engine.load_weights(model.state_dict(), 7)
    assert time.monotonic() - began < PATIENCE_S / 2
    assert engine.metrics()["sampler/servers"] == 1
    assert {row.weights_version for row in flat(sample(engine, PROMPTS, SAMPLING))} == {7}
    assert [server.asked for server in servers] == [0, 4]
    gate.set()
    engine.load_weights(model.state_dict(), 8)
    assert engine.metrics()["sampler/servers"] == 2


def test_a_stop_does_not_wait_for_a_server_that_hangs_within_a_sync(servers, model, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_STOPPING_S", 0.3)
    engine = client(servers[:1], model, tmp_path, request_timeout_s=PATIENCE_S)
    gate = threading.Event()

    def hang(path):
        if path == "/pause":
            engine.request_stop()
            gate.wait()

    servers[0].hook = hang
    began = time.monotonic()
    with pytest.raises(EngineError, match="no vLLM server is usable"):
        engine.load_weights(model.state_dict(), 7)
    assert time.monotonic() - began < PATIENCE_S / 2
    gate.set()


def left_behind():
    return [one for one in threading.enumerate() if one.name.startswith("ThreadPoolExecutor")]


@pytest.mark.parametrize("where", ["/collective_rpc", "/version", "/inference/v1/generate"])
def test_ctrl_c_does_not_wait_for_a_server_that_hangs(servers, model, tmp_path, where):
    engine = client(servers[:1], model, tmp_path)
    sampling = where == "/inference/v1/generate"
    if sampling:
        engine.load_weights(model.state_dict(), 7)
    reached = []

    def hang(path):
        if path == where:
            reached.append(path)
            threading.Event().wait()

    servers[0].hook = hang
    with interrupted(lambda: reached):
        sample(engine, PROMPTS[:1], SAMPLING) if sampling else engine.load_weights(model.state_dict(), 7)
    until(lambda: not left_behind())
    assert reached == [where], "nothing is asked again"


def test_ctrl_c_ends_the_wait_for_servers_to_come_back(servers, model, tmp_path):
    engine = client(servers[:1], model, tmp_path, restart_timeout_s=PATIENCE_S)
    engine.load_weights(model.state_dict(), 7)
    servers[0].kill()
    with interrupted(lambda: engine._revivals == 1):
        sample(engine, PROMPTS, SAMPLING)
    until(lambda: not left_behind())
    with pytest.raises(EngineError, match="sampling was interrupted"):
        sample(engine, PROMPTS, SAMPLING)


@pytest.fixture
def adapting(servers, model, tmp_path):
    """A client that hands over adapters, and the adapter's folder."""
    model.peft_config = {"default": LoraConfig(r=8)}
    for server in servers:
        server.config["lora_config"] = {"max_lora_rank": 8}
    folder = tmp_path / "adapter"
    folder.mkdir()
    return client(servers, model, tmp_path, lora="adapter"), folder


def test_the_base_is_sent_once_and_then_adapters_alone(servers, model, adapting):
    engine, folder = adapting
    assert engine.takes_adapters
    engine.load_weights(model.state_dict(), 3)
    for version in (3, 4, 5):
        servers[0].seen.clear()
        engine.load_adapter(folder, version)
        assert {row.weights_version for row in flat(sample(engine, PROMPTS, SAMPLING))} == {version}
    asked = ["/pause", LABEL, "/v1/load_lora_adapter", *SYNC[2:], *["/inference/v1/generate"] * 2]
    assert servers[0].seen == asked
    assert [server.loaded for server in servers] == [1, 1]
    assert servers[0].adapter == str(folder)
    assert VllmServerEngine(model, folder, "bfloat16", urls=[servers[0].url]).takes_adapters, (
        "also if nobody asks for it"
    )


def test_a_server_started_anew_gets_base_and_adapter_before_it_samples(servers, model, adapting):
    """It refuses requests for an adapter that it does not know; a sync finds its weights to be none of ours."""
    engine, folder = adapting
    engine.load_weights(model.state_dict(), 3)
    engine.load_adapter(folder, 4)
    servers[0].kill()
    servers[0].start()
    assert {row.weights_version for row in flat(sample(engine, PROMPTS, SAMPLING))} == {4}
    assert (servers[0].loaded, servers[0].adapter) == (1, "")
    engine.load_adapter(folder, 5)
    sample(engine, PROMPTS, SAMPLING)
    assert (servers[0].loaded, servers[0].adapter) == (2, str(folder))
    servers[1].kill()
    servers[1].start()
    engine.load_adapter(folder, 6)
    assert (servers[1].loaded, servers[1].adapter) == (2, str(folder)), "also when no request has noticed"


def test_a_server_started_without_adapters_or_for_smaller_ones_shows_at_the_start(servers, model, tmp_path):
    model.peft_config = {"default": LoraConfig(r=16)}
    servers[1].config["lora_config"] = {"max_lora_rank": 8}
    with pytest.raises(EngineError, match=r'without support for adapters; .*lora = "merged".*rank 8 at most'):
        client(servers, model, tmp_path)
    assert not client(servers, model, tmp_path, lora="merged").takes_adapters
    assert not client(servers, model, tmp_path, dtype="float32").takes_adapters


def test_what_vllm_would_do_otherwise_than_asked_is_refused_before_it_is_asked(servers, model, tmp_path):
    servers[1].config["model_config"]["max_model_len"] = 6
    engine = client(servers, model, tmp_path)
    engine.load_weights(model.state_dict(), 7)
    assert len(sample(engine, PROMPTS, SAMPLING)) == 4, "the longest has three tokens, and takes three more"
    asked = [server.asked for server in servers]
    for prompts, sampling, message in (
        ([[1, 2, 3, 4]], SAMPLING, r"need 7 positions, but vLLM has 6; .*\[vllm\] max_model_len"),
        ([[1], []], SAMPLING, "a prompt has no tokens"),
        ([[1]], replace(SAMPLING, temperature=0.005), "at least 0.01"),
    ):
        with pytest.raises(EngineError, match=message):
            sample(engine, prompts, sampling)
    assert [server.asked for server in servers] == asked


@pytest.mark.parametrize("moment", ["/reset_prefix_cache", "/resume"])
def test_weights_that_another_run_loads_meanwhile_are_not_believed(servers, model, tmp_path, moment):
    engine = client(servers, model, tmp_path)
    other = VllmServerEngine(model, tmp_path / "other", "bfloat16", urls=[servers[0].url])
    engine.load_weights(model.state_dict(), 7)
    loading = threading.Event()

    def meanwhile(path):
        if path == moment and servers[0].loaded == 2 and not loading.is_set():
            loading.set()
            other.load_weights(model.state_dict(), 3)

    servers[0].hook = meanwhile
    engine.load_weights(model.state_dict(), 8)
    assert {row.weights_version for row in flat(sample(engine, PROMPTS, SAMPLING))} == {8}
    assert loading.is_set()
    assert servers[0].asked == 0
    assert servers[0].label.startswith("mixed")
    assert sample(other, PROMPTS, SAMPLING), "it notices as well, and loads its weights again"
    assert servers[0].loaded == 4


class Gate:
    """Holds requests for completions at a server until it is opened, and counts those that are there."""

    def __init__(self, server):
        self.lock, self.inside, self.most, self.opened = threading.Lock(), 0, 0, threading.Event()
        server.hook = self.enter

    def enter(self, path):
        if path == "/inference/v1/generate":
            with self.lock:
                self.inside += 1
                self.most = max(self.most, self.inside)
            self.opened.wait(PATIENCE_S)
            with self.lock:
                self.inside -= 1


def in_background(function, *arguments):
    """Call a function in a thread; return a function that waits for its result."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function, *arguments)
    pool.shutdown(wait=False)
    return lambda: future.result(PATIENCE_S)


def test_a_full_queue_holds_requests_back_in_their_order(servers, model, tmp_path):
    engine = client(servers, model, tmp_path, max_in_flight=4)  # two requests of two completions each
    engine.load_weights(model.state_dict(), 7)
    gates = [Gate(server) for server in servers]
    result = in_background(sample, engine, PROMPTS * 4, SAMPLING)
    until(lambda: [gate.inside for gate in gates] == [2, 2])
    assert not any(gate.inside > 2 for gate in gates)
    for gate in gates:
        gate.opened.set()
    assert len(result()) == 16
    assert [gate.most for gate in gates] == [2, 2]
    assert engine.metrics()["sampler/waited"] == 12


def test_a_request_larger_than_the_queue_is_sent_alone(servers, model, tmp_path):
    engine = client(servers[:1], model, tmp_path, max_in_flight=1)
    engine.load_weights(model.state_dict(), 7)
    assert len(flat(sample(engine, PROMPTS, SAMPLING))) == 8


def test_the_turns_of_an_episode_stay_on_one_server(servers, engine):
    requests = [Request((5, 9), 1, 3, stream, session) for stream, session in enumerate((1, 2))]
    for _ in range(3):
        engine.sample(requests, Sampling())
    assert [server.asked for server in servers] == [3, 3]
    for _ in range(4):
        engine.sample(requests[:1], Sampling())
    assert sorted(server.asked for server in servers) == [3, 7], "though the other server has had less to do"
    least = min(servers, key=lambda server: server.asked)
    next(server for server in servers if server is not least).kill()
    engine.sample(requests[:1], Sampling())
    assert least.asked == 4, "its server is lost"


def test_a_server_that_comes_back_gets_the_current_weights_and_samples_again(servers, model, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "HEALTH_EVERY_S", 0.05)
    engine = client(servers, model, tmp_path, max_in_flight=2)
    engine.load_weights(model.state_dict(), 7)
    servers[0].kill()
    sample(engine, PROMPTS, SAMPLING)
    assert engine.metrics()["sampler/servers"] == 1
    servers[0].start()
    busy = Gate(servers[1])
    result = in_background(sample, engine, PROMPTS, SAMPLING)
    until(lambda: servers[0].asked == 3)
    busy.opened.set()
    assert {row.weights_version for row in flat(result())} == {7}
    assert servers[0].loaded == 2


def test_the_requests_of_a_server_that_answers_no_health_check_go_to_the_other(servers, model, tmp_path, monkeypatch):
    """It neither answers nor closes its connections, and the requests have minutes."""
    monkeypatch.setattr(module, "HEALTH_EVERY_S", 0.05)
    engine = client(servers, model, tmp_path)
    engine.load_weights(model.state_dict(), 7)
    held = Gate(servers[0])

    def hang(path):
        if path == "/health":
            raise ConnectionError
        held.enter(path)

    servers[0].hook = hang
    groups = sample(engine, PROMPTS, SAMPLING)
    assert [group[0].ids[0] for group in groups] == [5, 7, 3, 13]
    assert held.inside == 2, "the requests of the first attempt are still there"
    assert "health check" in engine.describe()
    held.opened.set()


def test_weights_are_loaded_between_two_tokens_of_a_continuous_run(servers, model, tmp_path):
    engine = client(servers, model, tmp_path)
    engine.continuous = True
    engine.load_weights(model.state_dict(), 7)
    assert all("/pause?mode=abort" in server.paths for server in servers), "what an earlier run has left"
    reached, loaded = threading.Barrier(5), threading.Event()

    def middle():
        reached.wait(PATIENCE_S)
        loaded.wait(PATIENCE_S)

    for server in servers:
        server.middle = middle
        server.paths.clear()
    result = in_background(sample, engine, PROMPTS, SAMPLING)
    reached.wait(PATIENCE_S)
    engine.load_weights(model.state_dict(), 8)
    loaded.set()
    for row in flat(result()):
        assert (row.weights_version, row.versions) == (7, (7, 8, 8))
    for server in servers:
        server.middle = lambda: None
        assert {"/pause?mode=keep", "/reset_prefix_cache?reset_running_requests=true"} <= {*server.paths}
    assert {row.versions for row in flat(sample(engine, PROMPTS, SAMPLING))} == {()}
    assert engine.metrics()["sampler/refused"] == 0


def test_weights_that_a_continuous_run_has_not_loaded_are_refused(servers, model, tmp_path):
    engine = client(servers, model, tmp_path)
    engine.continuous = True
    engine.load_weights(model.state_dict(), 7)
    servers[0].fault = "mixed"
    assert {row.weights_version for row in flat(sample(engine, PROMPTS, SAMPLING))} == {7}
    assert engine.metrics()["sampler/refused"] >= 1


@pytest.fixture
def process():
    """(a server in a process of its own, its address)."""
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).parents[1] / "servers.py")], stdout=subprocess.PIPE, text=True
    ) as started:
        yield started, f"http://127.0.0.1:{int(started.stdout.readline())}"
        started.kill()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_work_of_a_server_process_that_is_killed_or_frozen_is_done_by_the_other(
    servers, process, model, tmp_path, how
):
    started, url = process
    engine = VllmServerEngine(model, tmp_path, "bfloat16", urls=[url, servers[0].url], request_timeout_s=5.0)
    engine.load_weights(model.state_dict(), 7)
    assert len(sample(engine, PROMPTS, SAMPLING)) == 4
    # The other answers once this one is gone: both have requests when that happens.
    servers[0].hook = lambda path: os.kill(started.pid, how) if started.poll() is None else None
    groups = sample(engine, PROMPTS * 2, SAMPLING)
    assert [group[0].ids[0] for group in groups] == [5, 7, 3, 13] * 2
    engine.load_weights(model.state_dict(), 8)
    assert {row.weights_version for row in flat(sample(engine, PROMPTS, SAMPLING))} == {8}
    assert engine.metrics()["sampler/servers"] == 1
