"""The command `retrain train`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.cli.arguments import ApiKeyEnv, File, Overrides
from retrain.errors import ConfigError
from retrain.system.process import launched, thread_waiting
from retrain.system.terminal import say, warn

if TYPE_CHECKING:
    from retrain.config.loaded_config import LoadedConfig
    from retrain.run.session import Around
    from retrain.storage.run_directory import ExistingRun


def train(  # noqa: PLR0913 - the options of a command, each with its name
    file: File,
    overrides: Overrides = None,
    resume: Annotated[
        str | None, typer.Option(help="auto: resume from the newest checkpoint; never; or the path of a checkpoint.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete an earlier run of this name first.")] = False,
    allow_change: Annotated[
        list[str] | None, typer.Option(help="A key that may differ from the resumed run. Repeatable.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines instead of the live display.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only a JSON object per event.")] = False,
    ranks: Annotated[int, typer.Option(min=1, help="Processes on this machine that train together, one per GPU.")] = 1,
    slurm: Annotated[
        int | None, typer.Option(min=1, help="Print a SLURM script for this many machines of `ranks` GPUs, and exit.")
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Train on requests to this OpenAI-compatible address (extra serve)."),
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(min=0.1, help="With --serve: end the run after these seconds without a request [3600]."),
    ] = None,
    api_key_env: ApiKeyEnv = None,
) -> None:
    """Train a model from a TOML file, and write the run to runs/NAME.

    Exit codes: 0 done, 1 user code, 2 configuration, 3 data, 4 diverged, 5 engine, 6 storage,
    75 preempted (resume with --resume auto), 130 Ctrl-C.
    """
    from retrain.config.load import load

    # The launcher of several ranks computes nothing itself.
    if ranks == 1 or launched():
        thread_waiting.spin_if_quiet()  # before plug-ins are loaded, which may import torch
    loaded = load(file, overrides or ())
    warn(loaded.warnings)
    mode_and_checkpoint = _resume_mode(resume, loaded.config.checkpoint.resume, fresh)
    # Before the SLURM script is printed, so that a job that cannot run is refused here.
    around = _around(loaded, (serve, patience, api_key_env), launched() or ranks > 1 or slurm is not None)
    if slurm is not None:
        from retrain.run.launch import slurm_script

        # The job is requeued with the same line, so that these flags would apply again.
        if fresh or as_json or resume not in (None, "auto"):
            raise typer.BadParameter("a SLURM job resumes its run: remove --fresh, --json and any other --resume")
        say(slurm_script(loaded.directory, file, overrides or (), allow_change or (), ranks, slurm))
        return
    # The launcher starts this command again for each rank, with the environment variables of `launched`.
    if ranks > 1 and not launched():
        from retrain.run.launch import launch

        raise typer.Exit(launch(sys.argv[1:], ranks))
    from retrain.display.run_display import display
    from retrain.run.session import Resume, run

    try:
        with display(plain, as_json) as observe:
            observe("run", {"directory": str(loaded.directory)})
            run(loaded, Resume(*mode_and_checkpoint, tuple(allow_change or ())), observe, around=around)
    except KeyboardInterrupt as stopped:
        options = {"--serve": serve, "--patience": patience, "--api-key-env": api_key_env}
        options["--ranks"] = ranks if ranks > 1 else None
        # Without its key the continued endpoint would let everybody in.
        flags = [part for name, value in options.items() if value is not None for part in (name, str(value))]
        stopped.add_note(_how_to_continue(loaded.directory, file, overrides or (), flags))
        raise


def _around(loaded: LoadedConfig, flags: tuple[str | None, float | None, str | None], ranks: bool) -> Around:
    """Return the context that gives training its episodes: a policy endpoint, or nothing without --serve.

    Args:
        loaded: the configuration.
        flags: values of --serve, --patience and --api-key-env.
        ranks: True if several processes train together.
    Raises:
        ConfigError: an option is invalid, or the run cannot train on an endpoint.
    """
    serve, patience, key_env = flags
    if serve is not None:
        from retrain.cli.serve_commands import episodes_from

        return episodes_from(loaded, serve, patience, key_env, ranks)
    if patience is not None or key_env is not None:
        raise typer.BadParameter("--patience and --api-key-env need --serve HOST:PORT")
    return nullcontext


def _how_to_continue(directory: Path, file: Path, overrides: Sequence[str], options: Sequence[str]) -> str:
    """Return a message with the command that resumes an interrupted run, or restarts it if nothing is saved."""
    saved = sorted(path.name for path in (directory / "checkpoints").glob("step-*"))
    words = ["retrain", "train", str(file), *(part for flag in overrides for part in ("--set", flag)), *options]
    if saved:
        state = f"the run is in {directory}; its newest checkpoint is {saved[-1]}; continue"
        words += ["--resume", "auto"]
    elif directory.exists():
        state = f"the run is in {directory}; it has no checkpoint yet; start over"
        words.append("--fresh")
    else:
        state = "nothing of the run is written yet; start it again"
    return f"{state} with: {shlex.join(words)}"


def _resume_mode(resume: str | None, default: str, fresh: bool) -> tuple[ExistingRun, Path | None]:
    """Return the treatment of an existing run, and the path of the checkpoint to start from, if one is named.

    Args:
        resume: value of --resume.
        default: `[checkpoint] resume`, which applies without --resume.
        fresh: value of --fresh.
    Raises:
        ConfigError: --fresh and --resume contradict each other.
    """
    if fresh and resume not in (None, "never"):
        problem, fix = "--fresh deletes the run that --resume needs", "drop one of the two"
        raise ConfigError.at("--resume", resume, problem, fix)
    if fresh:
        return "fresh", None
    resume = resume or default
    if resume in ("auto", "never"):
        return ("auto" if resume == "auto" else "new"), None
    # "auto", because the checkpoint may be that of another run, and this run's directory new.
    return "auto", Path(resume)
