"""`retrain train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.cli.config_commands import File, Overrides, warn
from retrain.errors import ConfigError, ConfigProblem

if TYPE_CHECKING:
    from retrain.storage.run_directory import Mode


def train(
    file: File,
    overrides: Overrides = None,
    resume: Annotated[
        str | None, typer.Option(help="auto: go on from the newest checkpoint; never; or a checkpoint's path.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete an earlier run of this name first.")] = False,
    allow_change: Annotated[
        list[str] | None, typer.Option(help="A key that may differ from the run to be resumed. Repeatable.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines instead of the live display.")] = False,
) -> None:
    """Train a model as a TOML file says; everything is written to runs/NAME.

    Exit codes: 0 done, 1 user code, 2 configuration, 3 data, 4 diverged, 5 engine, 6 storage,
    75 preempted (resume with --resume auto), 130 Ctrl-C.
    """
    from retrain.config.load import load

    loaded = load(file, overrides or ())
    warn(loaded.warnings)
    how = _resume(resume, loaded.config.checkpoint.resume, fresh)
    from retrain.cli.run_display import display
    from retrain.run.session import Resume, run

    with display(plain=plain) as observe:
        run(loaded, Resume(*how, tuple(allow_change or ())), observe)


def _resume(asked: str | None, default: str, fresh: bool) -> tuple[Mode, Path | None]:
    """Mode of the run directory, and the checkpoint to start from."""
    if fresh and asked not in (None, "never"):
        problem, fix = "--fresh deletes what there is to resume", "drop one of the two"
        raise ConfigError([ConfigProblem("--resume", 0, 0, asked, problem, fix)])
    if fresh:
        return "fresh", None
    resume = asked or default
    if resume in ("auto", "never"):
        return ("auto" if resume == "auto" else "new"), None
    return "auto", Path(resume)
