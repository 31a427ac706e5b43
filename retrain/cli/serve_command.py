"""`retrain serve`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from retrain.cli.config_commands import File, Overrides, warn


def serve(
    file: File,
    overrides: Overrides = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Unset: of the first free one of [vllm] urls, or 8000.")
    ] = None,
    host: Annotated[str, typer.Option(help="What to listen on; the server asks for no password.")] = "127.0.0.1",
) -> None:
    """Start a vLLM server for the model of a TOML file, with what engine = "vllm-server" needs.

    The file is that of `retrain train`. What [vllm] says of dtype, memory and parallelism holds for the server;
    its weights come from the run. On a machine with several GPUs CUDA_VISIBLE_DEVICES chooses. It runs until
    Ctrl-C or SIGTERM. Exit codes: 0 stopped by SIGTERM, 2 configuration, 5 the server ended, 130 Ctrl-C.
    """
    from retrain.config.document import read
    from retrain.config.load import validate
    from retrain.system.http_client import address, is_loopback
    from retrain.tools.engine_server import serve as run

    loaded = validate(read(file, overrides or ()))  # [vllm] counts here, whatever engine the run names
    warn(loaded.warnings)
    if not is_loopback(address(host, port or 80)):
        print(
            f"warning: whoever reaches {host} can replace weights and read files: keep to a private network",
            file=sys.stderr,
        )

    def ready(url: str) -> None:
        print(f'ready; in {file}:\n\n[rollout]\nengine = "vllm-server"\n\n[vllm]\nurls = ["{url}"]', flush=True)

    run(loaded, host, port, ready)
