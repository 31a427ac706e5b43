"""What a campaign shows while it goes on: conditions x seeds in a terminal, plain lines everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from retrain.cli.display import clean
from retrain.types import Observer


@contextmanager
def matrix(plain: bool) -> Generator[Observer]:
    """An observer for the length of a campaign."""
    yield _lines


def _lines(event: str, details: Mapping[str, Any]) -> None:
    """One line per event that is worth one."""
    if event == "job":
        text = f": {details['text']}" if details["text"] else ""
        print(clean(f"{details['id']}  {details['event']}{text}"), flush=True)
    elif event == "message":
        print(clean(str(details["text"])), file=sys.stderr if details["level"] == "warning" else sys.stdout, flush=True)
