"""Credit per token of every condition, computed on the same stored completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrain.campaign.verdict.results import Cell, Results
from retrain.errors import ConfigError, RetrainError, StorageError
from retrain.registry import components, signal
from retrain.report.samples import best_and_worst, step_of
from retrain.storage.run_files import read_rows
from retrain.types import Rollout

MapRow = Mapping[str, Any]


@dataclass(frozen=True)
class CreditMap:
    """Advantages of every condition on the same completions.

    Attributes:
        condition, seed, step: the run and step that sampled them.
        rows: the completions shown, as stored.
        advantages: per condition, one list per completion.
        skipped: reason for each condition whose credit cannot be computed from stored files.
    """

    condition: str
    seed: int
    step: int
    rows: tuple[MapRow, ...]
    advantages: Mapping[str, list[list[float]]]
    skipped: Mapping[str, str]


def credit_map(results: Results) -> CreditMap | None:
    """Compute every condition's credit on the baseline's last stored step that has a group with different rewards.

    The whole step is credited, because some transforms use statistics of the batch; one group is shown. Returns None
    if no such rollouts were stored.
    """
    # The baseline first, because its completions are the natural ground for all others.
    for label in (results.baseline, *results.conditions):
        for cell in results.done(label).values():
            if (stored := _stored(cell.path)) is not None:
                return _credited(results, cell, *stored)
    return None


def _stored(run: Path) -> tuple[int, Sequence[MapRow], list[int]] | None:
    """Return the last stored step with a group of different rewards; None if there is none.

    Returns:
        (step, scored rollouts, indices of those to show).
    """
    for file in sorted(run.glob("rollouts/step-*.jsonl.gz"), reverse=True):
        try:
            # Credit is undefined for a completion that could not be scored or has no token.
            rows = [row for row in read_rows(file) if row["reward"] is not None and row.get("tokens")]
        # A damaged or older file is no reason to lose the report: an earlier step may do.
        except (StorageError, LookupError, TypeError, ValueError):
            continue
        shown = best_and_worst(rows)
        if len({rows[i]["reward"] for i in shown}) > 1:
            return step_of(file), rows, shown
    return None


def _credited(results: Results, source: Cell, step: int, rows: Sequence[MapRow], shown: list[int]) -> CreditMap:
    advantages, skipped = dict[str, list[list[float]]](), dict[str, str]()
    for label in results.conditions:
        # Any run of the condition has its settings; a finished one with the same seed is the closest.
        cells = sorted(results.started(label), key=lambda cell: (not cell.done, cell.seed != source.seed))
        if not cells:
            skipped[label] = "its runs have not started"
            continue
        try:
            credit = _advantages(cells[0].path, step, rows)
        except RetrainError as error:
            skipped[label] = "its configuration no longer loads" if isinstance(error, ConfigError) else str(error)
        except (
            Exception
        ) as error:  # a plug-in may raise any exception, and the rest of the report does not depend on it
            skipped[label] = f"{type(error).__name__}: {error}"
        else:
            advantages[label] = [credit[i] for i in shown]
    return CreditMap(source.condition, source.seed, step, tuple(rows[i] for i in shown), advantages, skipped)


def _advantages(run: Path, step: int, rows: Sequence[MapRow]) -> list[list[float]]:
    """Compute advantages per token of stored rollouts with the run's pipeline.

    Signals with the trait `stored` are read from the run's files, because they need a tokenizer or the run's history.

    Raises:
        RetrainError: the pipeline reads a column that only the model can compute.
    """
    from retrain.algorithms.graph.responses import padded
    from retrain.config.loaded_config import reward_columns
    from retrain.run.reopen import stored
    from retrain.training.layout import Layout

    loaded = stored(run, (), final=False)
    # Recomputed they would need a tokenizer or the run's history; the run stored them as it trained.
    kept = {part.name: kind for part in components("signal") if (kind := signal.traits_of(part).stored)}
    pipeline = loaded.pipeline_of(given=frozenset(kept))
    if pipeline.policy_columns:
        raise RetrainError(f"it reads {', '.join(sorted(pipeline.policy_columns))}, which only the model can compute")
    pipeline.build(loaded.resources | {"run_dir": run})
    metrics = next((row for row in read_rows(run / "metrics.jsonl") if row["step"] == step), {})
    config = loaded.config
    parts = tuple(reward_columns(loaded.all("reward")))
    layout = Layout(0, "cpu", config.training.max_tokens, config.rollout.mask_truncated, parts)
    # No credit reads prompts, so the batch contains only completions, whose first token has column 0.
    batch = layout.batch([replace(Rollout.of_row(row), prompt_ids=()) for row in rows], step)
    for column, name in kept.items():
        if "/" in name:  # a metric
            value: Any = float(metrics.get(name, 0.0))
        else:
            value = padded([row.get(name) or [] for row in rows], batch.response_mask, batch.response_mask.dtype)
        batch = batch.replace(**{column: value})
    batch, _ = pipeline.credit(batch)
    return [batch.advantages[i, : len(row["tokens"])].tolist() for i, row in enumerate(rows)]
