"""The command `serve`: an API of a trained model, or a vLLM server for a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.cli.arguments import ApiKeyEnv, Overrides, Trust, api_key, needs_server, warn_of_host
from retrain.errors import ConfigError
from retrain.system.http_client import address, is_loopback
from retrain.system.terminal import say, warn

if TYPE_CHECKING:
    from retrain.config.loaded_config import LoadedConfig
    from retrain.run.session import Around

_PORT = 8000
_PATIENCE_S = 3600.0


def serve(  # noqa: PLR0913 - the options of a command, each with its name
    target: Annotated[
        Path, typer.Argument(help="A trained run, or the TOML file of a run that samples from a vLLM server.")
    ],
    overrides: Overrides = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port; unset: 8000, or the port of the first free address in [vllm] urls."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    api_key_env: ApiKeyEnv = None,
    episodes: Annotated[Path | None, typer.Option(help="Append the episodes of a trained run to this file.")] = None,
    trust: Trust = False,
) -> None:
    """Serve a run's trained model to programs, or start a vLLM server for a TOML file.

    A run gets an OpenAI-compatible API: /v1/chat/completions, /v1/completions and /v1/models, whose model is "policy".
    It honours temperature, top_p, seed, stop, n, max_tokens, logprobs (of the sampled tokens, without alternatives) and
    stream; any other field is an error. The answer to a request depends on nothing before it. With --episodes the rules
    are those of retrain train FILE --serve HOST:PORT, which trains on requests of programs.

    A TOML file is one for `retrain train`. The keys of [vllm] for dtype, memory and parallelism apply to the server,
    which receives its weights from the run. On a machine with several GPUs, set CUDA_VISIBLE_DEVICES.

    Both run until Ctrl-C or SIGTERM. Exit codes: 0 stopped by SIGTERM, 2 configuration, 5 the server ended, 130 Ctrl-C.
    """
    # A TOML file that does not exist must be reported as one, and not as a missing run.
    engine = target.is_file() or target.suffix == ".toml"
    if episodes and engine:
        raise ConfigError.at("--episodes", str(episodes), "a vLLM server has none", "leave it out")
    if engine:
        key = [f"vllm.api_key_env={api_key_env}"] if api_key_env else []
        _serve_engine(target, [*(overrides or ()), *key], host, port)
    else:
        access = host, port or _PORT, api_key(api_key_env)
        _serve_policy(target, overrides or (), access, episodes, trust)


def _serve_engine(file: Path, overrides: Sequence[str], host: str, port: int | None) -> None:
    """Start a vLLM server, and print the keys with which a run uses it."""
    from retrain.config.document import read
    from retrain.config.load import validate
    from retrain.serve.engine_server import serve as run_server

    # Unlike `warn_of_host`, also with a key: vLLM does not ask for it at these endpoints.
    if not is_loopback(address(host, _PORT)):
        danger = "can replace weights and read files, with or without a key: use a private network"
        say(f"warning: anyone who can connect to {host} {danger}", error=True)
    loaded = validate(read(file, overrides))  # unlike `load`, this accepts [vllm] with any engine
    warn(loaded.warnings)

    def ready(url: str) -> None:
        say(f'ready; in {file}:\n\n[rollout]\nengine = "vllm-server"\n\n[vllm]\nurls = ["{url}"]')

    run_server(loaded, host, port, ready)


def _serve_policy(
    run: Path, overrides: Sequence[str], access: tuple[str, int, str], episodes: Path | None, trust: bool
) -> None:
    """Serve a trained model until a signal arrives."""
    needs_server()
    from retrain.display.run_lines import Lines
    from retrain.run.reopen import reopen
    from retrain.serve.http_app import Access
    from retrain.serve.policy_endpoint import PolicyEndpoint
    from retrain.serve.served_model import ServedModel
    from retrain.system.process import ExitOnSigterm

    warn_of_host(access[0], access[2], "send requests to the policy")
    with ExitOnSigterm() as sigterm:
        if episodes is None:
            context = reopen(run, overrides, Lines(), "sampler", trust=trust)
            start = partial(ServedModel, context, Access(*access))
        else:
            context = kept = reopen(run, overrides, Lines(), "scored", trust=trust)
            start = partial(PolicyEndpoint, kept, Access(*access), episodes)
        try:
            with closing(start()) as endpoint:
                say(f"the policy answers at {endpoint.url}/v1")
                endpoint.work()
        finally:
            # A second signal must not interrupt the end of the workers.
            sigterm.exiting = True
            context.close()


def episodes_from(loaded: LoadedConfig, serve: str, patience: float | None, key_env: str | None, ranks: bool) -> Around:
    """Return the context in which a run trains on requests to an address; see `retrain train --serve`.

    Raises:
        ConfigError: an option is invalid, or the run cannot train on an endpoint.
    """
    # The host is a name, an IPv4 address, or an IPv6 address in brackets.
    parts = re.fullmatch(r"(\[[^\[\]]+\]|[^\[\]:]+):([0-9]{1,5})", serve)
    if not parts or int(parts[2]) > 65535:
        fix = "write it as 127.0.0.1:8000"
        raise ConfigError.at("--serve", serve, "not a host and a port", fix)
    from retrain.run.before.environment_checks import check_endpoint

    needs_server()
    from retrain.serve.http_app import Access
    from retrain.serve.policy_endpoint import source_of_episodes

    check_endpoint(loaded, ranks)
    access = Access(parts[1].strip("[]"), int(parts[2]), api_key(key_env))
    warn_of_host(access.host, access.key, "send requests to the policy and reward it")
    return partial(source_of_episodes, access=access, patience_s=patience or _PATIENCE_S)
