"""`retrain campaign`, `retrain worker` and `retrain compare`: runs that are compared with statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.cli.arguments import File, Json, Overrides, warn
from retrain.system.files import writing
from retrain.system.terminal import say

if TYPE_CHECKING:
    from retrain.campaign.plan.load_campaign import LoadedCampaign


def campaign(  # noqa: PLR0913 - one per option
    file: File,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete an earlier campaign of this name first.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Take failed runs up again.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show runs, time and power; run nothing.")] = False,
    no_probe: Annotated[bool, typer.Option("--no-probe", help="With --dry-run: do not measure two steps.")] = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="Write the plan, and print a script for sbatch.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines instead of the live display.")] = False,
) -> None:
    """Run every condition of a TOML file with every seed, and say what the differences are worth.

    Everything is written to runs/NAME; the same command goes on with what is left to do. Exit codes: 0 all runs
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

        slots = loaded.settings.slots
        say(slurm_script(create(loaded, fresh), None if slots == "auto" else slots).rstrip("\n"))
        return
    _run(loaded, fresh, retry_failed, plain)


def judge(  # noqa: PLR0913 - one per option
    file: File,
    against: Annotated[Path | None, typer.Option(help="A run with the baseline; unset: GRPO.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Names with commas between them; unset: all.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Four tasks and three seeds: a first look.")] = False,
    seeds: Annotated[int | None, typer.Option(min=2, help="How many; unset: 9.")] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Runs at a time; unset: one per core or GPU.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete an earlier testbed of this file first.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the campaign, and run nothing.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines instead of the live display.")] = False,
) -> None:
    """Say where a method helps, harms, or makes no difference: it and a baseline on tasks with one premise each.

    The method is what the file says of credit, losses and optimization. It becomes a campaign, runs/testbed-NAME.toml;
    the same command resumes it. Exit codes are those of `retrain campaign`.
    """
    from retrain.campaign.plan import testbed as plan
    from retrain.campaign.plan.load_campaign import load_campaign
    from retrain.config.load import load
    from retrain.system.files import write_text

    chosen = [name.strip() for name in tasks.split(",")] if tasks else plan.QUICK if quick else plan.testbed_tasks()
    text = plan.testbed_toml(file, against, chosen, seeds or (plan.QUICK_SEEDS if quick else plan.SEEDS), slots)
    written = Path(load(file).config.logging.dir).expanduser() / f"testbed-{file.stem}.toml"
    with writing(written):
        written.parent.mkdir(parents=True, exist_ok=True)
        write_text(written, text)
    loaded = load_campaign(written)
    say(f"{written}: {len(loaded.conditions) * len(loaded.settings.seed_list)} runs")
    if not dry_run:
        _run(loaded, fresh, False, plain)


def _run(loaded: LoadedCampaign, fresh: bool, retry_failed: bool, plain: bool) -> None:
    """Run a campaign, write its report and print the verdict; exit code 1 if a run has no result."""
    from retrain.campaign.driver import failed, run_campaign
    from retrain.campaign.verdict import card_page
    from retrain.cli.campaign_display import matrix

    with matrix(plain=plain) as observe:
        directory = run_campaign(loaded, observe, fresh=fresh, retry_failed=retry_failed)
    say(card_page.write(directory.path)[0])
    if failed(directory):
        raise typer.Exit(1)


def worker(
    directory: Annotated[Path, typer.Argument(help="A campaign, runs/NAME, on a disk that all workers see.")],
    slots: Annotated[int | None, typer.Option(min=1, help="Runs at a time; unset: as the campaign says.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs of this machine to use; unset: all.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Take so many runs, and wait for none that others hold.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines instead of the live display.")] = False,
) -> None:
    """Join a campaign: take its runs until none is left, those of dead workers included.

    Exit codes: 0 all runs are done, 1 some failed, 75 stopped by SIGTERM, 130 by Ctrl-C.
    """
    from retrain.campaign.driver import failed
    from retrain.campaign.work.campaign_directory import CampaignDirectory
    from retrain.campaign.work.campaign_worker import Worker, machine_slots
    from retrain.cli.campaign_display import matrix

    campaign = CampaignDirectory(directory)
    with matrix(plain=plain) as observe:
        observe("campaign", {"path": directory})
        places = machine_slots(slots or campaign.plan.slots, campaign.plan.ranks, gpus)
        working = Worker(campaign, campaign.pending(), places, observe, limit)
        working.run()
    if working.failures or (limit is None and failed(campaign)):
        raise typer.Exit(1)


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Runs or campaigns; the first is the baseline.", show_default=False)
    ],
    html: Annotated[Path | None, typer.Option("--html", help="Write a report with figures to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Compare runs: differences in held-out accuracy, paired by seed, with intervals and exact tests.

    Runs of one configuration with different seeds are one condition. For instance:
    retrain compare runs/grpo-s0 runs/grpo-s1 runs/maxrl-s0 runs/maxrl-s1
    """
    from retrain.campaign.verdict import sentences as verdict
    from retrain.campaign.verdict.analysis import analyze
    from retrain.campaign.verdict.any_runs import compare_command, read_runs

    analysis = analyze(read_runs(runs))
    if html:
        from retrain.campaign.verdict.campaign_page import render

        with writing(html):
            html.write_text(render(analysis, [compare_command(runs)]), encoding="utf-8")
    say(json.dumps(verdict.as_json(analysis), indent=2) if as_json else verdict.conditions_text(analysis))
