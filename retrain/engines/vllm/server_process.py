"""A vLLM server as a child of this process, which leaves no process behind however either of them ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from retrain.engines.vllm.vllm_options import adapter_options, engine_options, flags
from retrain.errors import EngineError
from retrain.system import http_client as http
from retrain.system.process import Leave, end, follower

ENGINE = "vllm"
"""The engine, and the table, that says what a server is started with."""
_SERVER = "vllm.entrypoints.openai.api_server"
_VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",  # the endpoints that replace weights
    "VLLM_NO_USAGE_STATS": "1",
}
_CPU_VARIABLES = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several servers would bind to the same processors
    "TORCHDYNAMO_DISABLE": "1",
}
_GRACE_S = 20.0
_WATCHER = 'read _ || { kill -s TERM -- "-$0"; sleep 5; kill -s KILL -- "-$0"; }'
"""Ends a process group at the end of the standard input, unless a line comes first."""


def command(table: Mapping[str, Any], model: str, seed: int, cpu: bool, more: Mapping[str, Any]) -> list[str]:
    """A server's command line.

    Args:
        table: `[vllm]` with its defaults.
        model: directory or hub name of a model with the architecture that is trained; its weights will be replaced.
        more: further options of vLLM: where to listen, and what loading this model takes.
    """
    # Scale-out is what vLLM calls the endpoint that takes and returns token ids.
    options = engine_options(table, model, seed, cpu) | {"enable_scale_out": True} | dict(more)
    return [sys.executable, "-m", _SERVER, *flags(options)]


def weight_options(transfer: str, rank: int | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Options and environment variables of a server for how weights reach it.

    Args:
        transfer: `[vllm] transfer`.
        rank: of the adapters that the server takes; None if it takes full weights.
    """
    options: dict[str, Any] = (
        {} if transfer == "file" else {"weight_transfer_config": json.dumps({"backend": transfer})}
    )
    # Handles of GPU memory come as pickles.
    variables = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if transfer == "ipc" else {}
    if rank is not None:
        options |= adapter_options(rank)
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    return options, variables


def serve(
    arguments: list[str], url: str, cpu: bool, ready: Callable[[str], None], variables: Mapping[str, str]
) -> None:
    """Run a server until it ends or this process gets SIGTERM, which raises SystemExit(0).

    Args:
        ready: called with the address once the server answers.
        variables: environment variables of this server besides those of all.
    Raises:
        EngineError: the server could not be started, or has ended.
    """
    own = {**_VARIABLES, **(_CPU_VARIABLES if cpu else {}), **variables}
    with _server(arguments, own) as process:
        while not _answers(url):
            _check(process)
            time.sleep(0.5)
        ready(url)
        process.wait()
        _check(process)


@contextmanager
def _server(arguments: list[str], variables: Mapping[str, str]) -> Generator[subprocess.Popen[bytes]]:
    """The running server, in a new process group; when the block is left, the group is gone."""
    with Leave() as leave:
        process = subprocess.Popen(  # noqa: S603 - our own command line
            arguments,
            env={**os.environ, **variables},
            stdout=sys.stderr.fileno(),
            start_new_session=True,
            preexec_fn=follower(os.getpid()),
        )
        watch = _watch(process.pid)
        try:
            yield process
        finally:
            leave.under_way = True
            end(process, _GRACE_S)  # a server that was killed leaves helpers behind
            watch.communicate(b"\n")


def _watch(group: int) -> subprocess.Popen[bytes]:
    """A shell that ends the server's group when this process is gone, even if the server is killed with it.

    The server follows this process; its helpers follow neither.
    """
    return subprocess.Popen(  # noqa: S603 - our own command line
        ["/bin/sh", "-c", _WATCHER, str(group)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _answers(url: str) -> bool:
    with suppress(*http.FAILURES):
        http.Calls(2.0)(f"{url}/health")
        return True
    return False


def _check(process: subprocess.Popen[bytes]) -> None:
    if (code := process.poll()) is not None:
        raise EngineError(f"the vLLM server ended with exit code {code}; what it printed before says why")
