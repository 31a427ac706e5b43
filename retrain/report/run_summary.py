"""Summary of a run from its files: status, result in a sentence, and its main settings in a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retrain.errors import ConfigError
from retrain.functional.evaluation import change_interval
from retrain.report.page import percent, plural
from retrain.storage.run_files import read_rows, understood
from retrain.system.lock import Lock
from retrain.system.records import read_json

MetricsRow = Mapping[str, Any]
_FINDING = ("name", "step", "text", "page")
"""Keys of a finding in status.json."""


def status(run: Path) -> dict[str, Any]:
    """Read the progress of a run from its files.

    Returns:
        path, state ("running", "killed", or the outcome), steps, max_steps, reward, accuracy with ci_low and ci_high
        after eval_step steps, eta_s while running, checkpoint (name of the newest), owner, error, stopped (the reason
        of an early end), findings, and looked_at (names of all findings). A value that is not known
        yet is None.

    Raises:
        ConfigError: there is no run at this path.
        StorageError: a file of the run cannot be read.
    """
    with understood(run):
        stored = read_json(run / "status.json")
        metrics, evals = read_rows(run / "metrics.jsonl"), read_rows(run / "eval.jsonl")
        if not stored and not metrics:
            raise no_run(run)
        lock, state = Lock(run / "lock"), str(stored.get("outcome", "unknown"))
        # A killed process cannot write its end; the system releases its lock.
        if state == "running" and not lock.held():
            state = "killed"
        steps = len(metrics)
        total = read_json(run / "config.resolved.json").get("training", {}).get("max_steps")
        # Completions grow or shrink in training, so that early steps mislead about those to come.
        recent = [row["time/step_s"] for row in metrics[-20:] if "time/step_s" in row]
        eta = sum(recent) / len(recent) * (total - steps) if state == "running" and total and recent else None
        evaluation = evals[-1] if evals else {}
        checkpoints = sorted(path.name for path in run.glob("checkpoints/step-*"))
        return {
            "path": str(run),
            "state": state,
            "steps": steps,
            "max_steps": total,
            "reward": metrics[-1].get("reward/mean") if metrics else None,
            "accuracy": evaluation.get("accuracy"),
            "ci_low": evaluation.get("ci_low"),
            "ci_high": evaluation.get("ci_high"),
            "eval_step": evaluation.get("step"),
            "eta_s": eta,
            "checkpoint": checkpoints[-1] if checkpoints else None,
            "owner": lock.owner(),
            "error": stored.get("error"),
            "stopped": stored.get("stopped"),
            "findings": [{key: finding[key] for key in _FINDING} for finding in stored.get("findings", ())],
            "looked_at": stored.get("looked_at", []),
        }


def no_run(path: Path) -> ConfigError:
    """Return the error for a path without a run."""
    return ConfigError.at(path, "run directory", "contains no run", "give the path of a run: runs/NAME")


def summary(metrics: Sequence[MetricsRow], evals: Sequence[MetricsRow]) -> str:
    """Return sentences about the result, from the first to the last evaluation."""
    if not evals:
        return f"{plural(len(metrics), 'step')}; no evaluation yet."
    first, last = evals[0], evals[-1]
    interval = f"{percent(last['accuracy'])} (95% interval {percent(last['ci_low'])} to {percent(last['ci_high'])})"
    if len(evals) == 1:
        return f"Held-out accuracy is {interval} on {last['problems']} problems after {last['step']} steps."
    points, low, high = change(evals)
    moved = f"from {percent(first['accuracy'])} to {percent(last['accuracy'])}"
    start = f"Held-out accuracy {'rose' if low > 0 else 'fell'} {moved}"
    # Without this a difference of noise would be reported as a rise or a fall.
    if low <= 0 <= high:
        start = f"No significant change of held-out accuracy, {moved}"
    greedy = ""
    if "greedy_accuracy" in first and "greedy_accuracy" in last:
        greedy = f" Greedy: from {percent(first['greedy_accuracy'])} to {percent(last['greedy_accuracy'])}."
    return (
        f"{start} ({100 * points:+.1f} points, 95% interval {100 * low:+.1f} to {100 * high:+.1f}), "
        f"on {last['problems']} problems in {last['step'] - first['step']} steps.{greedy}"
    )


def change(evals: Sequence[MetricsRow]) -> tuple[float, float, float]:
    """Return the change of held-out accuracy from the first to the last evaluation, with its 95% interval."""
    first, last = ((row["accuracy"], row["ci_low"], row["ci_high"]) for row in (evals[0], evals[-1]))
    return change_interval(first, last)


def task_of(config: Mapping[str, Any]) -> str:
    """Return the name of the task, or the names of the tasks of a mixture; "" if the configuration has none."""
    several = [entry["task"] for entry in config.get("environments", ())]
    several += [entry["name"] for entry in config.get("tasks", ())]
    return ", ".join(dict.fromkeys(several)) or config.get("task", {}).get("name", "")


def recipe(config: Mapping[str, Any]) -> str:
    """Return model, task, credit, batch sizes and seed in one line, without those that the configuration lacks."""
    algorithm, training = config.get("algorithm", {}), config.get("training", {})
    mode = algorithm.get("transform_mode", "none")
    transforms = [mode] if isinstance(mode, str) else list(mode)
    source = algorithm.get("algorithm_mode") or algorithm.get("advantage_mode")
    credit = [source, *(name for name in transforms if name != "none")]
    sizes = [training.get(key) for key in ("batch_size", "group_size", "max_tokens")]
    parts = [
        " on ".join(filter(None, (config.get("model", {}).get("path"), task_of(config)))),
        " + ".join(filter(None, credit)),
        "{} prompts x {} completions x at most {} tokens per step".format(*sizes) if all(sizes) else "",
        f"seed {training['seed']}" if "seed" in training else "",
    ]
    return "; ".join(filter(None, parts))
