"""Commands for a run that is to be made: train, and serve for its engine; status shows how far runs are."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from retrain.cli.arguments import File, Json, Overrides, Trust, warn
from retrain.errors import ConfigError, ConfigProblem, StorageError
from retrain.system.terminal import say, shown
from retrain.training.ranks import launched

if TYPE_CHECKING:
    from retrain.storage.run_directory import ExistingRun

_REFRESH_S = 2.0
_PLAN, _STATUS = "plan.json", "status.json"

_Resumed = Annotated[
    str | None, typer.Option(help="auto: go on from the newest checkpoint; never; or a checkpoint's path.")
]
_Fresh = Annotated[bool, typer.Option("--fresh", help="Delete an earlier run of this name first.")]


def train(  # noqa: PLR0913 - the options of a command, each with its name
    file: File,
    overrides: Overrides = None,
    resume: _Resumed = None,
    fresh: _Fresh = False,
    allow_change: Annotated[
        list[str] | None, typer.Option(help="A key that may differ from the run to be resumed. Repeatable.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines instead of the live display.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per event, and nothing else.")] = False,
    ranks: Annotated[int, typer.Option(min=1, help="Processes on this machine that train together, one per GPU.")] = 1,
    slurm: Annotated[
        int | None, typer.Option(min=1, help="Print a SLURM script for so many machines of `ranks` GPUs, and end.")
    ] = None,
) -> None:
    """Train a model as a TOML file says; everything is written to runs/NAME.

    Exit codes: 0 done, 1 user code, 2 configuration, 3 data, 4 diverged, 5 engine, 6 storage,
    75 preempted (resume with --resume auto), 130 Ctrl-C.
    """
    from retrain.config.load import load

    loaded = load(file, overrides or ())
    warn(loaded.warnings)
    how = _resume(resume, loaded.config.checkpoint.resume, fresh)
    if slurm is not None:
        from retrain.run.launch import slurm_script

        if fresh or as_json or resume not in (None, "auto"):
            raise typer.BadParameter("a SLURM job goes on where it was stopped: no --fresh, --json or other --resume")
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
            run(loaded, Resume(*how, tuple(allow_change or ())), observe)
    except KeyboardInterrupt as stopped:
        stopped.add_note(_left(loaded.directory, file, overrides or (), ranks))
        raise


def _left(directory: Path, file: Path, overrides: Sequence[str], ranks: int) -> str:
    """Where an interrupted run is, and the command that continues it."""
    saved = sorted(path.name for path in (directory / "checkpoints").glob("step-*"))
    newest = f"its newest checkpoint is {saved[-1]}" if saved else "it has no checkpoint yet"
    words = ["retrain", "train", str(file), *(part for flag in overrides for part in ("--set", flag))]
    words += ["--ranks", str(ranks)] if ranks > 1 else []
    resume = shlex.join([*words, *(("--resume", "auto") if saved else ("--fresh",))])
    return f"the run is in {directory}; {newest}; continue with: {resume}"


def _resume(asked: str | None, default: str, fresh: bool) -> tuple[ExistingRun, Path | None]:
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


def serve(  # noqa: PLR0913 - the options of a command, each with its name
    file: Annotated[Path | None, typer.Argument(help="The TOML file of a run that samples from the server.")] = None,
    overrides: Overrides = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Unset: of the first free one of [vllm] urls, or 8000.")
    ] = None,
    host: Annotated[str, typer.Option(help="What to listen on; the server asks for no password.")] = "127.0.0.1",
    policy: Annotated[
        Path | None, typer.Option(help="A run to talk to, or a TOML file to train on what is talked about.")
    ] = None,
    episodes: Annotated[Path | None, typer.Option(help="Of a run: append the episodes to this file.")] = None,
    patience: Annotated[
        float, typer.Option(min=0.1, help="In training: seconds without a request after which the run ends.")
    ] = 3600.0,
    resume: _Resumed = None,
    fresh: _Fresh = False,
    trust: Trust = False,
) -> None:
    """Start a vLLM server for the model of a TOML file, with what engine = "vllm-server" needs.

    With --policy, instead: an OpenAI-compatible address for programs that talk to a model, whose conversations become
    episodes. A TOML file is trained on them, a step whenever batch_size x group_size sessions have a reward; it ends
    as `retrain train` does, and with exit code 5 if no program asks anything for --patience seconds.

    The file is that of `retrain train`. What [vllm] says of dtype, memory and parallelism holds for the server;
    its weights come from the run. On a machine with several GPUs CUDA_VISIBLE_DEVICES chooses. It runs until
    Ctrl-C or SIGTERM. Exit codes: 0 stopped by SIGTERM, 2 configuration, 5 the server ended, 130 Ctrl-C.
    """
    from retrain.system.http_client import address, is_loopback

    trains = policy is not None and policy.is_file()
    if (file is None) == (policy is None) or (episodes and (trains or file)) or ((resume or fresh) and not trains):
        problem = "either a file or --policy is served; --episodes needs a run, --resume and --fresh a TOML file"
        fix = "write --policy runs/NAME or --policy run.toml before these options"
        raise ConfigError([ConfigProblem("retrain serve", 0, 0, "arguments", problem, fix)])
    if not is_loopback(address(host, port or 80)):
        can = "replace weights and read files" if file else "talk to the policy and reward it"
        say(f"warning: whoever reaches {host} can {can}: keep to a private network", error=True)
    if file is not None:
        _serve_engine(file, overrides or (), (host, port))
    elif policy is not None and trains:
        _train_by_talk(policy, overrides or (), (host, port or 8000, patience), (resume, fresh))
    elif policy is not None:
        _answer_for(policy, overrides or (), (host, port or 8000, episodes), trust)


def _serve_engine(file: Path, overrides: Sequence[str], how: tuple[str, int | None]) -> None:
    """Start vLLM's own server, and say what a run needs to use it."""
    from retrain.config.document import read
    from retrain.config.load import validate
    from retrain.tools.engine_server import serve as run_server

    loaded = validate(read(file, overrides))  # [vllm] counts here, whatever engine the run names
    warn(loaded.warnings)

    def ready(url: str) -> None:
        say(f'ready; in {file}:\n\n[rollout]\nengine = "vllm-server"\n\n[vllm]\nurls = ["{url}"]')

    run_server(loaded, *how, ready)


