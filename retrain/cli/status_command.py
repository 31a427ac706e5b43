"""`retrain status`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from retrain.cli.config_commands import Json
from retrain.errors import ConfigError, ConfigProblem, StorageError

_REFRESH_S = 2.0
_PLAN, _STATUS = "plan.json", "status.json"


def status(
    runs: Annotated[list[Path] | None, typer.Argument(help="Runs and campaigns; without any, all in runs/.")] = None,
    as_json: Json = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again and again, until everything has ended.")
    ] = False,
) -> None:
    """Show how far runs and campaigns are: steps, reward, held-out accuracy, time left."""
    found = runs or sorted({path.parent for name in (_STATUS, _PLAN) for path in Path("runs").glob(f"*/{name}")})
    if not found:
        raise ConfigError([ConfigProblem("runs", 0, 0, "status", "there is no run here", "retrain train run.toml")])
    console = Console(highlight=False, soft_wrap=True)
    if as_json or not watch:
        facts = [_facts(path) for path in found]
        if as_json:
            print(json.dumps(facts, indent=2))
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
        *(Group(Text(one["path"]), picture(one)) if "runs" in one else Text(_line(one), no_wrap=True) for one in facts)
    )


def _going_on(facts: dict[str, Any]) -> bool:
    if "runs" in facts:
        return any(row["state"] in ("waiting", "running", "stopped") for row in facts["runs"])
    return facts["state"] == "running"


def _line(row: dict[str, Any]) -> str:
    if row["state"] == "unreadable":
        return f"{row['path']}  unreadable: {row['error']}"
    accuracy = "" if row["accuracy"] is None else f"  accuracy {row['accuracy']:.1%} after {row['eval_step']} steps"
    left = "" if row["eta_s"] is None else f"  {row['eta_s'] / 60:.1f} minutes left"
    error = f"  {row['error']}" if row["error"] else ""
    return f"{row['path']}  {row['state']}  step {row['steps']}/{row['max_steps']}{accuracy}{left}{error}"
