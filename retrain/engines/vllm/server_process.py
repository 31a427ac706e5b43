"""Child process with a vLLM server. Neither an exit nor a crash of either process leaves orphans."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from retrain.engines.vllm.vllm_options import adapter_options, engine_options, flags
from retrain.errors import EngineError
from retrain.system import http_client as http
from retrain.system.process import ExitOnSigterm, process_group

ENGINE = "vllm"
"""Name of the engine and of the table whose keys are the server's options."""
_SERVER = "vllm.entrypoints.openai.api_server"
_VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",  # enables the endpoints that replace weights
    "VLLM_NO_USAGE_STATS": "1",
}
_CPU_VARIABLES = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several servers would bind to the same processors
    "TORCHDYNAMO_DISABLE": "1",
}
_GRACE_S = 20.0
"""Seconds between SIGTERM and SIGKILL when the server is stopped."""


def command(table: Mapping[str, Any], model: str, seed: int, cpu: bool, more: Mapping[str, Any]) -> list[str]:
    """Return the command line of a server.

    Args:
        table: `[vllm]` with its defaults.
        model: directory or hub name of a model with the trained model's architecture; the run
            replaces its weights.
        seed: seed of vLLM's random generators.
        cpu: True if the server runs on a CPU.
        more: further vLLM options, such as the address and how to load the model.
    """
    # The scale-out option enables vLLM's endpoint with token ids as input and output.
    options = engine_options(table, model, seed, cpu) | {"enable_scale_out": True} | dict(more)
    return [sys.executable, "-m", _SERVER, *flags(options)]


def weight_options(transfer: str, rank: int | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options and environment variables of a server for weight transfer.

    Args:
        transfer: `[vllm] transfer`.
        rank: rank of the adapters that the server loads; None: it loads full weights.
    """
    options: dict[str, Any] = (
        {} if transfer == "file" else {"weight_transfer_config": json.dumps({"backend": transfer})}
    )
    # The trainer sends handles of GPU memory as pickles.
    variables = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if transfer == "ipc" else {}
    if rank is not None:
        options |= adapter_options(rank)
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    return options, variables


def serve(
    arguments: list[str], url: str, cpu: bool, ready: Callable[[str], None], variables: Mapping[str, str]
) -> None:
    """Run a server until it exits or this process gets SIGTERM, which raises SystemExit(0).

    Args:
        arguments: command line from `command`.
        url: address of the server.
        cpu: True if the server runs on a CPU.
        ready: called with the address once the server answers.
        variables: environment variables for this server, in addition to those of every server.
    Raises:
        EngineError: the server could not be started, or it exited.
    """
    environment = {**_VARIABLES, **(_CPU_VARIABLES if cpu else {}), **variables}
    with (
        ExitOnSigterm() as sigterm,
        process_group(arguments, environment, grace_s=_GRACE_S, stdout=sys.stderr.fileno()) as process,
    ):
        try:
            while not _answers(url):
                _check(process)
                time.sleep(0.5)
            ready(url)
            process.wait()
            _check(process)
        finally:
            # A second signal must not interrupt the end of the server.
            sigterm.exiting = True


def _answers(url: str) -> bool:
    """Return True if the server answers at its health endpoint."""
    with suppress(*http.FAILURES):
        http.Calls(2.0)(f"{url}/health")
        return True
    return False


def _check(process: subprocess.Popen[bytes]) -> None:
    """Raise EngineError if the server has ended."""
    if (code := process.poll()) is not None:
        raise EngineError(f"the vLLM server ended with exit code {code}; see its output above")