def _answer_for(run: Path, overrides: Sequence[str], how: tuple[str, int, Path | None], trust: bool) -> None:
    """Answer programs with a trained model, until a signal."""
    from retrain.cli.run_display import Lines
    from retrain.run.reopen import reopen
    from retrain.system.process import Leave
    from retrain.tools.policy_endpoint import PolicyEndpoint

    with Leave() as leave:
        parts = reopen(run, overrides, Lines(), trust=trust)
        try:
            endpoint = PolicyEndpoint(parts, *how)
            say(f"the policy answers at {endpoint.url}/v1")
            endpoint.work()
        finally:
            leave.under_way = True
            parts.close()


def _train_by_talk(
    file: Path, overrides: Sequence[str], how: tuple[str, int, float], again: tuple[str | None, bool]
) -> None:
    """Train on what programs talk about with the policy."""
    from retrain.config.environment_checks import check_endpoint
    from retrain.config.load import load

    loaded = load(file, overrides)
    warn(loaded.warnings)
    check_endpoint(loaded, launched())
    from retrain.cli.run_display import Lines
    from retrain.run.session import Resume, run
    from retrain.tools.policy_endpoint import source_of_episodes

    resume = _resume(again[0], loaded.config.checkpoint.resume, again[1])
    run(loaded, Resume(*resume), Lines(), around=lambda parts: source_of_episodes(parts, *how))


def status(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Runs, campaigns, or folders of them; without any, runs/.")
    ] = None,
    as_json: Json = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again and again, until everything has ended.")
    ] = False,
) -> None:
    """Show how far runs and campaigns are: steps, reward, held-out accuracy, time left."""
    found = [one for path in runs or [Path("runs")] for one in _inside(path)]
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
            if not any(_going_on(one) for one in facts):
                return
            time.sleep(_REFRESH_S)


def _inside(path: Path) -> list[Path]:
    """A run or campaign itself, else those of a folder; a path that is neither is a mistake in a name."""
    found = sorted({file.parent for name in (_STATUS, _PLAN) for file in path.glob(f"*/{name}")})
    own = (path / _STATUS).exists() or (path / _PLAN).exists()
    return [path] if own or (not found and path != Path("runs")) else found


def _facts(path: Path) -> dict[str, Any]:
    """Facts of a run, or of a campaign; the latter has "runs". A damaged one has path, state and error."""
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
        *(
            Group(Text(shown(one["path"])), picture(one)) if "runs" in one else Text(_line(one), no_wrap=True)
            for one in facts
        )
    )


def _going_on(facts: dict[str, Any]) -> bool:
    if "runs" in facts:
        return any(row["state"] in ("waiting", "running", "stopped") for row in facts["runs"])
    return facts["state"] == "running"


def _line(row: dict[str, Any]) -> str:
    if row["state"] == "unreadable":
        return shown(f"{row['path']}  unreadable: {row['error']}")
    accuracy = "" if row["accuracy"] is None else f"  accuracy {row['accuracy']:.1%} after {row['eval_step']} steps"
    left = "" if row["eta_s"] is None else f"  {row['eta_s'] / 60:.1f} minutes left"
    error = f"  {row['error']}" if row["error"] else ""
    total = "" if row["max_steps"] is None else f"/{row['max_steps']}"
    return shown(f"{row['path']}  {row['state']}  step {row['steps']}{total}{accuracy}{left}{error}")
