"""vLLM's own transfer of weights as far as it is ours: the protocol, deadlines, and servers that die; with a stand-in
for vLLM's side of the trainer. tests/vllm runs it with vLLM's."""

import sys
import threading
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from retrain.engines.vllm import weight_transfer as vllm_transfer
from retrain.engines.vllm.server_process import weight_options
from retrain.errors import EngineError, MissingExtraError
from tests.engines.models import flat, sample, tiny
from tests.engines.servers import Server
from tests.engines.vllm.test_servers import PROMPTS, SAMPLING
from tests.engines.vllm.test_servers import client as plain_client
from tests.full_disk import run_script
from tests.waiting import PATIENCE_S

MEETING = ("/start_weight_update", "/finish_weight_update", "/shutdown_weight_transfer_engine", "/get_world_size")
SENDING = ("/start_weight_update", "/update_weights", "/finish_weight_update")
LABEL = "/update_weight_version"
BEFORE, AFTER = ("/version", "/pause", LABEL), ("/reset_prefix_cache", LABEL, "/resume")


class StandIn:
    """vLLM's factory of the trainer's side, and the engine that it makes.

    Attributes:
        stuck: what never returns, as a collective with a dead peer: "meet" or "send".
        sent: names and tensors of every transfer.
        shut: engines that were shut down.
    """

    def __init__(self):
        self.stuck, self.sent, self.shut = "", [], 0

    def trainer_init(self, info, *, client, source):
        if self.stuck == "meet":
            threading.Event().wait()
        client.init_weight_transfer_engine(vars(info))
        return SimpleNamespace(send_weights=lambda: self.send(client, source), shutdown=self.shutdown)

    def send(self, client, source):
        client.start_weight_update()
        if self.stuck == "send":
            threading.Event().wait()
        meta = source.metadata()
        client.update_weights({"names": [one.name for one in meta], "ipc_handles": [("handle", 1)]})
        self.sent.append(dict(source))
        assert [one.shape for one in meta] == [tuple(value.shape) for value in self.sent[-1].values()]
        client.finish_weight_update()

    def shutdown(self):
        self.shut += 1


@pytest.fixture
def library(monkeypatch):
    """The stand-in, where vLLM would be imported from; and weights may be on a CPU."""
    library = StandIn()
    transfer: Any = ModuleType("vllm.distributed.weight_transfer")
    transfer.WeightSource = type("WeightSource", (), {})
    transfer.ParamMeta = lambda name, dtype, shape: SimpleNamespace(name=name, dtype=dtype, shape=shape)
    transfer.WeightTransferTrainerFactory = library
    engine: Any = ModuleType("vllm.distributed.weight_transfer.engine")
    engine.IPCTrainerInitInfo = lambda rank: SimpleNamespace(rank=rank)
    engine.NCCLTrainerInitInfo = lambda address, port, size, rank: SimpleNamespace(
        master_address=address, master_port=port, world_size=size, rank=rank
    )
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm"].__spec__ = ModuleSpec("vllm", None)
    monkeypatch.setitem(sys.modules, transfer.__name__, transfer)
    for name in ("nccl_engine", "ipc_engine"):
        monkeypatch.setitem(sys.modules, f"{transfer.__name__}.{name}", engine)
    monkeypatch.setattr(vllm_transfer, "DEVICES", {"cpu"})
    return library


@pytest.fixture
def servers():
    pair = [Server(), Server()]
    for server in pair:
        server.config["weight_transfer_config"] = {"backend": "nccl"}
        server.seen = []
    yield pair
    for server in pair:
        server.kill()


@pytest.fixture
def model():
    return tiny("qwen3")


client = partial(plain_client, transfer="nccl")


def test_a_server_is_met_once_and_given_all_of_the_state_dict_at_every_sync(library, servers, model, tmp_path):
    engine = client(servers[:1], model, tmp_path)
    servers[0].seen.clear()
    asked = []
    # What it was started with, and whether its label is still the one that it was given, comes in between.
    servers[0].hook = lambda path: asked.append(path) if path not in ("/server_info", "/weight_info") else None
    engine.load_weights(model.state_dict(), 7)
    assert tuple(asked) == (*BEFORE, *MEETING, "/init_weight_transfer_engine", *SENDING, *AFTER)
    asked.clear()
    engine.load_weights(model.state_dict(), 8)
    assert tuple(asked) == (*BEFORE, *SENDING, *AFTER)
    assert servers[0].names == set(model.state_dict()) > {"lm_head.weight"}
    assert {row.weights_version for row in flat(sample(engine, PROMPTS, SAMPLING))} == {8}
    assert not (tmp_path / "vllm" / "model.safetensors").exists()
    engine.close()
    assert library.shut == 1


def test_a_server_that_comes_back_is_met_anew_and_given_the_weights_of_the_last_sync(library, servers, model, tmp_path):
    """By then the trainer has changed its own."""
    engine = client(servers[:1], model, tmp_path, restart_timeout_s=PATIENCE_S)
    engine.load_weights(model.state_dict(), 7)
    first = library.sent[0]["lm_head.weight"].clone()
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    servers[0].kill()
    servers[0].start()
    assert {row.weights_version for row in flat(sample(engine, PROMPTS[:1], SAMPLING))} == {7}
    assert servers[0].loaded == 2
    assert torch.equal(library.sent[1]["lm_head.weight"], first)
    assert library.shut == 1, "the group with the process that is gone"


