"""Commands for runs: train and status."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from retrain.cli.arguments import ApiKeyEnv, File, Json, Overrides, api_key, needs_server, warn, warn_of_host
from retrain.errors import ConfigError, ConfigProblem, StorageError
from retrain.system.process import launched, thread_waiting
from retrain.system.terminal import say, shown

if TYPE_CHECKING:
    from retrain.config.resolve import LoadedConfig
    from retrain.run.session import Around
    from retrain.storage.run_directory import ExistingRun

_PATIENCE_S = 3600.0
_REFRESH_S = 2.0
_PLAN, _STATUS = "plan.json", "status.json"

_Resumed = Annotated[
    str | None, typer.Option(help="auto: resume from the newest checkpoint; never; or the path of a checkpoint.")
]
_Fresh = Annotated[bool, typer.Option("--fresh", help="Delete an earlier run of this name first.")]


def train(  # noqa: PLR0913 - the options of a command, each with its name
    file: File,
    overrides: Overrides = None,
    resume: _Resumed = None,
    fresh: _Fresh = False,
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

    if ranks == 1 or launched():
        thread_waiting.spin_if_quiet()  # before plug-ins are loaded, which may import torch
    loaded = load(file, overrides or ())
    warn(loaded.warnings)
    mode_and_checkpoint = _resume_mode(resume, loaded.config.checkpoint.resume, fresh)
    around = _around(loaded, (serve, patience, api_key_env), launched() or ranks > 1 or slurm is not None)
    if slurm is not None:
        from retrain.run.launch import slurm_script

        if fresh or as_json or resume not in (None, "auto"):
            raise typer.BadParameter("a SLURM job resumes its run: remove --fresh, --json and any other --resume")
        say(slurm_script(loaded.directory, file, overrides or (), allow_change or (), ranks, slurm))
        return
    if ranks > 1 and not launched():
        from retrain.run.launch import launch

        raise typer.Exit(launch(sys.argv[1:], ranks))
    from retrain.cli.run_display import display
    from retrain.run.session import Resume, run

    try:
        with display(plain, as_json) as observe:
            observe("run", {"directory": str(loaded.directory)})
            run(loaded, Resume(*mode_and_checkpoint, tuple(allow_change or ())), observe, around=around)
    except KeyboardInterrupt as stopped:
        flags = ["--ranks", str(ranks)] if ranks > 1 else ["--serve", serve] if serve else []
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
    if serve is None:
        if patience is not None or key_env is not None:
            raise typer.BadParameter("--patience and --api-key-env need --serve HOST:PORT")
        return nullcontext
    found = re.fullmatch(r"(\[[^\[\]]+\]|[^\[\]:]+):([0-9]{1,5})", serve)
    if not found or int(found[2]) > 65535:
        fix = "write it as 127.0.0.1:8000"
        raise ConfigError([ConfigProblem("--serve", 0, 0, serve, "not a host and a port", fix)])
    from retrain.config.environment_checks import check_endpoint

    needs_server()
    from retrain.serve.http_app import Access
    from retrain.serve.policy_endpoint import source_of_episodes

    check_endpoint(loaded, ranks)
    access = Access(found[1].strip("[]"), int(found[2]), api_key(key_env))
    warn_of_host(access.host, access.key, "send requests to the policy and reward it")
    return partial(source_of_episodes, access=access, patience_s=patience or _PATIENCE_S)


def _how_to_continue(directory: Path, file: Path, overrides: Sequence[str], options: Sequence[str]) -> str:
    """Return a message with the command that resumes an interrupted run, or restarts it if nothing is saved."""
    saved = sorted(path.name for path in (directory / "checkpoints").glob("step-*"))
    newest = f"its newest checkpoint is {saved[-1]}" if saved else "it has no checkpoint yet"
    words = ["retrain", "train", str(file), *(part for flag in overrides for part in ("--set", flag))]
    resume = shlex.join([*words, *options, *(("--resume", "auto") if saved else ("--fresh",))])
    return f"the run is in {directory}; {newest}; {'continue' if saved else 'start over'} with: {resume}"


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
        raise ConfigError([ConfigProblem("--resume", 0, 0, resume, problem, fix)])
    if fresh:
        return "fresh", None
    resume = resume or default
    if resume in ("auto", "never"):
        return ("auto" if resume == "auto" else "new"), None
    return "auto", Path(resume)


def status(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Runs, campaigns, or folders of them; unset: runs/.")
    ] = None,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Keep updating until all runs have ended.")] = False,
) -> None:
    """Show the progress of runs and campaigns: steps, reward, held-out accuracy, time left."""
    found = [one for path in runs or [Path("runs")] for one in _runs_in(path)]
    if not found:
        raise ConfigError([ConfigProblem("runs", 0, 0, "status", "there is no run here", "retrain train run.toml")])
    console = Console(highlight=False, soft_wrap=True)
    if as_json or not watch:
        facts = [_facts(path) for path in found]
        if as_json:
            say(json.dumps(facts, indent=2))
        else:
            console.print(_picture(facts))
        if runs and any(one.get("state") == "unreadable" for one in facts):
            raise typer.Exit(StorageError.exit_code)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            facts = [_facts(path) for path in found]
            live.update(_picture(facts), refresh=True)
            if not any(_is_active(one) for one in facts):
                return
            time.sleep(_REFRESH_S)


def _runs_in(path: Path) -> list[Path]:
    """Return the path itself if it is a run or campaign, else the runs and campaigns in this folder.

    A path without any is returned as well, so that reading it reports the error; only runs/ may be empty.
    """
    found = sorted({file.parent for name in (_STATUS, _PLAN) for file in path.glob(f"*/{name}")})
    own = (path / _STATUS).exists() or (path / _PLAN).exists()
    return [path] if own or (not found and path != Path("runs")) else found


def _facts(path: Path) -> dict[str, Any]:
    """Return the facts of a run or campaign. Only a campaign has "runs"; a damaged one has path, state and error."""
    try:
        if (path / _PLAN).exists():
            from retrain.campaign.work.progress import Progress

            return Progress(path).facts()
        from retrain.report.run_summary import status as facts

        return facts(path)
    except StorageError as error:
        return {"path": str(path), "state": "unreadable", "error": str(error)}


def _picture(facts: list[dict[str, Any]]) -> RenderableType:
    from retrain.cli.campaign_display import picture

    return Group(
        *(Group(Text(shown(one["path"])), picture(one)) if "runs" in one else Group(*_lines(one)) for one in facts)
    )


def _is_active(facts: dict[str, Any]) -> bool:
    """Return True if a run, or any run of a campaign, has not ended."""
    if "runs" in facts:
        return any(row["state"] in ("waiting", "running", "stopped") for row in facts["runs"])
    return facts["state"] == "running"


def _lines(row: dict[str, Any]) -> Iterator[Text]:
    """Yield the line of a run, and one for each of its findings."""
    yield Text(_line(row), no_wrap=True)
    for one in row.get("findings", ()):
        yield Text(shown(f"  {one['name']}: {one['text']} ({one['page']})"), style="yellow")


def _line(row: dict[str, Any]) -> str:
    if row["state"] == "unreadable":
        return shown(f"{row['path']}  unreadable: {row['error']}")
    accuracy = "" if row["accuracy"] is None else f"  accuracy {row['accuracy']:.1%} after {row['eval_step']} steps"
    left = "" if row["eta_s"] is None else f"  {row['eta_s'] / 60:.1f} minutes left"
    error = f"  {row['error']}" if row["error"] else ""
    total = "" if row["max_steps"] is None else f"/{row['max_steps']}"
    return shown(f"{row['path']}  {row['state']}  step {row['steps']}{total}{accuracy}{left}{error}")
