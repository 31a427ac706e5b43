"""The report of a run: a self-contained HTML file, and a page with all samples."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from retrain.metrics import Metric, find_metric
from retrain.metrics import metrics as registry
from retrain.report import samples
from retrain.report.charts import line_chart, share_chart, span, stacked_chart
from retrain.report.page import Table, duration, fill, percent, source
from retrain.report.run_summary import MetricsRow, recipe, status, summary
from retrain.report.shown_settings import settings
from retrain.storage.run_files import read_rows, understood
from retrain.system.files import write_text, writing
from retrain.system.masking import masked
from retrain.system.records import read_json

SAMPLES = "samples.html"
"""File name of the page of all samples."""

_REWARD_PART = "reward/{reward}"
"""Metric that is drawn only if there are several such."""
_STEP_TIMES = {"time/step_s", "time/tokens_per_s"}
"""Time metrics that are not phases of a step."""


def write_report(run: Path, reload_s: float = 0) -> Path:
    """Write `report.html` to the run directory, and `samples.html` if the report does not reload.

    Args:
        run: run directory.
        reload_s: seconds after which a browser reloads the report; 0: never.
    Returns:
        Path of the report.
    Raises:
        StorageError: a file cannot be read or written.
    """
    path = run / "report.html"
    with writing(path), understood(run):
        write_text(path, render(run, reload_s))
        # Reading every rollout takes seconds, which a page that reloads every five does not have.
        rows_of_run = {} if reload_s else {"steps": [*samples.steps(run)], "evaluations": [*samples.evaluations(run)]}
        if any(rows_of_run.values()):
            write_text(
                run / SAMPLES,
                fill(SAMPLES, title=f"{run.resolve().name}: samples", script=source("filter.js"), **rows_of_run),
            )
    return path


def follow(run: Path, every_s: float = 5.0) -> Path:
    """Rewrite the report of a run as a page that reloads itself, until the run has ended. Return its path."""
    while status(run)["state"] == "running":
        write_report(run, every_s)
        time.sleep(every_s)
    return write_report(run)


def render(run: Path, reload_s: float = 0) -> str:
    """Render the report of a run as an HTML document. Equal files give equal text.

    Args:
        run: run directory.
        reload_s: seconds after which a browser reloads the page; 0: never.
    Raises:
        StorageError: a file of the run cannot be read. `write_report` raises it for damaged content, too.
    """
    facts, metrics, evals = status(run), read_rows(run / "metrics.jsonl"), read_rows(run / "eval.jsonl")
    config, environment = read_json(run / "config.resolved.json"), read_json(run / "environment.json")
    return fill(
        "run.html",
        title=run.resolve().name,
        reload_s=reload_s,
        state=_state(facts),
        summary=summary(metrics, evals),
        recipe=recipe(config),
        findings=facts["findings"],
        looked_at=facts["looked_at"],
        facts=_facts(metrics, evals),
        charts=[drawn for drawn in _charts(metrics, evals) if drawn[2]],
        metrics=_ranges(metrics),
        evaluations=_evaluations(evals),
        compared=samples.before_and_after(run),
        samples=_samples(run, samples.reward_weights(config)),
        every=SAMPLES if not reload_s else "",
        settings=settings(config),
        resolved=json.dumps(masked(config), indent=2),
        environment=Table(("", ""), [(key, _described(value)) for key, value in environment.items()]),
    )


def _state(facts: MetricsRow) -> str:
    of = f" of {facts['max_steps']}" if facts["max_steps"] else ""
    why = facts["error"] or facts["stopped"]
    error = f": {why}" if why else ""
    return f"{facts['state']}, {facts['steps']}{of} steps{error}"


def _facts(metrics: Sequence[MetricsRow], evals: Sequence[MetricsRow]) -> dict[str, str]:
    tokens = _total(metrics, "tokens/sampled")
    rollout = _total(metrics, "time/rollout_s")
    facts = {"Held-out accuracy": percent(evals[-1]["accuracy"])} if evals else {}
    return facts | {
        "Steps": f"{len(metrics):,}",
        "Time in steps": duration(_total(metrics, "time/step_s")),
        "Tokens sampled": f"{tokens / 1e6:.2f} M" if tokens >= 1e6 else f"{tokens:,.0f}",
        "Tokens/s, sampling": f"{tokens / rollout:,.0f}" if rollout else "-",
        "Skipped updates": f"{_total(metrics, 'update/skipped'):.0f}",
        "Failed rewards": f"{_total(metrics, 'reward/failed'):.0f}",
    }


def _charts(metrics: Sequence[MetricsRow], evals: Sequence[MetricsRow]) -> list[tuple[str, str, str, Sequence[str]]]:
    """Return the charts as (title, caption, drawing, names of the layers); a drawing is "" without data."""
    # All charts have one x axis, so that a jump can be followed from chart to chart.
    step_range = span([0.0, *(float(row["step"]) for row in (*metrics, *evals))])
    curves: list[tuple[str, str, str, Sequence[str]]] = []
    for key, metric in _drawn(metrics):
        points = [(float(row["step"]), float(row[key])) for row in metrics if key in row]
        title = f"{metric.title}, {key.partition('/')[2]}" if metric.name == _REWARD_PART else metric.title or key
        unit = "" if metric.unit in ("", "share") or metric.unit in metric.meaning else f", in {metric.unit}"
        caption = f"{metric.meaning}{unit}. {metric.reading}".removesuffix(". ").replace("`", "")
        curves.append((title, caption, line_chart(points, percent=metric.unit == "share", x=step_range), ()))
    # If sampling overlaps the update, the step contains only the time that the loop waited for it.
    hidden = {"time/overlap_s", "time/rollout_s"} if any("time/wait_s" in row for row in metrics) else set[str]()
    times = {key for row in metrics for key in row if key.startswith("time/") and key.endswith("_s")}
    phases = sorted(times - _STEP_TIMES - hidden, key=lambda key: -_total(metrics, key))
    layers = {key[len("time/") : -len("_s")]: [float(row.get(key, 0.0)) for row in metrics] for key in phases}
    stacked = stacked_chart([float(row["step"]) for row in metrics], layers, step_range)
    return [
        *_held_out(evals, step_range),
        *curves,
        ("Seconds per step", "by phase, without evaluation", stacked, tuple(layers)),
    ]


def _drawn(metrics: Sequence[MetricsRow]) -> list[tuple[str, Metric]]:
    """Return (name, metric) of the curves: the metrics to watch first, those that vary, and those of components."""
    values = _values(metrics)
    rows = {key: find_metric(key) or Metric(key, "reported by a component") for key in values}
    # A single part is the reward itself, which has a chart.
    several_parts = sum(metric.name == _REWARD_PART for metric in rows.values()) > 1

    def is_drawn(key: str, metric: Metric) -> bool:
        if metric.name == _REWARD_PART:
            return several_parts
        return metric.first or metric.group == "components" or bool(metric.title and len({*values[key]}) > 1)

    # The registry keeps related metrics together, and so do the curves.
    places = {name: index for index, name in enumerate(registry())}
    last = len(places)  # metrics of plug-ins
    drawn = [(key, metric) for key, metric in rows.items() if is_drawn(key, metric)]
    return sorted(drawn, key=lambda curve: (not curve[1].first, places.get(curve[1].name, last), curve[0]))


def _ranges(metrics: Sequence[MetricsRow]) -> Table:
    """Return a table of all metrics of the run: the first and last value, and the smallest and largest one."""
    return Table.of(
        [
            {
                "metric": key,
                "first": f"{values_of_key[0]:.6g}",
                "last": f"{values_of_key[-1]:.6g}",
                "least": f"{min(values_of_key):.6g}",
                "most": f"{max(values_of_key):.6g}",
                "steps": f"{len(values_of_key):,}",
                "meaning": (find_metric(key) or Metric(key, "")).meaning.replace("`", ""),
            }
            for key, values_of_key in sorted(_values(metrics).items())
        ]
    )


def _held_out(
    evals: Sequence[MetricsRow], step_range: tuple[float, float]
) -> Iterator[tuple[str, str, str, Sequence[str]]]:
    """Yield the charts of held-out accuracy, for the run's own problems and for each set, as in `_charts`."""
    for label in ("", *_labels(evals)):
        key, low, high, best = (f"{label}{name}" for name in ("accuracy", "ci_low", "ci_high", "greedy_accuracy"))
        rows = [(row["step"], row[key], row.get(low, row[key]), row.get(high, row[key])) for row in evals if key in row]
        greedy = [(float(row["step"]), row[best]) for row in evals if best in row]
        caption = "sampled, with its 95% interval" + ("; dashed: greedy" if greedy else "")
        yield "Held-out accuracy" + (label and f", {label[:-1]}"), caption, share_chart(rows, step_range, greedy), ()


