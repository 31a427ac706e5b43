"""Commands for runs that exist: eval, sample, play, export, report, status."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from retrain.cli.arguments import Json, Overrides, Trust
from retrain.errors import ConfigError, StorageError
from retrain.system.files import SUMS
from retrain.system.process import thread_waiting
from retrain.system.terminal import say, shown

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from retrain.run.run_context import RunContext

RunPath = Annotated[Path, typer.Argument(help="A run, runs/NAME, or a checkpoint in one.", show_default=False)]
_REFRESH_S = 2.0
_PLAN, _STATUS = "plan.json", "status.json"


def evaluate(
    run: RunPath,
    overrides: Overrides = None,
    all_checkpoints: Annotated[
        bool, typer.Option("--all-checkpoints", help="Evaluate each checkpoint of the run, the oldest first.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Also write the completions to this directory, for `retrain score DIRECTORY`.")
    ] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Evaluate a trained model on its task's held-out problems.

    For instance: retrain eval runs/quickstart --set eval.problems=1000 --set eval.samples=8 --set 'eval.pass_at=[1,8]'
    """
    # Before the import of torch, which reads the setting once.
    thread_waiting.spin_if_quiet()
    from retrain.run.reopen import each_checkpoint, reopen

    if all_checkpoints:
        from retrain.display.run_lines import evaluation

        for context in each_checkpoint(run, overrides or (), only_warnings, "scored", trust=trust):
            row = _measured(context, out)
            say(json.dumps(row) if as_json else evaluation(row))
        return
    with closing(reopen(run, overrides or (), only_warnings, "scored", trust=trust)) as context:
        row = _measured(context, out)
    if as_json:
        say(json.dumps(row))
        return
    for name, value in row.items():
        say(f"{name:>18}  {value:.4g}" if isinstance(value, float) else f"{name:>18}  {value}")


def _measured(context: RunContext, out: Path | None) -> dict[str, Any]:
    """Evaluate the model, write the completions to `out` unless it is None, and return the metrics."""
    from retrain.run.evaluate import measure
    from retrain.storage.run_directory import write_evaluation

    row, completions = measure(context, context.trained.steps)
    if out is not None:
        for name, rows in completions.items():
            write_evaluation(out, context.trained.steps, name, rows)
    return row


def sample(
    run: RunPath,
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; unset: read them from standard input.")] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Completions per prompt.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    overrides: Overrides = None,
    trust: Trust = False,
) -> None:
    """Chat with a trained model: print its completions of prompts, one after the other.

    A prompt is formatted with the task's template and system prompt; \\n in it stands for a newline. A JSON list of
    messages is used as it is.
    """
    thread_waiting.spin_if_quiet()
    from retrain.run.reopen import reopen

    with closing(reopen(run, overrides or (), only_warnings, "sampler", trust=trust)) as context:
        from retrain.tools.conversation import completions

        # An empty line is not a prompt.
        typed = (prompt.replace("\\n", "\n") for prompt in prompts or filter(str.strip, _typed("a prompt")))
        for text in completions(context, typed, count, temperature):
            say(f"{text}\n")


def play(
    target: Annotated[Path, typer.Argument(help="A TOML file, to play yourself; or a run, whose model plays.")],
    problem: Annotated[int, typer.Option(min=0, help="Number of the training problem.")] = 0,
    overrides: Overrides = None,
    trust: Trust = False,
) -> None:
    """Play one episode of an environment in the terminal, or watch a trained model play it.

    An action is a line of standard input; \\n in it stands for a newline.
    """
    if not target.is_dir():
        from retrain.config.load import load
        from retrain.tools.play import by_hand

        replies = (line.rstrip("\n").replace("\\n", "\n") for line in _typed("an action"))
        for text in by_hand(load(target, overrides or ()), problem, replies):
            say(text)
        return
    thread_waiting.spin_if_quiet()
    from retrain.run.reopen import reopen
    from retrain.tools.play import by_model

    with closing(reopen(target, overrides or (), only_warnings, "scored", trust=trust)) as context:
        for text in by_model(context, problem):
            say(text)


def _typed(item: str) -> Iterator[str]:
    """Yield the lines of standard input. In a terminal, print instructions and a prompt sign before each line.

    Args:
        item: name of what a line holds, for the instructions.
    """
    terminal = sys.stdin.isatty()
    if terminal:
        say(f"type {item} per line; Ctrl-D ends", error=True)
    while True:
        if terminal:
            # Standard output may be redirected to a file, and gets the answers only.
            print("> ", end="", file=sys.stderr, flush=True)  # noqa: T201 - `say` would print a newline
        line = sys.stdin.readline()
        if not line:
            return
        yield line