@pytest.mark.slow
@pytest.mark.parametrize("stuck", ["meet", "send"])
def test_a_peer_that_never_joins_costs_the_time_limit_and_the_server(library, servers, model, tmp_path, stuck):
    engine = client(servers[:1], model, tmp_path, request_timeout_s=2.0)
    library.stuck = stuck
    with pytest.raises(EngineError, match=r"no vLLM server is usable; .*not done within 2 seconds"):
        engine.load_weights(model.state_dict(), 7)
    library.stuck = ""
    engine.load_weights(model.state_dict(), 8)
    assert servers[0].update == "ready", "an update that was left open has been ended first"


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["meet", "send"])
def test_a_thread_that_was_left_behind_asks_nothing_any_more(library, servers, model, tmp_path, monkeypatch, moment):
    engine = client(servers[:1], model, tmp_path, request_timeout_s=2.0)
    stopped, released = threading.Event(), threading.Event()

    def late(*_, client, **__):
        released.wait()
        try:
            client.update_weights({"names": ["late"]})
        except ConnectionError:
            stopped.set()

    with monkeypatch.context() as slow:
        if moment == "meet":
            slow.setattr(library, "trainer_init", late)
        else:
            slow.setattr(library, "send", lambda client, source: late(client=client))
        with pytest.raises(EngineError, match="seconds"):
            engine.load_weights(model.state_dict(), 7)
    engine.load_weights(model.state_dict(), 8)
    released.set()
    assert stopped.wait(PATIENCE_S)
    assert "late" not in servers[0].names


@pytest.mark.parametrize("fault", [*SENDING, "/init_weight_transfer_engine", *AFTER])
def test_one_server_whose_transfer_fails_is_left_out_and_the_other_goes_on(library, servers, model, tmp_path, fault):
    engine = client(servers, model, tmp_path)
    servers[1].fault = fault
    engine.load_weights(model.state_dict(), 7)
    sample(engine, PROMPTS, SAMPLING)
    assert [server.asked for server in servers] == [4, 0]
    servers[1].fault = ""
    engine.load_weights(model.state_dict(), 8)
    sample(engine, PROMPTS, SAMPLING)
    assert [server.asked for server in servers] == [6, 2]


def test_handles_of_gpu_memory_are_pickled(library, servers, model, tmp_path):
    for server in servers:
        server.config["weight_transfer_config"] = {"backend": "ipc"}
    seen = []
    servers[0].transfer = lambda path, body: seen.append((path, body)) or {}
    client(servers[:1], model, tmp_path, transfer="ipc").load_weights(model.state_dict(), 7)
    bodies = dict(seen)
    assert bodies["/init_weight_transfer_engine"] == {"init_info": {"rank": 0}}
    assert isinstance(bodies["/update_weights"]["update_info"]["ipc_handles_pickled"], str)


def test_the_trainer_is_one_more_than_the_workers_and_says_where_it_can_be_met(library, servers, model, tmp_path):
    seen = []
    transfer = servers[0].transfer
    servers[0].transfer = lambda path, body: seen.append((path, body)) or transfer(path, body)
    client(servers[:1], model, tmp_path).load_weights(model.state_dict(), 7)
    info = dict(seen)["/init_weight_transfer_engine"]["init_info"]
    assert (info["master_address"], info["world_size"], info["rank"]) == ("127.0.0.1", 2, 0)
    assert 0 < info["master_port"] < 65536


def test_what_cannot_work_shows_at_the_start(library, servers, model, tmp_path, monkeypatch):
    for backend in (None, {"backend": "ipc"}):
        servers[0].config["weight_transfer_config"] = backend
        with pytest.raises(EngineError, match=r'was started with transfer = "(file|ipc)", not "nccl"; start it with'):
            client(servers[:1], model, tmp_path)
    monkeypatch.setattr(vllm_transfer, "DEVICES", {"cuda"})
    with pytest.raises(EngineError, match=r'transfer = "nccl" .* the trainer is on cpu; use transfer = "file"'):
        client(servers[:1], model, tmp_path)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.nccl_engine", None)
    monkeypatch.setattr(vllm_transfer, "DEVICES", {"cpu"})
    with pytest.raises(EngineError, match="vllm cannot be imported"):
        client(servers[:1], model, tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"\[vllm\]"):
        client(servers[:1], model, tmp_path)


def test_a_server_is_started_for_the_transfer_of_the_run():
    assert weight_options("file", None) == ({}, {})
    assert weight_options("nccl", None) == ({"weight_transfer_config": '{"backend": "nccl"}'}, {})
    options, variables = weight_options("ipc", 12)
    assert options == {
        "weight_transfer_config": '{"backend": "ipc"}',
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": 16,
    }
    assert set(variables) == {"VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"}


FULL = """
from pathlib import Path
import torch
from retrain.engines.vllm.weight_transfer import FileTransfer
from retrain.errors import StorageError

folder = Path(sys.argv[1])
transfer = FileTransfer(folder, None)  # nobody is called
transfer.take({"w": torch.ones(10)})
before = (folder / "model.safetensors").read_bytes()
fill()
try:
    transfer.take({"w": torch.ones(100_000)})
except StorageError as error:
    assert str(error).startswith(f"{folder}/model.safetensors cannot be written: "), error
    assert len(str(error).splitlines()) == 1, error
else:
    raise SystemExit("the file went through")
assert [path.name for path in folder.iterdir()] == ["model.safetensors"], list(folder.iterdir())
assert (folder / "model.safetensors").read_bytes() == before
"""


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_file_whole_and_nothing_beside_it(tmp_path):
    run_script(FULL, tmp_path, code=0)
