"""`[vllm]` is the table of two engines: what each of them demands, refuses and leaves alone."""

from typing import Any

import pytest

from retrain.config.load import load
from retrain.errors import ConfigError


def problems(tmp_path, *lines) -> Any:
    file = tmp_path / "run.toml"
    file.write_text("\n".join(lines))
    try:
        return load(file)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]


SERVER = '[rollout]\nengine = "vllm-server"'


def test_one_table_serves_the_servers_and_the_run(tmp_path):
    lines = ("[vllm]", 'urls = ["http://127.0.0.1:8000", "http://localhost:8001/"]', "max_model_len = 512")
    loaded = problems(tmp_path, SERVER, *lines)
    assert loaded.warnings == ()
    assert loaded.one("engine").params["urls"] == ["http://127.0.0.1:8000", "http://localhost:8001/"]
    assert loaded.named("engine", "vllm").params["max_model_len"] == 512


NO_ADDRESSES = (
    *("127.0.0.1:8000", "http://127.0.0.1:8000/v1", "ftp://127.0.0.1:8000", "http://:8000", ""),
    *("http://[::1:8711", "http://[nonsense]:8711", "http://::1:8711", "http://127.0.0.1:99999", "http://127.0.0.1:0"),
    *("http://127.0.0.1:abc", "http://127.0.0.1:", " http://127.0.0.1:8000", "http://127.0.0.1 :8000"),
)


@pytest.mark.parametrize("engine", ["vllm-server", "torch"])
@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_what_is_no_address_is_refused_with_its_place(tmp_path, url, engine):
    """Also in a file of which only `retrain serve` reads the addresses."""
    [problem] = problems(tmp_path, f'[rollout]\nengine = "{engine}"', "[vllm]", f'urls = ["{url}"]')
    assert problem.startswith(f"{tmp_path}/run.toml:4:")
    assert f'"{url}" is not the address of a server; write it as "http://127.0.0.1:8000"' in problem


def test_addresses_of_servers_that_nobody_asks_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    lines = ('[rollout]\nengine = "vllm"', "[vllm]", 'urls = ["http://127.0.0.1:8000"]')
    [problem] = problems(tmp_path, *lines)
    assert problem.startswith(f"{tmp_path}/run.toml:4:1: [vllm] urls: nothing in this run reads it")
    assert 'engine "vllm-server", or remove' in problem
