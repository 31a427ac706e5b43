"""What `retrain serve` starts for a configuration, up to the process itself."""

from __future__ import annotations

import socket

import pytest

from retrain.config.load import load
from retrain.errors import EngineError
from retrain.run import serve as module
from retrain.run.serve import free_port, serve


@pytest.fixture
def started(monkeypatch, tmp_path):
    """`started(toml)` -> what the server's process would be started with."""
    calls = []
    monkeypatch.setattr(module, "check_installed", lambda: None)
    monkeypatch.setattr(module, "run_server", lambda *arguments: calls.append(arguments))

    def go(text):
        file = tmp_path / "run.toml"
        file.write_text(text)
        serve(load(file, ()), "127.0.0.1", None, print)
        return calls[-1]

    return go


def test_a_server_is_started_for_the_way_that_weights_take(started):
    arguments, _, _, _, variables = started("[vllm]\nmax_model_len = 64\n")
    assert "--max-model-len=64" in arguments
    assert not [one for one in arguments if "lora" in one or "transfer" in one]
    assert variables == {}
    arguments, _, _, _, variables = started('[model.lora]\nr = 12\n[vllm]\ntransfer = "ipc"\nlora = "adapter"\n')
    assert {'--weight-transfer-config={"backend": "ipc"}', "--enable-lora", "--max-lora-rank=16"} <= set(arguments)
    assert variables == {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


def test_every_server_takes_the_first_address_that_nobody_has(started):
    with socket.socket() as taken, socket.socket() as other:
        for one in (taken, other):
            one.bind(("127.0.0.1", 0))
        taken.listen()
        ports = [one.getsockname()[1] for one in (taken, other)]
        urls = ", ".join(f'"http://127.0.0.1:{port}"' for port in ports)
        assert started(f"[vllm]\nurls = [{urls}]\n")[1] == f"http://127.0.0.1:{ports[1]}"
        with free_port(ports, "127.0.0.1") as port:
            assert port == ports[1]
            with pytest.raises(EngineError, match="is in use; name another one"):
                free_port(ports, "127.0.0.1").__enter__()
