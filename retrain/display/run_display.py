"""Progress display of a run: a live screen in a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial
from importlib.util import find_spec
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from retrain.display.run_lines import Lines
from retrain.system.masking import masked
from retrain.system.terminal import forgiving_output
from retrain.types import Observer


def can_be_live(console: Console) -> bool:
    """Return True in a terminal, and in a notebook with ipywidgets, unless NO_COLOR or TERM=dumb is set."""
    able = console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)
    return able and not console.is_dumb_terminal and "NO_COLOR" not in os.environ


@contextmanager
def display(plain: bool, as_json: bool = False) -> Generator[Observer]:
    """Return an observer that displays a run while the context is open.

    It prints lines instead of the live screen if `plain` is set or the output cannot show it, see `can_be_live`. With
    `as_json` it prints only one JSON object per event to standard output, and output of libraries goes to standard
    error. A run continues if the output cannot be written.
    """
    with forgiving_output():
        if as_json:
            # What a library prints must not stand between the JSON objects.
            output = sys.stdout
            with redirect_stdout(sys.stderr):
                yield partial(_json_line, output)
            return
        console = Console(highlight=False)
        if plain or not can_be_live(console):
            yield Lines()
            return
        from rich.live import Live

        from retrain.display.live_screen import Screen

        screen = Screen(console)
        # Two frames per second keep the clock moving and use about 1% of a core.
        with Live(console=console, get_renderable=screen.render, refresh_per_second=2, vertical_overflow="crop"):
            yield screen
        if screen.summary:
            console.print(Text("\n" + screen.summary, style="bold"))


def _json_line(output: TextIO, event: str, details: Mapping[str, Any]) -> None:
    print(json.dumps(masked({"event": event, **details})), file=output, flush=True)
