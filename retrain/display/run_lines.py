"""The display of a run as lines, and the metrics that displays show."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

from retrain.system.terminal import say

_CURVES: tuple[tuple[str, str, str], ...] = (
    ("reward", "reward/mean", "{:.3f}"),
    ("accuracy", "reward/accuracy", "{:.1%}"),
    ("informative", "groups/informative", "{:.0%}"),
    ("skipped (all correct)", "skipped/all_correct", "{:.0f}"),
    ("skipped (all wrong)", "skipped/all_wrong", "{:.0f}"),
    ("tokens", "tokens/response", "{:.1f}"),
    # People take a loss of 0 for an error; with one update a step the ratios are 1, and advantages of a group sum to 0.
    ("loss (near 0: normal)", "loss/total", "{:.3g}"),
    ("entropy", "policy/entropy", "{:.3f}"),
    ("grad norm", "grad/norm", "{:.3g}"),
    ("sampled tokens/s", "time/tokens_per_s", "{:,.0f}"),
    ("turns", "env/turns", "{:.2f}"),
    ("ended by itself", "env/ended_done", "{:.0%}"),
)
"""Label, metric and format of each curve; a metric that the run does not report has no row."""

_MAX_ENVIRONMENT_ROWS = 4
"""Largest number of rows for the metrics that environments report."""


class TimeLeft:
    """Estimate of the time until a run's last step."""

    def __init__(self) -> None:
        self._began = 0.0
        self._first_step = -1

    def after_step(self, row: Mapping[str, Any]) -> float:
        """Return the estimated seconds after a step, at the pace since the first step that was seen.

        Evaluations count, the warm start and the steps before a resume do not.
        """
        step = int(row["step"])
        now = time.perf_counter()
        if self._first_step < 0:
            self._first_step = step
            # The first step that is seen has ended already.
            self._began = now - row.get("time/step_s", 0.0)
        return (now - self._began) / (step + 1 - self._first_step) * (int(row["max_steps"]) - step - 1)


class Lines:
    """Observer that prints one line per event, and about fifty for the steps of a run, for logs and pipes."""

    def __init__(self) -> None:
        self._steps = 0
        self._time_left = TimeLeft()

    def __call__(self, event: str, details: Mapping[str, Any]) -> None:
        """Print the line of an event, if it has one."""
        line = getattr(self, f"_{event}", nothing)(details)
        if line:
            say(line, error=details.get("level") == "warning")

    def _step(self, row: Mapping[str, Any]) -> str:
        done, total = int(row["step"]) + 1, int(row["max_steps"])
        self._steps += 1
        left_s = self._time_left.after_step(row)
        # The first and the last step always have a line.
        if self._steps > 1 and done < total and done % max(1, total // 50):
            return ""
        values = [f"{label} {form.format(row[name])}" for label, name, form in shown_metrics(row) if name in row]
        seconds = f"{row['time/step_s']:.2f} s" if "time/step_s" in row else ""
        left = f"{clock(left_s)} left" if done < total else ""
        return "  ".join(part for part in (f"step {done}/{total}", *values, seconds, left) if part)

    def _warmup(self, row: Mapping[str, Any]) -> str:
        done, total = int(row["step"]), int(row["steps"])
        line = f"warm start {done}/{total}  loss {row['loss']:.3f}  {clock(row['left_s'])} left"
        return "" if done % max(1, total // 10) else line

    def _warmup_waiting(self, row: Mapping[str, Any]) -> str:
        return "waiting for another process that computes the same warm start"

    def _phase(self, row: Mapping[str, Any]) -> str:
        return f"{row['name']} ..."

    def _eval(self, row: Mapping[str, Any]) -> str:
        return evaluation(row)

    def _message(self, row: Mapping[str, Any]) -> str:
        return f"{row['level']}: {row['text']}" if row.get("level") == "warning" else str(row["text"])

    def _tracker(self, row: Mapping[str, Any]) -> str:
        return f"{row['name']}: {row['where']}"

    def _done(self, row: Mapping[str, Any]) -> str:
        return str(row["text"])


def shown_metrics(metrics: Collection[str]) -> tuple[tuple[str, str, str], ...]:
    """Return label, metric and format of each curve, including those of metrics that environments report.

    The latter are the mean reward of each of several environments ("LABEL: reward"), then other numbers.
    """
    # Episodes that were replayed after the loss of a worker are not a figure of the environment.
    apart = {name for _, name, _ in _CURVES} | {"env/replayed"}
    own_metrics = [name for name in metrics if name.startswith("env/") and "ended_" not in name and name not in apart]
    rewards = [name for name in own_metrics if name.endswith("/reward")]
    counts = [name for name in own_metrics if name.count("/") == 1]
    more = [
        (name.removeprefix("env/").replace("/", ": "), name, "{:.3g}")
        for name in [*rewards, *counts][:_MAX_ENVIRONMENT_ROWS]
    ]
    return (*_CURVES, *more)


def evaluation(row: Mapping[str, Any]) -> str:
    """Return an evaluation as a line: accuracy with its 95% interval, other accuracies, and the number of steps."""
    interval = f" (95% interval {row['ci_low']:.1%} to {row['ci_high']:.1%})" if "ci_low" in row else ""
    greedy = [f", greedy {row['greedy_accuracy']:.1%}"] if "greedy_accuracy" in row else []
    sets = greedy + [f", {key[: -len('/accuracy')]} {row[key]:.1%}" for key in row if key.endswith("/accuracy")]
    return (
        f"held-out accuracy {row['accuracy']:.1%}{interval}{''.join(sets)}{',' * bool(sets)} after {row['step']} steps"
    )


def clock(seconds: float) -> str:
    """Format a duration as `m:ss`, or as `h:mm:ss` from an hour on."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def nothing(details: Mapping[str, Any]) -> None:
    """Ignore an event that the display does not show."""
