"""Progress display of a campaign: conditions x seeds in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from retrain.campaign.schedule import Status
from retrain.display.run_display import can_be_live
from retrain.display.run_lines import clock
from retrain.system.terminal import forgiving_output, say, shown
from retrain.types import Observer

# A frame reads the files of all runs.
_REFRESH_S = 1.0
_LEGEND = "cell: accuracy; of a running run, the share of its steps that are done, then its accuracy so far"
_STYLES = {
    "done": "green",
    "failed": "red",
    "running": "yellow",
    "stopped": "magenta",
    "waiting": "dim",
    "unreadable": "red",
    "not needed": "dim",
}


@contextmanager
def matrix(plain: bool) -> Generator[Observer]:
    """Return an observer that displays a campaign while the context is open.

    It prints lines instead of the live matrix if `plain` is set or the output cannot show it, see `can_be_live`.
    """
    with forgiving_output():
        console = Console(highlight=False)
        if plain or not can_be_live(console):
            yield lines
            return
        # auto_refresh would start a thread, and the worker must be single-threaded when it starts processes.
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            yield Matrix(live)


def lines(event: str, details: Mapping[str, Any]) -> None:
    """Print a line for every event of a job and every message."""
    if event == "job":
        text = f": {details['text']}" if details["text"] else ""
        say(f"{details['id']}  {details['event']}{text}")
    elif event == "message":
        say(str(details["text"]), error=details["level"] == "warning")


class Matrix:
    """Live matrix of a campaign, which reads the state of each job from the campaign's files."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._drawn = 0.0
        self._status: Status | None = None

    def __call__(self, event: str, details: Mapping[str, Any]) -> None:
        """Process an event; draw at most once a second."""
        if event == "campaign":
            self._status = Status(Path(details["path"]))
        elif event == "message":
            self._live.console.print(Text(shown(str(details["text"])), style="dim"))
        elif event == "job" and details["event"] in ("crashed", "failed", "lost"):
            text = shown(f"{details['id']} {details['event']}: {details['text']}")
            self._live.console.print(Text(text, style="red" if details["event"] == "failed" else "yellow"))
        # The start or end of a job is shown at once.
        if self._status is not None and (event == "job" or time.monotonic() - self._drawn > _REFRESH_S):
            self._drawn = time.monotonic()
            self._live.update(picture(self._status.facts()), refresh=True)


def picture(facts: Mapping[str, Any]) -> Group:
    """Return a table of conditions x seeds, its legend while runs go on, and a line with the runs and the time left."""
    # A dict keeps the order of the plan, which a set would not.
    seeds = list(dict.fromkeys(row["seed"] for row in facts["runs"]))
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("condition", style="bold", no_wrap=True)
    for seed in seeds:
        table.add_column(f"s{seed}", justify="right", no_wrap=True)
    for condition in dict.fromkeys(row["condition"] for row in facts["runs"]):
        by_seed = {row["seed"]: row for row in facts["runs"] if row["condition"] == condition}
        table.add_row(shown(condition), *(_cell(by_seed.get(seed)) for seed in seeds))
    legend = [Text(_LEGEND, style="dim")] if facts["running"] else []
    look = [Text(shown(facts["looks"]))] if facts["looks"] else []
    return Group(table, *legend, *look, Text(tally(facts), style="dim"))


def tally(facts: Mapping[str, Any]) -> str:
    """Return a line with the numbers of runs that are done, running and failed, and the time left."""
    parts = [f"{facts['done']} of {facts['total']} runs done"]
    parts += [f"{facts[state]} {state}" for state in ("running", "failed", "unreadable") if facts[state]]
    left = "" if facts["left_s"] is None else f"; about {clock(facts['left_s'])} left"
    return ", ".join(parts) + left


def _cell(row: Mapping[str, Any] | None) -> Text:
    """Return the cell of a run: its state, the share of its steps that are done, and its accuracy once known."""
    if row is None:
        return Text()
    accuracy = "" if row["accuracy"] is None else f"{row['accuracy']:.1%}"
    share = f"{row['steps'] / row['max_steps']:.0%}" if row["max_steps"] else "0%"
    text = {
        "waiting": "·",
        "not needed": "-",
        "done": accuracy or "done",
        "failed": "failed",
        "unreadable": "unreadable",
        # Running and stopped runs show how far they are.
    }.get(row["state"], f"{share} {accuracy}")
    return Text(text.rstrip(), style=_STYLES[row["state"]])
