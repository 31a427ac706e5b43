"""The live screen of a run in a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from retrain.display.run_lines import TimeLeft, clock, evaluation, nothing, shown_metrics
from retrain.system.terminal import shown

_BARS = "▁▂▃▄▅▆▇█"
_LABEL, _VALUE = 22, 9
"""Widths of the columns of labels and values."""
_SAMPLE_LINES = 3


@dataclass
class Screen:
    """Observer that holds the state of a run and renders it for the live screen.

    No line of a frame is wrapped, so that all frames have the same height.

    Attributes:
        console: the terminal.
        phase: name of the current phase.
        done, total: steps of the phase that are done, and all of them; total is 0 if unknown.
        left_s: estimated seconds until the end of the phase; None if unknown.
        curves: values of each metric at the steps so far; NaN at a step without a value.
        latest: newest value of each metric.
        evaluation: row of the last evaluation.
        sample: the completion to show.
        summary: text that is printed when the run is done.
        memory_mb: peak memory in MB.
        places: name of the run or of a tracker -> its directory or address.
        began: start of the display, by `time.perf_counter`.
    """

    console: Console
    phase: str = "starting"
    done: int = 0
    total: int = 0
    left_s: float | None = None
    curves: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    latest: dict[str, float] = field(default_factory=dict[str, float])
    evaluation: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sample: Mapping[str, Any] = field(default_factory=dict[str, Any])
    summary: str = ""
    memory_mb: float = 0.0
    places: dict[str, str] = field(default_factory=dict[str, str])
    began: float = field(default_factory=time.perf_counter)
    _time_left: TimeLeft = field(default_factory=TimeLeft)
    _seen: int = 0

    def __call__(self, event: str, details: Mapping[str, Any]) -> None:
        """Process an event; the next frame shows it."""
        # An event without a method is not shown.
        getattr(self, f"_{event}", nothing)(details)

    def _phase(self, row: Mapping[str, Any]) -> None:
        self.phase, self.left_s = shown(str(row["name"])), None
        # During training the bar shows the steps, also in phases such as an evaluation.
        if not self._seen:
            self.total = 0

    def _warmup(self, row: Mapping[str, Any]) -> None:
        self.phase = f"warm start, loss {row['loss']:.3f}"
        self.done, self.total, self.left_s = int(row["step"]), int(row["steps"]), row["left_s"]

    def _warmup_waiting(self, row: Mapping[str, Any]) -> None:
        self.phase = "waiting for another process that computes the same warm start"

    def _step(self, row: Mapping[str, Any]) -> None:
        self.done, self.total, self.phase = int(row["step"]) + 1, int(row["max_steps"]), "training"
        self.left_s = self._time_left.after_step(row)
        for _, name, _ in shown_metrics({**self.latest, **row}):
            if name in row:
                self.latest[name] = float(row[name])
            if name in self.latest:
                # A step without an update has no entropy; a gap keeps all curves on one axis.
                self.curves.setdefault(name, [math.nan] * self._seen).append(float(row.get(name, math.nan)))
        self._seen += 1
        self.memory_mb = float(row.get("memory_mb", 0.0))

    def _eval(self, row: Mapping[str, Any]) -> None:
        self.evaluation = row

    def _sample(self, row: Mapping[str, Any]) -> None:
        self.sample = row

    def _run(self, row: Mapping[str, Any]) -> None:
        self.places["run"] = str(row["directory"])

    def _tracker(self, row: Mapping[str, Any]) -> None:
        self.places[str(row["name"])] = str(row["where"])

    def _message(self, row: Mapping[str, Any]) -> None:
        warning = row.get("level") == "warning"
        self.console.print(Text(shown(str(row["text"])), style="yellow" if warning else "dim"))

    def _done(self, row: Mapping[str, Any]) -> None:
        self.phase, self.left_s = "done", None
        self.summary = shown(str(row["text"]))

    def render(self) -> RenderableType:
        """Return a frame for the current width of the console."""
        width = self.console.width
        parts: list[RenderableType] = [self._progress(width)]
        if self.curves or self.evaluation:
            parts += [Text(), self._curves(width)]
        if self.sample:
            parts += [Text(), Rule(self._sample_title(), style="dim", align="left"), *self._sample_text(width)]
        return Padding(Group(*parts), (1, 0, 0, 0))

    def _progress(self, width: int) -> RenderableType:
        # A fixed width keeps the bar in its place; a narrow terminal has no room for it.
        text = Text(
            f"{self.phase:<24}" if width >= 100 else self.phase, style="bold", overflow="ellipsis", no_wrap=True
        )
        if not self.total:
            return Text.assemble(text, ("  " + clock(time.perf_counter() - self.began), "dim"), no_wrap=True)
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(ratio=2, no_wrap=True)
        table.add_column(ratio=3, no_wrap=True)
        table.add_column(no_wrap=True, justify="right")
        left = "" if self.left_s is None else f"  {clock(self.left_s)} left"
        table.add_row(text, ProgressBar(self.total, self.done), Text(f"{self.done}/{self.total}{left}", no_wrap=True))
        return table

    def _curves(self, width: int) -> RenderableType:
        bars = min(80, width - _LABEL - _VALUE - 3)
        lines = [
            self._curve(label, form.format(self.latest[name]), self.curves[name], bars)
            for label, name, form in shown_metrics(self.curves)
            if name in self.curves
        ]
        if self.evaluation:
            lines.append(Text(evaluation(self.evaluation), no_wrap=True, overflow="ellipsis"))
        memory = f", {self.memory_mb:,.0f} MB of memory at most" if self.memory_mb else ""
        for name, path in self.places.items():
            value = shown(path) + (memory if name == "run" else "")
            # In a narrow terminal the path keeps half of the line.
            label = f"{name:<{min(_LABEL + _VALUE + 2, width // 2)}}"
            lines.append(Text.assemble((label, "dim"), value, no_wrap=True, overflow="ellipsis"))
        return Group(*lines)

    def _curve(self, label: str, value: str, values: Sequence[float], bars: int) -> Text:
        return Text.assemble(
            (f"{label:<{_LABEL}}", "dim"), f"{value:>{_VALUE}}  ", (sparkline(values, bars), "cyan"), no_wrap=True
        )

    def _sample_title(self) -> Text:
        reward, answer = self.sample["reward"], " ".join(shown(str(self.sample.get("answer") or "")).split())
        scored = "not scored" if reward is None else f"reward {reward:.3f}"
        return Text(f"sample, {scored}" + (f", the answer is {answer}" if answer else ""), style="dim")

    def _sample_text(self, width: int) -> list[Text]:
        prompt = " ".join(shown(str(self.sample["prompt"])).split())
        lines = [Text(f"{prompt[:width]}", style="dim", no_wrap=True, overflow="ellipsis")]
        text = " ".join(shown(str(self.sample["text"])).split()) or "(empty)"
        # Wrapping at words needs more text than the lines could hold; all of a long completion would be slow.
        wrapped = Text(text[: width * (_SAMPLE_LINES + 1)]).wrap(self.console, width)
        first = list(wrapped[:_SAMPLE_LINES])
        # Empty lines, so that the frame keeps its height.
        return lines + first + [Text() for _ in range(_SAMPLE_LINES - len(first))]


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the values as a line of at most `width` bars, scaled from the smallest to the largest bar.

    A bar is the mean of the values that fall into it. Values that are not finite are ignored; a bar without others is
    a space.
    """
    count = min(width, len(values))
    means: list[float | None] = []
    for index in range(count):
        part = values[index * len(values) // count : (index + 1) * len(values) // count]
        finite = [value for value in part if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else None)
    finite_means = [mean for mean in means if mean is not None]
    low, high = (min(finite_means), max(finite_means)) if finite_means else (0.0, 0.0)
    # Equal values all get the smallest bar.
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if mean is None else _BARS[round((mean - low) * scale)] for mean in means)
