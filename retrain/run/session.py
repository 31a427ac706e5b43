"""One run from configuration to saved model: what `retrain train` does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.config.load import LoadedConfig
from retrain.run.build import build
from retrain.run.environment import environment
from retrain.run.loop import train
from retrain.run.parts import Parts
from retrain.run.rundir import Mode, RunDirectory, config_changes, read_json, read_rows
from retrain.run.signals import Stop
from retrain.training.card import write_card
from retrain.training.models import save_model
from retrain.types import Observer, State


@dataclass(frozen=True)
class Resume:
    """What to do about an earlier run of the same name.

    Attributes:
        mode: refuse it, continue it, continue it if it exists, or delete it.
        path: a checkpoint to go on from, instead of the newest valid one.
        allow_change: dotted keys whose values may differ from the earlier run's.
    """

    mode: Mode = "new"
    path: Path | None = None
    allow_change: Sequence[str] = ()


def run(loaded: LoadedConfig, resume: Resume, observe: Observer) -> Path:
    """Train from a configuration; returns the run directory.

    Raises:
        RetrainError: each way a run can end but well, with its exit code.
    """
    began = time.perf_counter()
    config = loaded.config
    resolved = resolved_config(loaded)
    path = Path(config.logging.dir) / (config.logging.name or Path(loaded.file).stem)
    with RunDirectory(path, resume.mode, config.checkpoint, observe) as directory, Stop() as stop:
        changes: list[str] = []
        if directory.resuming:
            changes = config_changes(directory.stored_config(), resolved, resume.allow_change)
        for change in changes:
            observe("message", {"text": f"resuming with {change}", "level": "warning"})
        state = directory.restore(resume.path)
        directory.write_config(Path(loaded.file).read_text(), resolved, environment())
        parts = build(loaded, directory, observe)
        try:
            start, cursor = _restore(parts, state)
            train(parts, stop, start, cursor)
            finish(parts, time.perf_counter() - began)
        finally:
            parts.close()
    return path


def resolved_config(loaded: LoadedConfig) -> dict[str, Any]:
    """Every section with its defaults, and the components' tables as they were written."""
    return loaded.config.model_dump(mode="json") | dict(loaded.tables)


def _restore(parts: Parts, state: State | None) -> tuple[int, int]:
    if state is None:
        return 0, 0
    start, cursor = parts.load_state_dict(state)
    parts.observe("message", {"text": f"resumed after step {start}", "level": "info"})
    return start, cursor


def finish(parts: Parts, seconds: float) -> None:
    """Save the model in transformers format with its card, and say in words what came of the run."""
    folder = parts.directory.path / "model"
    save_model(folder, parts.policy.model, parts.loaded.tokenizer, parts.policy.weights())
    if parts.policy.adapter is not None:
        parts.policy.save_adapter(parts.directory.path / "adapter")
    write_card(folder, parts.directory.stored_config(), read_rows(parts.directory.path / "eval.jsonl"))
    parts.observe("done", {"text": summary(parts, seconds)})


def summary(parts: Parts, seconds: float) -> str:
    """The result in one sentence."""
    rows = read_rows(parts.directory.path / "eval.jsonl")
    steps, where = parts.config.training.max_steps, f"The model is in {parts.directory.path / 'model'}."
    if not rows:
        return f"Done: {steps} steps in {seconds / 60:.1f} minutes. {where}"
    first, last = rows[0], rows[-1]
    if len(rows) == 1:
        return f"Done: held-out accuracy is {_percent(last)}. {where}"
    change = last["accuracy"] - first["accuracy"]
    verb = "rose" if change > 0 else "fell" if change < 0 else "stayed"
    return (
        f"Done: held-out accuracy {verb} from {first['accuracy']:.1%} to {_percent(last)} "
        f"on {last['problems']} problems in {steps} steps and {seconds / 60:.1f} minutes. {where}"
    )


def _percent(row: dict[str, Any]) -> str:
    return f"{row['accuracy']:.1%} (95 % interval {row['ci_low']:.1%} to {row['ci_high']:.1%})"
