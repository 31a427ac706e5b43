"""Collect a batch: sample rounds of groups, filter and resample them, add rows of sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from retrain.errors import ComponentError
from retrain.functional.seeds import derive_seed
from retrain.run.collectors.rollout_metrics import added, rollout_metrics, solved
from retrain.run.collectors.rollouts import sampled, valid_rows
from retrain.run.run_context import RunContext
from retrain.training.chat import RenderedPrompt
from retrain.types import Batch, ExpertRow, Metrics, Rollout, State

if TYPE_CHECKING:
    from retrain.training.layout import Layout


@dataclass(frozen=True)
class Collection:
    """The rollouts of one step.

    Attributes:
        step: number of the step that trains on them, from 0.
        rollouts: all sampled rollouts, including those whose scoring failed.
        experts: expert rows that the step also trains on.
        batch: the rows to train on: rollouts of the step, then `stored` ones, then expert rows. None
            if there are no rows.
        kept: indices into `rollouts`, one for each row of the batch that was sampled for the step.
        cursor: index of the task's next unused problem.
        metrics: rollout and reward statistics.
        dropped_metrics: the filter's metrics about the groups that it dropped.
        stored: rollouts provided by a source, which the step also trains on.
    """

    step: int
    rollouts: list[Rollout]
    experts: list[ExpertRow]
    batch: Batch | None
    kept: list[int]
    cursor: int
    metrics: Metrics
    dropped_metrics: Metrics
    stored: list[Rollout] = field(default_factory=list[Rollout])

    def state_dict(self) -> State:
        """Return the state for a checkpoint, without the batch, which `restored` builds again."""
        plain: State = {name: value for name, value in vars(self).items() if name != "batch"}
        brought = {"stored": [r.row() for r in self.stored], "experts": [asdict(row) for row in self.experts]}
        return plain | {"rollouts": [r.row() for r in self.rollouts]} | brought

    @classmethod
    def restored(cls, layout: Layout, state: Mapping[str, Any]) -> Collection:
        """Return the collection of a `state_dict`, with its batch."""
        rollouts = [Rollout.of_row(row) for row in state["rollouts"]]
        experts = [ExpertRow(**row) for row in state["experts"]]
        stored = [Rollout.of_row(row) for row in state.get("stored", ())]
        train = [rollouts[index] for index in state["kept"]] + stored
        batch = layout.batch(train, state["step"], experts) if train or experts else None
        fields: State = {**state, "rollouts": rollouts, "stored": stored, "experts": experts, "batch": batch}
        if "dropped" in fields:  # the name in checkpoints of 0.3
            fields["dropped_metrics"] = fields.pop("dropped")
        return cls(**fields)


Sample = Callable[[int, int, int, int], tuple[list[Rollout], dict[int, RenderedPrompt], int]]
"""(cursor, prompts, seed, first) -> what `sampled` returns."""


def collect(context: RunContext, step: int, cursor: int, sample: Sample | None = None) -> Collection:
    """Sample and score the rollouts of one step.

    With `[rollout] overlap` this runs while the trainer updates, so it reads nothing that an update
    changes.

    - A filter that reads no credit drops groups here; any other filter only counts them, after the
      step's credit: groups without an advantage have no gradient.
    - With `[rollout] resample`, new prompts replace the groups that any filter drops, in at most
      `max_resample` further rounds. If groups are still missing, the step trains on fewer. A filter
      that reads credit then judges a round by the round's own credit. The batch has none yet: the
      step assigns it to all kept rows at once.

    Args:
        step: number of the step that trains on the rollouts, from 0.
        cursor: index of the task's next unused problem.
        sample: gives the scored groups of a round; None: `sampled`.
    Raises:
        ComponentError: credit assignment reads greedy completions, which a served program does not provide.
    """
    settings = context.config.rollout
    sample = sample or partial(sampled, context)
    rounds: list[_Round] = []
    missing = context.prompts
    first_group = 0
    if context.episode_source is not None:
        if "greedy_rewards" in context.trained.pipeline.reads:
            problem = "credit assignment needs greedy completions, and a served program samples none"
            raise ComponentError(problem, 'use another [algorithm] advantage_mode, such as "grpo"')
        # The program decides how many episodes a step has.
        missing = 0
        rounds = [_filtered(context, step, _Round(context.episode_source.rollouts(), cursor))]
    # `<=`: the first round resamples nothing.
    while missing and len(rounds) <= (settings.max_resample if settings.resamples else 0):
        seed = derive_seed(context.config.training.seed, "sampling", step, len(rounds))
        after = rounds[-1].cursor if rounds else cursor
        rollouts, problems, next_cursor = sample(after, missing, seed, first_group)
        too_long = next_cursor - after - missing  # without a prompt that is too long, the cursor moves by `missing`
        rounds.append(_filtered(context, step, _Round(rollouts, next_cursor, too_long, problems)))
        # Groups are counted, because failures make some of them smaller.
        missing -= len({rollout.group for rollout in rounds[-1].kept})
        first_group += len({rollout.group for rollout in rollouts})
    rollouts = [rollout for part in rounds for rollout in part.rollouts]
    stored, experts, reported = _with_sources(context, step, rounds, rollouts) if context.row_sources else ([], [], {})
    kept = [rollout for part in rounds for rollout in part.kept]
    metrics = rollout_metrics(rollouts) | {"rollout/too_long": float(sum(part.too_long for part in rounds))}
    metrics |= context.sampler.metrics()
    if context.env_pool is not None:
        metrics |= context.ranks.rollouts.on_rank0(context.env_pool.metrics)
    metrics["rollout/staleness"] = step - sum(rollout.weights_version for rollout in rollouts) / len(rollouts)
    # Not between rounds: the problems of a step depend on earlier steps only.
    metrics |= reported | context.task.learn(solved(rollouts))
    batch = None
    if kept or experts:
        problems = {group: rendered for part in rounds for group, rendered in part.problems.items()}
        batch = context.layout.batch(kept, step, experts).replace(problems=problems)
    # By identity, because two rollouts of a group may be equal.
    trained = {id(rollout) for rollout in kept}
    return Collection(
        step=step,
        rollouts=rollouts,
        experts=experts,
        batch=batch,
        kept=[index for index, rollout in enumerate(rollouts) if id(rollout) in trained],
        cursor=rounds[-1].cursor,
        metrics=metrics,
        dropped_metrics=added(part.dropped_metrics for part in rounds),
        stored=stored,
    )


def _with_sources(
    context: RunContext, step: int, rounds: list[_Round], rollouts: Sequence[Rollout]
) -> tuple[list[Rollout], list[ExpertRow], Metrics]:
    """Apply the sources to the rounds of a step.

    The filter drops groups of stored rollouts as well. Their round is appended to `rounds`.

    Returns:
        The stored rollouts and the expert rows that sources added, and their metrics.
    """
    from retrain.run.collectors.row_sources import rows_of_sources

    added_rows = rows_of_sources(context, step, rollouts)
    for part in rounds:
        part.kept = [rollout for rollout in part.kept if rollout.group not in added_rows.left_out]
    stored: list[Rollout] = []
    if added_rows.stored:
        # This round draws no problem, so the cursor stays.
        rounds.append(_filtered(context, step, _Round(added_rows.stored, rounds[-1].cursor)))
        stored = rounds[-1].kept
    return stored, added_rows.experts, added_rows.metrics


@dataclass
class _Round:
    """One round of sampling.

    Attributes:
        rollouts: all rollouts of the round.
        cursor: index of the task's next unused problem.
        too_long: number of problems skipped because their prompts are too long.
        problems: rendered problem of each group, by the group's number.
        kept: the rollouts to train on.
        dropped_metrics: the filter's metrics about the groups that it dropped.
    """

    rollouts: list[Rollout]
    cursor: int
    too_long: int = 0
    problems: Mapping[int, RenderedPrompt] = field(default_factory=dict[int, RenderedPrompt])
    dropped_metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        self.kept = valid_rows(self.rollouts)


def _filtered(context: RunContext, step: int, part: _Round) -> _Round:
    """Drop the filter's groups from a round, and return the round.

    Nothing is dropped if the filter reads credit and `[rollout] resample` is off. With `resample` such
    a filter gets the round's own credit, from the state that components have after the last step.
    """
    trained = context.trained
    if part.kept and (context.config.rollout.resamples or trained.pipeline.judges_rollouts):
        batch = context.layout.batch(part.kept, step).replace(problems=part.problems)
        if trained.pipeline.judges_rollouts:
            keep, part.dropped_metrics = trained.pipeline.informative(batch)
        else:
            credited = trained.credit(batch)
            keep, part.dropped_metrics = credited.keep, credited.dropped_metrics
        part.kept = [rollout for rollout, passes in zip(part.kept, keep.tolist(), strict=True) if passes]
    return part