def export(
    run: RunPath,
    directory: Annotated[Path, typer.Argument(help="Directory to write the model to.", show_default=False)],
    push_to_hub: Annotated[str | None, typer.Option(help="Also upload it as this repository, OWNER/NAME.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the uploaded repository private.")] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Data type of the weights: float32 is exact, bfloat16 has half the size; unset: exact."),
    ] = None,
    trust: Trust = False,
) -> None:
    """Write the model of a run or checkpoint in transformers format, with tokenizer and model card.

    The access token for uploading is read from the environment variable HF_TOKEN.
    """
    from retrain.run.reopen import reopen

    # Before the model is loaded. Without our sums the folder may be somebody's only copy.
    if (directory / "config.json").exists() and not (directory / SUMS).exists():
        problem = f"{directory} holds a model that `retrain export` did not write"
        raise StorageError(f"{problem}; choose another directory, or delete this one")
    trained = reopen(run, (), only_warnings, "weights", trust=trust)
    from retrain.run.export import export as write
    from retrain.run.export import push

    write(trained, directory, dtype, chat=True)
    say(f"{directory}: written")
    if push_to_hub:
        say(push(directory, push_to_hub, private))


def report(
    run: Annotated[Path, typer.Argument(help="A run or a campaign, runs/NAME.", show_default=False)],
    live: Annotated[
        bool, typer.Option("--live", help="Keep updating the report of a run until it ends; the page reloads.")
    ] = False,
) -> None:
    """Write report.html: one self-contained file with curves, samples and their credit, and the configuration.

    For a campaign the report has the verdict, differences with intervals and exact tests, curves, costs and credit;
    report.md and results.csv are written as well.
    """
    # Only a campaign has a plan.
    if (run / "plan.json").is_file():
        from retrain.campaign.verdict.verdict_page import write_report as write_verdict

        written = write_verdict(run)
        say("\n".join([written.text, *map(str, written.files)]))
        return
    from retrain.report.run_page import follow, write_report

    if live:
        say(f"open {run / 'report.html'}")
    say(str(follow(run) if live else write_report(run)))


def only_warnings(event: str, details: Any) -> None:
    """Print warnings, and ignore other events."""
    if event == "message" and details.get("level") == "warning":
        say(str(details["text"]), error=True)


def status(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Runs, campaigns, or folders of them; unset: runs/.")
    ] = None,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Keep updating until all runs have ended.")] = False,
) -> None:
    """Show the progress of runs and campaigns: steps, reward, held-out accuracy, time left."""
    folders = [folder for path in runs or [Path("runs")] for folder in _runs_in(path)]
    if not folders:
        raise ConfigError.at("runs", "status", "there is no run here", "retrain train run.toml")
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, soft_wrap=True)
    if as_json or not watch:
        facts = [_facts(path) for path in folders]
        if as_json:
            say(json.dumps(facts, indent=2))
        else:
            console.print(_picture(facts))
        # A damaged run among all of runs/ is shown, and no error of the command.
        if runs and any(row.get("state") == "unreadable" for row in facts):
            raise typer.Exit(StorageError.exit_code)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            facts = [_facts(path) for path in folders]
            live.update(_picture(facts), refresh=True)
            # A campaign has no state of its own, and its stopped runs go on when it does.
            states = [row["state"] for run in facts for row in run.get("runs", [run])]
            if not {"waiting", "running", "stopped"} & {*states}:
                return
            time.sleep(_REFRESH_S)


def _runs_in(path: Path) -> list[Path]:
    """Return the path itself if it is a run or campaign, else the runs and campaigns in this folder.

    A path without any is returned as well, so that reading it reports the error; only runs/ may be empty.
    """
    folders = sorted({file.parent for name in (_STATUS, _PLAN) for file in path.glob(f"*/{name}")})
    is_run = (path / _STATUS).exists() or (path / _PLAN).exists()
    return [path] if is_run or (not folders and path != Path("runs")) else folders


def _facts(path: Path) -> dict[str, Any]:
    """Return the facts of a run or campaign. Only a campaign has "runs"; a damaged one has path, state and error."""
    try:
        if (path / _PLAN).exists():
            from retrain.campaign.schedule import Status

            return Status(path).facts()
        from retrain.report.run_summary import status as facts

        return facts(path)
    except StorageError as error:
        return {"path": str(path), "state": "unreadable", "error": str(error)}


def _picture(facts: list[dict[str, Any]]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from retrain.display.campaign_display import picture

    return Group(
        *(Group(Text(shown(row["path"])), picture(row)) if "runs" in row else Group(*_lines(row)) for row in facts)
    )


def _lines(row: dict[str, Any]) -> Iterator[Text]:
    """Yield the line of a run, and one for each of its findings."""
    from rich.text import Text

    yield Text(_line(row), no_wrap=True)
    for finding in row.get("findings", ()):
        yield Text(shown(f"  {finding['name']}: {finding['text']} ({finding['page']})"), style="yellow")


def _line(row: dict[str, Any]) -> str:
    if row["state"] == "unreadable":
        return shown(f"{row['path']}  unreadable: {row['error']}")
    accuracy = "" if row["accuracy"] is None else f"  accuracy {row['accuracy']:.1%} after {row['eval_step']} steps"
    left = "" if row["eta_s"] is None else f"  {row['eta_s'] / 60:.1f} minutes left"
    error = f"  {row['error']}" if row["error"] else ""
    total = "" if row["max_steps"] is None else f"/{row['max_steps']}"
    return shown(f"{row['path']}  {row['state']}  step {row['steps']}{total}{accuracy}{left}{error}")
