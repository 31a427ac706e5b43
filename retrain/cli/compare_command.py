"""`retrain compare`: the statistics of campaigns for any runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from retrain.cli.config_commands import Json


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

        html.write_text(render(analysis, [compare_command(runs)]), encoding="utf-8")
    print(json.dumps(verdict.as_json(analysis), indent=2) if as_json else verdict.conditions_text(analysis))
