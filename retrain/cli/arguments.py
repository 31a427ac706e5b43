"""Options and warnings that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from retrain.errors import ConfigError
from retrain.system.terminal import say

File = Annotated[Path, typer.Argument(help="The TOML file.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override a key: training.lr=1e-5. Repeatable.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Accept all code, programs and servers that the run's configuration names.")
]
ApiKeyEnv = Annotated[
    str | None, typer.Option(help="Environment variable with the API key that clients must send. Unset: no key.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def api_key(variable: str | None) -> str:
    """Return the key in an environment variable, or "" if no variable is named.

    Raises:
        ConfigError: the variable is not set, or is not valid in an HTTP header.
    """
    if variable is None:
        return ""
    from retrain.system.http_client import key_from, key_mistakes

    for problem, fix, _ in key_mistakes(variable):
        raise ConfigError.at("--api-key-env", variable, problem, fix)
    return key_from(variable)


def needs_server() -> None:
    """Raise MissingExtraError if the packages of an HTTP server are not installed."""
    from retrain.system.extras import library

    for module in ("starlette", "uvicorn"):
        library(module, "serve")


def warn_of_host(host: str, key: str, can: str) -> None:
    """Warn if other machines can reach the address that a server listens on, and clients need no key.

    Args:
        host: the address.
        key: the API key that clients must send; "" for none.
        can: phrase for what a client of the server can do.
    """
    from retrain.system.http_client import address, is_loopback

    # Any port will do: only the host is examined.
    if not key and not is_loopback(address(host, 80)):
        fix = "set --api-key-env, or use a private network"
        say(f"warning: anyone who can connect to {host} can {can}: {fix}", error=True)
