"""`retrain serve FILE`: start a vLLM server from which a run can sample."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from retrain.config.loaded_config import LoadedConfig
from retrain.engines.vllm.server_process import ENGINE, command, weight_options
from retrain.engines.vllm.server_process import serve as run_server
from retrain.engines.vllm.vllm_options import by_itself, resolved
from retrain.errors import EngineError
from retrain.system.http_client import address, key_from
from retrain.system.model_paths import RANDOM_MODEL, model_location
from retrain.system.process import scratch_folder

_PORT = 8000
"""Default port."""
_PROBE_S = 5.0
"""Timeout of the connection that tests whether a port is in use, in seconds."""


def serve(loaded: LoadedConfig, host: str, port: int | None, ready: Callable[[str], None]) -> None:
    """Start a server for the model of a configuration, and wait until the server ends or a signal stops this process.

    Args:
        loaded: the configuration.
        host: address to listen on. If it is not loopback, other machines reach the endpoints that replace weights,
            which need no key.
        port: port to listen on; None: the first free port of the configured urls, or 8000.
        ready: called with the address once the server answers.
    Raises:
        MissingExtraError: vLLM is not installed.
        EngineError: no port is free, or the server cannot be started or ended by itself.
    """
    bound = loaded.named("engine", ENGINE)
    config = loaded.config
    assert bound is not None, "the engine is built in"
    bound.require_extra()
    import torch

    from retrain.run.build import product_dtype

    cpu = not torch.cuda.is_available()
    # An environment variable, because vLLM's processes read the number at their start.
    if cpu and (threads := config.training.threads) not in ("auto", 0):
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    table: dict[str, Any] = loaded.tables.get(ENGINE, {})
    urls = [urlsplit(url).port or _PORT for url in table.get("urls", ())]
    written = bound.params["dtype"]
    # The trainer's data type, assuming that it runs on a machine like this one: both must multiply in the same type.
    device = torch.device("cpu" if cpu or config.training.device == "cpu" else "cuda")
    dtype = resolved(written, product_dtype(config, device))
    adapter = config.model.lora if by_itself(table.get("lora"), written, dtype, cpu) else None
    options, variables = weight_options(table.get("transfer", "file"), None if adapter is None else adapter.r)
    if key := key_from(table.get("api_key_env", "")):
        variables["VLLM_API_KEY"] = key  # an option would be visible in `ps`
    # A run lists its servers in `urls`; started once for each, they take one port after the other.
    ports = [port] if port else urls or [_PORT]
    with scratch_folder("retrain-serve-") as folder, free_port(ports, host) as port:
        more = {
            "revision": config.model.revision,
            "trust_remote_code": config.model.trust_remote_code,
            "host": host,
            "port": port,
            **options,
        }
        arguments = command({**bound.params, "dtype": dtype}, _model(loaded, folder), config.training.seed, cpu, more)
        run_server(arguments, address(host, port), cpu, ready, variables)


def _model(loaded: LoadedConfig, folder: Path) -> str:
    """Return the path or name from which a server loads the model. "builtin:tiny" is saved to `folder` untrained."""
    path = loaded.config.model.path
    if path != RANDOM_MODEL:
        return model_location(path)
    from retrain.run.build import untrained_model

    untrained_model(loaded)[0].model.save_pretrained(folder)
    return str(folder)


@contextmanager
def free_port(ports: Sequence[int], host: str) -> Generator[int]:
    """Reserve the first free port, with a name that other calls respect, because servers start slowly.

    Args:
        ports: ports to try, in order.
        host: address to listen on.
    Yields:
        A port on which no process listens, and which no other call has reserved.
    Raises:
        EngineError: no port is free.
    """
    for port in ports:
        with socket.socket(socket.AF_UNIX) as reservation:
            try:
                # An abstract name, like a port, belongs to the network namespace. It is in no folder, and ends with
                # this process.
                reservation.bind(f"\0retrain-serve-{port}")
            except OSError:
                continue
            # The name only keeps out other calls of this command; any program may hold the port.
            with suppress(OSError):
                socket.create_connection((host, port), _PROBE_S).close()
                continue
            yield port
            return
    raise EngineError(f"port {', '.join(map(str, ports))} of {host} is in use; name another one with --port")
