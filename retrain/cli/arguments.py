"""What several commands take, and how they warn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from retrain.errors import ConfigProblem
from retrain.system.terminal import say

File = Annotated[Path, typer.Argument(help="The TOML file.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override a key: training.lr=1e-5. Repeatable.")]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Of a run that you have not trained here: run the code that its configuration names."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def warn(warnings: tuple[ConfigProblem, ...]) -> None:
    """Print warnings to standard error."""
    for warning in warnings:
        say(f"warning: {warning}", error=True)
