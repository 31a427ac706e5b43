"""Commands that read a configuration and train nothing: validate, explain, schema, reward check."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from retrain.campaign.plan.is_campaign import is_campaign
from retrain.cli.arguments import File, Json, Overrides
from retrain.config.load import load
from retrain.errors import ConfigError, UserCodeError
from retrain.system.process import thread_waiting
from retrain.system.terminal import say, warn


def validate(file: File, overrides: Overrides = None, as_json: Json = False) -> None:
    """Check a configuration and its data without loading torch or a model.

    Print one line per error, with file:line:column, key, problem and fix. Exit codes: 0 valid, 2 errors, 3 if all
    errors are in the data.
    """
    from retrain.run.before.data_checks import check_data

    runs = ""
    try:
        if is_campaign(file):
            from retrain.campaign.plan.load_campaign import load_campaign

            campaign = load_campaign(file, overrides or ())
            conditions, seeds = len(campaign.conditions), len(campaign.settings.seed_list)
            warnings, runs = campaign.warnings, f": {conditions} conditions x {seeds} seeds = {conditions * seeds} runs"
            campaign.check_data()
        else:
            loaded = load(file, overrides or ())
            warnings = loaded.warnings
            check_data(loaded)
    except ConfigError as error:
        if not as_json:
            raise
        say(json.dumps({"valid": False, "problems": [*map(vars, error.problems)], "warnings": []}, indent=2))
        # The JSON holds the errors, which must not be printed again.
        raise typer.Exit(error.exit_code) from None
    if as_json:
        say(json.dumps({"valid": True, "problems": [], "warnings": [*map(vars, warnings)]}, indent=2))
        return
    warn(warnings)
    say(f"{file}: valid{runs}")


def schema(
    file: Annotated[Path | None, typer.Argument(help="Add the tables of the components that this file names.")] = None,
) -> None:
    """Print the JSON Schema of a configuration, including the tables of all registered components."""
    from retrain.campaign.plan.load_campaign import load_campaign

    if file is not None:
        # Loading registers the components that the file names.
        load_campaign(file) if is_campaign(file) else load(file)
    say(schema_text())


def schema_text() -> str:
    """Return the JSON Schema of runs and campaigns, including the components that have been imported."""
    from retrain.campaign.plan.campaign_schema import add_to
    from retrain.config.jsonschema import json_schema

    return json.dumps(add_to(json_schema()), indent=2)


def explain(
    file: File,
    overrides: Overrides = None,
    as_json: Json = False,
    ranks: Annotated[int, typer.Option(min=1, help="World size for which to show the memory of each rank.")] = 1,
    measure: Annotated[bool, typer.Option("--measure", help="Train two steps, and show time and memory.")] = False,
) -> None:
    """Show what a configuration will do: pipeline, batch sizes, memory, and the origin of each component.

    Credit and loss are computed for a small synthetic batch; exit code 2 if they fail. For a campaign, its runs are
    shown, and the facts of its baseline.
    """
    from retrain.campaign.plan.load_campaign import load_campaign
    from retrain.campaign.preview import measured, preview
    from retrain.campaign.preview import render as render_campaign
    from retrain.config.document import read
    from retrain.run.before.explain import explain as report
    from retrain.run.before.explain import render

    campaign = load_campaign(file, overrides or ()) if is_campaign(file) else None
    if campaign is None:
        thread_waiting.spin_if_quiet()  # before plug-ins are loaded, which may import torch
        loaded = load(file, overrides or ())
        run, warnings, facts, head = report(loaded, ranks), loaded.warnings, dict[str, Any](), ""
        if measure:
            run["measured"] = measured(read(file, overrides or ()).data, loaded.config, ranks)
    else:
        # With tasks the label of a condition begins with its task; the first task is shown.
        methods = [condition.method for condition in campaign.conditions]
        run = report(campaign.configs[methods.index(campaign.baseline)], ranks)
        facts, warnings = preview(campaign, probe=measure), campaign.warnings
        head = f"{render_campaign(facts)}\n\nA run of {campaign.baseline}:\n"
        facts |= {"run": run}
    if as_json:
        say(json.dumps(facts or run, indent=2))
    else:
        say(head + render(run))
    warn(warnings)
    if any(result.startswith("failed") for result in run["probe"].values()):
        raise typer.Exit(ConfigError.exit_code)


def check_rewards(
    file: File,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=1, help="Problems of the task to build completions from.")] = 20,
    allow: Annotated[
        list[str] | None, typer.Option(help="A form of wrong completions that may count as right. Repeatable.")
    ] = None,
) -> None:
    """Show what the rewards of a run file pay for right, wrong and cheating completions.

    Exit code 1 if wrong completions of a form count as right, or if more completions could not be scored than
    [reward_pool] max_failed allows.
    """
    from rich.progress import track

    from retrain.run.before.reward_check import FORMS, as_table
    from retrain.run.before.reward_check import check_rewards as check

    wrong = [form.name for form in FORMS if form.right is False]
    if unknown := [name for name in allow or () if name not in wrong]:
        raise typer.BadParameter(f'no form is called "{unknown[0]}"; forms: {", ".join(wrong)}', param_hint="--allow")
    loaded = load(file, overrides or ())
    # Standard output gets the table only.
    console = Console(stderr=True)
    bar = partial(track, description="scoring", console=console, transient=True, disable=not console.is_terminal)
    checks = check(loaded, rows, bar)
    table = as_table(loaded, checks)
    say("\n".join(table.aligned()))
    if any(cell.endswith(" +") for row in table.rows for cell in row):
        say("+ wrong, and paid more than the lowest value and 0")
    holes = {entry.form.name: entry.correct for entry in checks if entry.form.name in wrong and entry.correct}
    # Right forms that count in at most half of the problems.
    missed = [entry.form.name for entry in checks if entry.form.right and entry.correct <= 0.5]
    failed, count = sum(entry.failed for entry in checks), sum(entry.scored for entry in checks)
    if failed:
        say(f"could not be scored: {failed} of {count} completions")
    if missed:
        say(f"? right, and counts as wrong: {', '.join(missed)}")
    if holes:
        say(f"! wrong, and counts as right: {', '.join(f'{name} ({share:.0%})' for name, share in holes.items())}")
    # A wrong form that is paid but does not count as right is marked, and no failure: partial credit is a choice.
    if set(holes) - set(allow or ()) or failed / count > loaded.config.reward_pool.max_failed:
        raise typer.Exit(UserCodeError.exit_code)
