"""The rows that sources add to a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from retrain.protocols import RowSource
from retrain.registry import source as source_kind
from retrain.registry.call import Call, shown
from retrain.run.run_context import RunContext
from retrain.system.model_paths import positions
from retrain.types import ExpertRow, Metrics, Rollout


class AddedRows(NamedTuple):
    """Changes that sources make to the rows of a step.

    Attributes:
        left_out: numbers of the step's groups that are not trained on.
        stored: rollouts that sources added. The numbers of their groups follow those of the step.
        experts: expert rows that sources added.
        metrics: metrics of the sources.
    """

    left_out: set[int]
    stored: list[Rollout]
    experts: list[ExpertRow]
    metrics: Metrics


def rows_of_sources(context: RunContext, step: int, rollouts: Sequence[Rollout]) -> AddedRows:
    """Call each source's `take` in order, on rank 0, and return the rows to train on.

    Raises:
        UserCodeError: a source returns rows that cannot be trained on.
    """
    given, experts, metrics = list(rollouts), list[ExpertRow](), Metrics()
    for name, source in context.row_sources.items():
        index_of = {id(rollout): index for index, rollout in enumerate(given)}

        # Arguments with defaults, because the loop binds these names again.
        def take_rows(
            source: RowSource = source, given: list[Rollout] = given, index_of: dict[int, int] = index_of
        ) -> Any:
            taken = source.take(step, given)
            rows, reported = taken if isinstance(taken, tuple) else (taken, {})
            # An index stands for a rollout that every rank has; sending it whole would cost time.
            return [index_of.get(id(row), row) for row in rows], reported

        rows, reported = context.ranks.rollouts.on_rank0(take_rows)
        call = Call("source", name, f" in step {step}")
        check_source_rows(context, call, given, rows)
        # Numbers of a source's groups follow those of the step, whatever numbers it chose.
        first = max((rollout.group for rollout in given), default=-1) + 1
        numbers = dict[int, int]()
        kept = [given[row] for row in rows if isinstance(row, int)]
        for row in rows:
            if isinstance(row, Rollout):
                kept.append(replace(row, group=numbers.setdefault(row.group, first + len(numbers))))
        experts += [row for row in rows if isinstance(row, ExpertRow)]
        given, metrics = kept, metrics | reported
    sampled_ids = {id(rollout) for rollout in rollouts}
    stored = [rollout for rollout in given if id(rollout) not in sampled_ids]
    left_out = {rollout.group for rollout in rollouts} - {rollout.group for rollout in given}
    return AddedRows(left_out, stored, experts, metrics)


def check_source_rows(context: RunContext, call: Call, given: Sequence[Rollout], rows: Sequence[Any]) -> None:
    """Check that the run can train on the rows that a source returned.

    Args:
        given: the rollouts that the source received.
        rows: the returned rows; for a row of `given` its index.
    Raises:
        UserCodeError: a rollout is repeated, a group is incomplete or mixes prompts, a row does not
            fit the model, or the run has no loss term for such rows.
    """
    again = [row for row in rows if isinstance(row, int)]
    if len({*again}) < len(again):
        raise call.fail("take returned a rollout twice")
    # Credit compares the completions of a group, so that a part of one would change it.
    whole = Counter(rollout.group for rollout in given)
    for group, count in Counter(given[row].group for row in again).items():
        if count < whole[group]:
            raise call.fail(
                f"take returned {count} of the {whole[group]} rollouts of group {group}; return all or none"
            )
    brings = source_kind.traits_of(context.trained.plan.sources[call.name]).brings
    prompts = dict[int, tuple[int, ...]]()
    for row in rows:
        if not isinstance(row, int) and (wrong := _misfit(context, row, brings, prompts)):
            raise call.fail(f"take returned {shown(row)}: {wrong}")


def _misfit(
    context: RunContext, row: Rollout | ExpertRow, brings: Sequence[str], prompts: dict[int, tuple[int, ...]]
) -> str:
    """Return the reason why a run cannot train on a row that a source added, or "".

    Args:
        brings: kinds of rows that the source's decorator declares.
        prompts: prompt of each group so far, by its number; the row's own is added.
    """
    is_expert = isinstance(row, ExpertRow)
    ids = row.ids if is_expert else (*row.prompt_ids, *row.completion_ids)
    model = context.trained.loaded
    limit, words = positions(model.model), model.vocabulary
    if len(ids) > limit or max(ids) >= words:
        return f"it does not fit the model, which has {limit} positions and {words} token ids"
    if (kind := "expert" if is_expert else "rollouts") not in brings:
        return f'its decorator must declare "{kind}" in brings to add such rows'
    if is_expert:
        trained = "expert" in context.trained.objective.sources
        return "" if trained else 'no loss term trains on expert rows; add [[loss]] name = "sft"'
    if prompts.setdefault(row.group, row.prompt_ids) != row.prompt_ids:
        return f"group {row.group} has two prompts; give each prompt its own group"
    return ""
