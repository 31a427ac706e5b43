"""The command that runs a method on the testbed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from retrain.cli.arguments import File
from retrain.cli.campaign_commands import run_reported
from retrain.system.files import expanded, writing
from retrain.system.terminal import say


def judge(  # noqa: PLR0913 - the options of the command
    file: File,
    against: Annotated[Path | None, typer.Option(help="Configuration of the baseline; unset: GRPO.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Comma-separated names; unset: all.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Four tasks and three seeds, for a first impression.")] = False,
    seeds: Annotated[int | None, typer.Option(min=2, help="Number of seeds; unset: 9.")] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Concurrent runs; unset: one per core or GPU.")] = None,
    claim: Annotated[str | None, typer.Option(help="The task on which the method is claimed to differ.")] = None,
    controls: Annotated[
        bool, typer.Option("--controls", help="Add true, random, reversed and shuffled credit, and other seeds.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete an earlier testbed of this file first.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the campaign without running it.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines instead of the live display.")] = False,
) -> None:
    """Compare a method with a baseline on small tasks with one premise each.

    The method is the file's settings of credit, losses and optimization. The command writes a campaign,
    testbed-NAME.toml in [logging] dir, and runs it; the same command resumes it. Exit codes are those of
    `retrain campaign`.
    """
    from retrain.api import load_campaign
    from retrain.config.load import load
    from retrain.lab import testbed as plan
    from retrain.system.files import write_text

    chosen = (
        [name.strip() for name in tasks.split(",")]
        if tasks
        else plan.QUICK
        if quick
        else plan.tasks_with_premise(controls)
    )
    text = plan.card_toml(
        file,
        against,
        chosen,
        seeds or (plan.QUICK_SEEDS if quick else plan.SEEDS),
        slots,
        claim=claim,
        controls=controls,
    )
    # Beside the runs and not beside the file, which may be under version control.
    written = expanded(load(file).config.logging.dir) / f"testbed-{file.stem}.toml"
    with writing(written):
        written.parent.mkdir(parents=True, exist_ok=True)
        write_text(written, text)
    loaded = load_campaign(written)
    say(f"{written}: {len(loaded.conditions) * len(loaded.settings.seed_list)} runs")
    if not dry_run:
        run_reported(loaded, fresh, False, plain)
