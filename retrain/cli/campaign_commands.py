"""`retrain campaign`, `retrain worker` and `retrain compare`: runs that are compared with statistics."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from retrain.cli.arguments import File, Json, Overrides
from retrain.errors import ConfigError, Preempted, RetrainError
from retrain.system.files import writing
from retrain.system.terminal import say, shown, warn

if TYPE_CHECKING:
    from retrain.campaign.plan.load_campaign import LoadedCampaign


def campaign(  # noqa: PLR0913 - one per option
    file: File,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete an earlier campaign of this name first.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Start failed runs again.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show runs, time and power; run nothing.")] = False,
    no_probe: Annotated[bool, typer.Option("--no-probe", help="With --dry-run: do not measure two steps.")] = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="Write the plan, and print a script for sbatch.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines instead of the live display.")] = False,
) -> None:
    """Run every condition of a TOML file with every seed, and test the differences.

    The campaign is written to runs/NAME; the same command resumes it. Exit codes: 0 all runs
    are done, 1 some failed, 2 configuration, 75 stopped by SIGTERM, 130 by Ctrl-C.
    """
    from retrain.campaign.plan.load_campaign import load_campaign

    loaded = load_campaign(file, overrides or ())
    warn(loaded.warnings)
    if dry_run:
        from retrain.campaign.preview import preview, render

        facts = preview(loaded, not no_probe)
        say(json.dumps(facts, indent=2) if as_json else render(facts))
        return
    if slurm:
        from retrain.campaign.work.campaign_directory import create
        from retrain.campaign.work.slurm import slurm_script

        # "auto" counts the processors of the machine that runs the job, not of this one.
        slots = loaded.settings.slots
        say(slurm_script(create(loaded, fresh), None if slots == "auto" else slots).rstrip("\n"))
        return
    run_reported(loaded, fresh, retry_failed, plain)


def run_reported(loaded: LoadedCampaign, fresh: bool, retry_failed: bool, plain: bool) -> None:
    """Run a campaign, write its report and print the verdict. Exit with code 1 if a run has no result."""
    from retrain.api import run_and_report

    with continuation(loaded.directory):
        report, failed = run_and_report(loaded, fresh, retry_failed, plain)
    say_verdict(f"{report.text}\n\nCurves and tables: {report.files[0]}")
    if failed:
        raise typer.Exit(1)


@contextmanager
def continuation(path: Path) -> Generator[None]:
    """Add to a stop by a signal inside the block how many runs are done, and the command that continues."""
    try:
        yield
    except (KeyboardInterrupt, Preempted) as stopped:
        from retrain.campaign.schedule import Status

        with suppress(RetrainError):  # a signal before the plan was written
            facts = Status(path).facts()
            # --fresh would delete what is done.
            command = shlex.join(["retrain", *(word for word in sys.argv[1:] if word != "--fresh")])
            stopped.add_note(f"{facts['done']} of {facts['total']} runs are done; continue with: {command}")
        raise


def worker(
    directory: Annotated[Path, typer.Argument(help="A campaign, runs/NAME, on a disk that all workers see.")],
    slots: Annotated[int | None, typer.Option(min=1, help="Concurrent runs; unset: the campaign's slots.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs of this machine to use; unset: all.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Start at most this many runs, and do not wait for those of others.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines instead of the live display.")] = False,
) -> None:
    """Join a campaign: execute its runs, including those of dead workers, until all are done.

    Exit codes: 0 all runs are done, 1 some failed, 6 the campaign cannot be written, 75 stopped by SIGTERM, or with
    --limit no run is free before the next look, 130 by Ctrl-C.
    """
    from retrain.campaign.driver import work
    from retrain.display.campaign_display import matrix

    with continuation(directory), matrix(plain=plain) as observe:
        failed = work(directory, observe, slots, gpus, limit)
    if failed:
        raise typer.Exit(1)


def compare(  # noqa: PLR0913 - one per option
    runs: Annotated[
        list[Path], typer.Argument(help="Runs or campaigns, the first of which is the baseline, or one table.")
    ],
    metric: Annotated[
        str | None, typer.Option(help="Column or key of files, or metric of runs; unset: accuracy.")
    ] = None,
    goal: Annotated[Literal["max", "min"] | None, typer.Option(help="max if more is better, or min.")] = None,
    margin: Annotated[
        float | None, typer.Option(help="Largest difference that does not matter; tests equality.")
    ] = None,
    summary: Annotated[
        Literal["last", "mean"] | None, typer.Option(help="Result of a run: the last value, or the mean; unset: last.")
    ] = None,
    unpaired: Annotated[bool, typer.Option("--unpaired", help="Do not pair runs of one seed.")] = False,
    allow_different: Annotated[
        list[str] | None, typer.Option(help="Setting of the measurement that may differ.")
    ] = None,
    fail_if: Annotated[Literal["worse"] | None, typer.Option(help="Exit with 1 for this verdict: worse.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a report with figures to this file.")] = None,
    latex: Annotated[Path | None, typer.Option("--latex", help="Write its tables for a paper to this file.")] = None,
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Write its figures to this folder, as SVG and, with resvg-py, PNG.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare runs: differences in held-out accuracy, paired by seed, with intervals and tests.

    Runs of one configuration with different seeds are one condition. For instance:
    retrain compare runs/grpo-s0 runs/grpo-s1 runs/maxrl-s0 runs/maxrl-s1

    Or give one table with the results of any trainer: CSV, TSV, JSON lines or Parquet with the columns method, seed
    and a metric, and optionally task, step and problem.
    Exit codes: 1 with --fail-if worse if a comparison is worse, 2 options or runs that cannot be compared, also with
    --fail-if if no seed has a result in both, 3 files.
    """
    from retrain.campaign import comparison
    from retrain.campaign.verdict import sentences, verdict_page

    asked = comparison.Asked(metric, goal, margin, summary, unpaired, tuple(allow_different or ()))
    analysis = comparison.compare(runs, asked)
    command = [comparison.command(runs, asked)]
    # Functions, so that only what is asked for is rendered.
    pages = (html, lambda: verdict_page.render(analysis, command)), (latex, lambda: verdict_page.paper(analysis))
    for file, made in pages:
        if file:
            comparison.check_output(file, runs)
            with writing(file):
                file.write_text(made(), encoding="utf-8")
    if figures:
        from retrain.report.exported_figures import write_figures

        with writing(figures):
            write_figures(figures, verdict_page.exported(analysis))
    if as_json:
        say(json.dumps(sentences.as_json(analysis), indent=2))
    else:
        say_verdict("\n".join([*comparison.differing(analysis.first), verdict_page.text(analysis)]))
    if fail_if and any(tested.kind == fail_if for tested in analysis.comparisons):
        raise typer.Exit(1)
    # A gate that compared nothing must not pass.
    if fail_if and not any(tested.seeds for tested in analysis.comparisons):
        raise typer.Exit(ConfigError.exit_code)


def say_verdict(text: str) -> None:
    """Print a verdict; in a terminal the lines of conclusive comparisons have the color of their kind."""
    from retrain.campaign.verdict.verdict_kinds import KINDS

    colors = {kind.mark: kind.color for kind in KINDS.values()}
    for line in text.split("\n"):
        # It is None if it was closed when Python started.
        in_color = sys.stdout is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        # The line of a verdict begins with the mark of its kind.
        color = colors.get(line[:1]) if in_color else None
        if color:
            typer.secho(shown(line), fg=color)
        else:
            say(line)