def _evaluations(evals: Sequence[MetricsRow]) -> Table:
    """Return a table with a row for each evaluation, followed by a row for each of its sets.

    The sets are those of `[[eval.sets]]`, or the environments or tasks of a mixture.
    """
    labels = _labels(evals)
    # pass@1 is the accuracy, which has a column.
    ks = {int(k) for row in evals for key in row if (k := key.partition("pass@")[2])} - {1}
    shares = ["greedy_accuracy", *(f"pass@{k}" for k in sorted(ks))]
    shares = [key for key in shares if any(f"{label}{key}" in row for row in evals for label in ("", *labels))]
    return Table.of(
        [
            {
                "step": str(row["step"]),
                **({"set": label[:-1]} if labels else {}),
                "accuracy": percent(row.get(f"{label}accuracy")),
                "95% interval": f"{percent(row.get(f'{label}ci_low'))} to {percent(row.get(f'{label}ci_high'))}",
                **{key.replace("_", " "): percent(row.get(f"{label}{key}")) for key in shares},
                "tokens": f"{row.get(f'{label}avg_tokens', math.nan):.1f}",
                "truncated": percent(row.get(f"{label}truncated")),
            }
            for row in evals
            for label in ("", *labels)
        ]
    )


def _labels(evals: Sequence[MetricsRow]) -> list[str]:
    """Return the prefix of the metrics of each set of held-out problems, such as "aime/"."""
    return [*dict.fromkeys(key.removesuffix("accuracy") for row in evals for key in row if key.endswith("/accuracy"))]


def _samples(run: Path, weights: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the data of completions of one group of the first and of the last stored step."""
    files = sorted(run.glob("rollouts/step-*.jsonl.gz"))
    chosen = files if len(files) < 2 else [files[0], files[-1]]
    steps: list[dict[str, Any]] = []
    for title, file in zip(("Early", "Late"), chosen, strict=False):
        stored = read_rows(file)
        rows = [stored[i] for i in samples.best_and_worst(stored)]
        completions = [samples.completion(row, weights) for row in rows]
        scale = samples.largest_advantage(rows)
        steps.append({"title": title, "step": samples.step_of(file), "scale": scale, "rows": completions})
    return steps


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _values(metrics: Sequence[MetricsRow]) -> dict[str, list[float]]:
    """Return the values of each metric, in the order of the steps."""
    values: dict[str, list[float]] = {}
    for row in metrics:
        # Only "step" has no slash in its name.
        for key in (key for key in row if "/" in key):
            values.setdefault(key, []).append(float(row[key]))
    return values


def _total(rows: Sequence[MetricsRow], key: str) -> float:
    return sum(float(row.get(key, 0.0)) for row in rows)
