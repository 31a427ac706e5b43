"""Commands that read a configuration and train nothing: validate, explain, schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from retrain.errors import ConfigError, ConfigProblem
from retrain.system.terminal import say

File = Annotated[Path, typer.Argument(help="The TOML file.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override a key: training.lr=1e-5. Repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def validate(file: File, overrides: Overrides = None, as_json: Json = False) -> None:
    """Check a configuration without loading torch or a model.

    Exit code 2 and one line per mistake: file:line:column, key, problem, fix.
    """
    from retrain.campaign.plan.load_campaign import is_campaign, load_campaign
    from retrain.config.load import load

    runs = ""
    try:
        if is_campaign(file):
            campaign = load_campaign(file, overrides or ())
            conditions, seeds = len(campaign.conditions), len(campaign.settings.seed_list)
            warnings, runs = campaign.warnings, f": {conditions} conditions x {seeds} seeds = {conditions * seeds} runs"
        else:
            warnings = load(file, overrides or ()).warnings
    except ConfigError as error:
        if not as_json:
            raise
        print(json.dumps({"valid": False, "problems": [*map(vars, error.problems)], "warnings": []}, indent=2))
        raise typer.Exit(error.exit_code) from None
    if as_json:
        print(json.dumps({"valid": True, "problems": [], "warnings": [*map(vars, warnings)]}, indent=2))
        return
    warn(warnings)
    print(f"{file}: valid{runs}")


def schema(
    file: Annotated[Path | None, typer.Argument(help="Add the tables of the components that this file names.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As in the other commands; a schema is JSON anyway.")] = True,
) -> None:
    """Print the JSON Schema of a configuration, tables of all registered components included."""
    from retrain.campaign.plan.load_campaign import is_campaign, load_campaign
    from retrain.config.load import load

    del as_json
    if file is not None:
        load_campaign(file) if is_campaign(file) else load(file)
    print(schema_text())


def schema_text() -> str:
    """The JSON Schema of runs and campaigns, with the components that have been imported."""
    from retrain.campaign.plan.campaign_schema import add_to
    from retrain.config.jsonschema import json_schema

    return json.dumps(add_to(json_schema()), indent=2)


def explain(
    file: File,
    overrides: Overrides = None,
    as_json: Json = False,
    ranks: Annotated[int, typer.Option(min=1, help="Show the memory of each of so many ranks.")] = 1,
) -> None:
    """Show what a configuration will do: the pipeline, batch arithmetic, memory, and where each part comes from.

    Every stage is tried on a small synthetic batch, the rewards on a problem of the data; exit code 2
    if one fails. Of a campaign: its runs, and the run of its baseline.
    """
    from retrain.campaign.plan.load_campaign import is_campaign, load_campaign
    from retrain.campaign.preview import preview
    from retrain.campaign.preview import render as render_campaign
    from retrain.config.explain import explain as report
    from retrain.config.explain import render
    from retrain.config.load import load

    campaign = load_campaign(file, overrides or ()) if is_campaign(file) else None
    if campaign is None:
        loaded = load(file, overrides or ())
        facts, warnings = report(loaded, ranks), loaded.warnings
        text = render(facts)
    else:
        labels = [condition.label for condition in campaign.conditions]
        run = report(campaign.configs[labels.index(campaign.baseline)], ranks)
        facts, warnings = preview(campaign, probe=False), campaign.warnings
        text = f"{render_campaign(facts)}\n\nA run of {campaign.baseline}:\n{render(run)}"
        facts |= {"run": run}
    print(json.dumps(facts, indent=2) if as_json else text)
    if not as_json:
        warn(warnings)
    tried = (facts if campaign is None else facts["run"])["probe"]
    if any(said.startswith("failed") for said in tried.values()):
        raise typer.Exit(ConfigError.exit_code)


def warn(warnings: tuple[ConfigProblem, ...]) -> None:
    """Print warnings to standard error."""
    for warning in warnings:
        say(f"warning: {warning}", error=True)
