"""The client of vLLM servers against servers that die, hang, lag behind and lie; tests/vllm has a real one."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from safetensors.torch import load_file

from retrain.engines import VllmServerEngine
from retrain.errors import EngineError
from retrain.types import Sampling
from tests.engines.models import flat, tiny

SAMPLING = Sampling(group_size=2, max_tokens=3, stop_ids=(2,), seed=4)
PROMPTS = [[5, 9, 11], [7], [3, 4], [13, 2]]


class Server:
    """vLLM's endpoints as they answer, with a fault that can be switched on: hang, drop, stale, short or refuse."""

    def __init__(self):
        self.fault, self.label, self.version, self.asked, self.loaded, self.dev = "", "default", "0.32.0", 0, 0, True
        self.http = None
        self.start(0)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self, port):
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_GET(self):
                if self.path == "/weight_info" and not owner.dev:
                    self.send_error(404)
                else:
                    self.answer({"version": owner.version, "weight_version": owner.label})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                reply = owner.reply(self.path.partition("?")[0], body)
                if reply is None:
                    self.close_connection = True
                elif isinstance(reply, int):
                    self.send_error(reply)
                else:
                    self.answer(reply)

            def answer(self, reply):
                data = json.dumps(reply).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        self.port = self.http.server_port
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def kill(self):
        self.http.shutdown()
        self.http.server_close()
        self.label = "default"

    def reply(self, path, body):
        if path == "/inference/v1/generate":
            self.asked += 1
            return self.generate(body)
        if path == "/collective_rpc":
            if self.fault == "unloadable":
                return 500
            self.loaded += 1
            load_file(f"{body['kwargs']['weights_path']}/model.safetensors")
        if path == "/update_weight_version":
            self.label = body["new_version"]
        return {"success": self.fault != "cached"}

    def generate(self, body):
        if self.fault == "hang":
            time.sleep(1.5)
        if self.fault == "drop":
            return None
        if self.fault == "refuse":
            return 400
        fields = body["sampling_params"]
        ids = [body["token_ids"][0]] * (fields["max_tokens"] - (self.fault == "short"))
        content = [{"token_id": i, "logprob": -0.5} for i in [body["token_ids"][0]] * fields["max_tokens"]]
        label = "older" if self.fault == "stale" else self.label
        choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": "length"}
        choice["weight_versions"] = [{"version": label, "start": 0, "end": 3}]
        return {"choices": [choice] * (fields["n"] - (self.fault == "few"))}


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
    options = {"request_timeout_s": 0.5, "restart_timeout_s": 0.1} | options
    return VllmServerEngine(model, tmp_path, urls=[f"{server.url}/" for server in servers], **options)


def test_every_server_loads_the_weights_and_they_share_the_prompts(servers, model, tmp_path):
    engine = client(servers, model, tmp_path)
    engine.load_weights(model.state_dict(), 7)
    groups = engine.sample(PROMPTS, SAMPLING)
    assert [[row.ids[0] for row in group] for group in groups] == [[5, 5], [7, 7], [3, 3], [13, 13]]
    assert {row.weights_version for row in flat(groups)} == {7}
    assert [server.asked for server in servers] == [2, 2]
    assert "lm_head.weight" in load_file(tmp_path / "vllm" / "model.safetensors"), "tied entries are written as well"


def test_greedy_completions_are_sampled_once_and_repeated(servers, model, tmp_path):
    engine = client(servers, model, tmp_path)
    engine.load_weights(model.state_dict(), 0)
    greedy = Sampling(group_size=3, max_tokens=2, temperature=0.0)
    assert [len(group) for group in engine.sample(PROMPTS, greedy)] == [3, 3, 3, 3]


@pytest.mark.parametrize("fault", ["hang", "drop", "stale", "short", "few"])
def test_what_one_server_fails_at_the_other_does(servers, model, tmp_path, fault):
    engine = client(servers, model, tmp_path)
    engine.load_weights(model.state_dict(), 7)
    servers[0].fault = fault
    groups = engine.sample(PROMPTS, SAMPLING)
    assert [group[0].ids for group in groups] == [(5, 5, 5), (7, 7, 7), (3, 3, 3), (13, 13, 13)]
    asked = servers[0].asked
    engine.sample(PROMPTS, SAMPLING)
    assert servers[0].asked == asked, "it is not asked again before it has loaded current weights"
    servers[0].fault = ""
    engine.load_weights(model.state_dict(), 8)
    engine.sample(PROMPTS, SAMPLING)
    assert servers[0].asked > asked


@pytest.mark.parametrize("fault", ["unloadable", "cached"])
def test_a_server_whose_sync_fails_is_left_out(servers, model, tmp_path, fault):
    engine = client(servers, model, tmp_path)
    servers[1].fault = fault
    engine.load_weights(model.state_dict(), 7)
    engine.sample(PROMPTS, SAMPLING)
    assert [server.asked for server in servers] == [4, 0]
    servers[0].fault = fault
    with pytest.raises(EngineError, match=r"no vLLM server is left; http.*127\.0\.0\.1"):
        engine.load_weights(model.state_dict(), 8)
    with pytest.raises(EngineError, match="no weights"):
        engine.sample(PROMPTS, SAMPLING)


def test_a_server_that_was_started_again_is_given_the_current_weights(servers, model, tmp_path):
    engine = client(servers[:1], model, tmp_path, restart_timeout_s=10.0)
    engine.load_weights(model.state_dict(), 7)
    servers[0].kill()
    threading.Timer(0.5, servers[0].start, [servers[0].port]).start()
    assert {row.weights_version for row in flat(engine.sample(PROMPTS, SAMPLING))} == {7}
    assert servers[0].loaded == 2


def test_a_failure_that_stays_ends_after_the_retries(servers, model, tmp_path):
    engine = client(servers, model, tmp_path, retries=2)
    engine.load_weights(model.state_dict(), 7)
    for server in servers:
        server.fault = "stale"
    with pytest.raises(EngineError, match=r"failed 3 times.*sampled from the weights older"):
        engine.sample(PROMPTS[:1], SAMPLING)


def test_a_request_that_is_refused_is_not_repeated(servers, model, tmp_path):
    engine = client(servers[:1], model, tmp_path)
    engine.load_weights(model.state_dict(), 7)
    servers[0].fault = "refuse"
    with pytest.raises(EngineError, match="refuses the request"):
        engine.sample(PROMPTS[:1], SAMPLING)
    assert servers[0].asked == 1


def test_what_is_no_usable_server_shows_at_the_start(servers, model, tmp_path):
    servers[0].version = "0.31.1"
    with pytest.raises(EngineError, match=r"is vLLM 0\.31\.1"):
        client(servers, model, tmp_path)
    servers[0].version, servers[0].dev = "0.33.1", False
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
        client(servers, model, tmp_path)
    for url, said in (("127.0.0.1:8000", "is no address"), ("http://127.0.0.1:9", "no vLLM server answers")):
        with pytest.raises(EngineError, match=said):
            VllmServerEngine(model, tmp_path, urls=[url])


def test_weights_of_another_model_are_refused(servers, model, tmp_path):
    engine = client(servers, model, tmp_path)
    with pytest.raises(EngineError, match="is missing"):
        engine.load_weights(dict(model.named_parameters()), 0)
