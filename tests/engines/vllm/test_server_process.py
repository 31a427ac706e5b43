"""A server process with its command line, its helper and every way to end, with a stand-in for vLLM."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from retrain.engines.vllm import server_process as vllm_process
from retrain.engines.vllm.vllm_options import by_itself, engine_options, flags, request_fields
from retrain.errors import EngineError
from retrain.registry import find
from retrain.types import Request, Sampling
from tests.waiting import alive, ends, until

STAND_IN = """
import multiprocessing, os, pathlib, signal, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from servers import Server
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(6000)"])
pathlib.Path(sys.argv[2]).write_text(f"{os.getpid()} {helper.pid}")
if sys.argv[4] == "polite":
    signal.signal(signal.SIGTERM, lambda *_: (helper.kill(), os._exit(0)))
server = Server(int(sys.argv[3]))
while True:
    time.sleep(0.1)  # a signal in front of a long wait would be handled after it
"""
SERVE = """
import sys
from retrain.engines.vllm.server_process import serve
serve(sys.argv[2:], sys.argv[1], True, lambda url: print(url, flush=True), {})
"""


@pytest.fixture
def served(tmp_path):
    """(process that serves, its process ids) of a stand-in that ends when asked, or only when killed."""
    from tests.engines.servers import Server

    started = []

    def go(manner):
        spare = Server()
        spare.kill()
        url, ids = f"http://127.0.0.1:{spare.port}", tmp_path / "ids"
        here = str(Path(__file__).parents[1])
        command = [sys.executable, "-c", STAND_IN, here, str(ids), str(spare.port), manner]
        started.append(
            subprocess.Popen([sys.executable, "-c", SERVE, url, *command], stdout=subprocess.PIPE, text=True)
        )
        assert started[0].stdout.readline().strip() == url
        return started[0], [int(word) for word in ids.read_text().split()]

    yield go
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("manner", "how", "code"),
    [
        ("polite", signal.SIGTERM, 0),
        ("rude", signal.SIGTERM, 0),
        ("polite", signal.SIGINT, -signal.SIGINT),
        ("polite", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_nothing_is_left_however_the_command_ends(served, manner, how, code):
    process, ids = served(manner)
    process.send_signal(how)
    assert ends(process) == code
    until(lambda: not any(map(alive, ids)))


def test_nothing_is_left_when_command_and_server_are_killed_at_once(served):
    process, ids = served("polite")
    os.kill(ids[0], signal.SIGSTOP)  # so that it cannot follow the command by itself
    process.kill()
    os.kill(ids[0], signal.SIGKILL)
    assert ends(process) == -signal.SIGKILL
    until(lambda: not any(map(alive, ids)))


def test_a_server_that_is_killed_is_an_error_and_leaves_no_helper(served):
    process, ids = served("polite")
    os.kill(ids[0], signal.SIGKILL)
    assert ends(process) == 1
    until(lambda: not any(map(alive, ids)))


def test_a_server_that_does_not_start_is_an_error():
    with pytest.raises(EngineError, match="ended with exit code 3"):
        vllm_process.serve([sys.executable, "-c", "exit(3)"], "http://127.0.0.1:9", True, print, {})


def test_the_command_says_what_the_table_says():
    written = {"dtype": "bfloat16", "max_model_len": 512, "quantization": "fp8"}
    table = find("engine", "vllm").bind(written).params
    said = vllm_process.command(table, "folder", 2**31 + 5, False, {"host": "127.0.0.1", "port": 1, "revision": None})
    assert said[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert {"--dtype=bfloat16", "--max-model-len=512", "--quantization=fp8", "--seed=5", "--port=1"} <= set(said)
    assert {"--enable-scale-out", "--logprobs-mode=processed_logprobs", "--generation-config=vllm"} <= set(said)
    assert not [flag for flag in said if "None" in flag or "False" in flag or flag.startswith("--enforce-eager")]


@pytest.mark.parametrize(
    ("lora", "dtype", "kind", "cpu", "alone"),
    [
        (None, "auto", "bfloat16", False, True),
        (None, "auto", "float32", True, True),
        (None, "auto", "float32", False, False),  # on a GPU vLLM takes no float32 adapters
        (None, "float32", "float32", True, False),
        ("adapter", "float32", "float32", False, True),
        ("merged", "auto", "bfloat16", False, False),
    ],
)
def test_adapters_go_by_themselves_where_merging_loses_something(lora, dtype, kind, cpu, alone):
    assert by_itself(lora, dtype, kind, cpu) == alone


def test_on_a_cpu_nothing_is_compiled():
    options = engine_options(find("engine", "vllm").bind().params, "folder", 0, cpu=True)
    assert (options["enforce_eager"], options["kv_cache_memory_bytes"]) == (True, 256 << 20)
    some = {"max_model_len": -1, "a_b": True, "c": None, "d": False, "enable_e": False}
    assert flags(some) == ["--max-model-len=-1", "--a-b", "--no-enable-e"]
    asked = find("engine", "vllm").bind({"dtype": "bfloat16", "kv_cache_mb": 1}).params
    assert engine_options(asked, "folder", 0, cpu=True)["dtype"] == "bfloat16"


def test_no_two_completions_of_a_call_draw_from_the_same_seed():
    """Completion k of a request draws from its seed + k."""
    asked = Sampling(temperature=0.7, top_p=0.9, top_k=4, seed=1)
    requests = [Request((1,), count=3, max_tokens=4, stream=stream) for stream in range(5)]
    fields = [request_fields(request, asked) for request in requests]
    seeds = [one["seed"] + k for one in fields for k in range(one["n"])]
    assert len(set(seeds)) == 15
    later = [request_fields(Request((1,), 1, 4, stream=2**63 - 1 - turn), asked)["seed"] for turn in range(3)]
    assert len(set(later)) == 3
    assert max(later) < 2**63
    assert {(one["temperature"], one["top_p"], one["top_k"], one["n"]) for one in fields} == {(0.7, 0.9, 4, 3)}
    greedy = request_fields(requests[0], replace(asked, temperature=0))
    assert (greedy["n"], greedy["top_p"], greedy["top_k"]) == (1, 1.0, 0)
    assert greedy["seed"] != request_fields(requests[0], replace(asked, temperature=0, seed=2))["seed"]
