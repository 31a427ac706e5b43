"""Collect a batch: sample, score, filter and resample groups, add rows of sources."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from retrain.errors import ComponentError, DataError
from retrain.functional.seeds import derive_seed
from retrain.protocols import Policy, RowSource, Task
from retrain.registry import source as source_kind
from retrain.registry.call import Call, shown
from retrain.run.episodes import EpisodeRunner
from retrain.run.run_context import EpisodeSource, RunContext
from retrain.system.model_paths import positions
from retrain.training.chat import Chat, RenderedPrompt
from retrain.types import Batch, ExpertRow, Metrics, Request, Rollout, Sampling, State

if TYPE_CHECKING:
    from retrain.algorithms.graph.pipeline import Pipeline
    from retrain.config.schema import Config
    from retrain.rewards.pool import RewardPool
    from retrain.training.layout import Layout
    from retrain.training.model.loading import Loaded

_MOST_TOO_LONG = 1000
"""The run ends if one step draws this many prompts that are too long."""
_ENDS = ("done", "turns", "tokens", "context", "error", "timeout")
"""Values of `Rollout.ended` that are counted in the metrics of episodes."""


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
        dropped: the filter's metrics about the groups that it dropped.
        credit: metrics of credit assignment if the filter needed advantages, which the batch then
            has already; otherwise None.
        stored: rollouts provided by a source, which the step also trains on.
    """

    step: int
    rollouts: list[Rollout]
    experts: list[ExpertRow]
    batch: Batch | None
    kept: list[int]
    cursor: int
    metrics: Metrics
    dropped: Metrics
    credit: Metrics | None = None
    stored: list[Rollout] = field(default_factory=list[Rollout])

    def state_dict(self) -> State:
        """Return the state for a checkpoint, without the batch, which `restored` builds again."""
        plain: State = {name: value for name, value in vars(self).items() if name not in ("batch", "credit")}
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
        return cls(**fields)


Sample = Callable[[int, int, int, int], tuple[list[Rollout], dict[int, RenderedPrompt], int]]
"""(cursor, prompts, seed, first) -> what `sampled` returns."""


def collect(context: RunContext, step: int, cursor: int, sample: Sample | None = None) -> Collection:
    """Sample and score the rollouts of one step.

    With `[rollout] overlap` this runs while the trainer updates, so it reads nothing that an update
    changes.

    - A filter that needs no advantages drops groups here; any other filter does so after credit.
    - With `[rollout] resample`, new prompts replace the dropped groups of any filter, in at most
      `max_resample` further rounds. If groups are still missing, the step trains on fewer.
    - If the filter needs advantages, each round computes them here, and the update reuses them.

    Args:
        step: number of the step that trains on the rollouts, from 0.
        cursor: index of the task's next unused problem.
        sample: gives the scored groups of a round; None: `sampled`.
    """
    rollout, sample = context.config.rollout, sample or partial(sampled, context)
    rounds: list[_Round] = []
    missing, first = context.prompts if context.source is None else 0, 0
    if context.source is not None:
        rollouts = _episodes_of(context.pipeline, context.source)
        rounds = [_filtered(context, step, _Round(rollouts, valid_rows(rollouts), cursor, 0))]
    while missing and len(rounds) <= (rollout.max_resample if rollout.resamples else 0):
        seed = derive_seed(context.config.training.seed, "sampling", step, len(rounds))
        after = rounds[-1].cursor if rounds else cursor
        rounds.append(_filtered(context, step, _Round.of(sample(after, missing, seed, first), after + missing)))
        missing -= len({one.group for one in rounds[-1].kept})
        first += len({one.group for one in rounds[-1].rollouts})
    rollouts = [one for part in rounds for one in part.rollouts]
    brought = _with_sources(context, step, rounds, rollouts)
    kept = [one for part in rounds for one in part.kept]
    metrics = rollout_metrics(rollouts) | {"rollout/too_long": float(sum(part.too_long for part in rounds))}
    metrics |= context.sampler.metrics()
    if context.env_pool is not None:
        metrics |= context.ranks.rollouts.on_rank0(context.env_pool.metrics)
    metrics["rollout/staleness"] = step - sum(one.weights_version for one in rollouts) / len(rollouts)
    # Not between rounds: the problems of a step depend on earlier steps only.
    metrics |= brought.metrics | context.task.learn(solved(rollouts))
    problems = {group: rendered for part in rounds for group, rendered in part.problems.items()}
    rows = bool(kept or brought.experts)
    batch = context.layout.batch(kept, step, brought.experts).replace(problems=problems) if rows else None
    train = {*map(id, kept)}
    credited = [part.batch for part in rounds if part.batch is not None and len(part.kept)]
    return Collection(
        step=step,
        rollouts=rollouts,
        experts=brought.experts,
        batch=batch.filled(credited) if batch and credited else batch,
        kept=[index for index, one in enumerate(rollouts) if id(one) in train],
        cursor=rounds[-1].cursor,
        metrics=metrics,
        dropped=added(part.dropped for part in rounds),
        credit=_weighted([(len(part.rollouts), part.credit) for part in rounds]) if credited else None,
        stored=brought.stored,
    )


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
        place = {id(one): index for index, one in enumerate(given)}

        def take_rows(source: RowSource = source, given: list[Rollout] = given, place: dict[int, int] = place) -> Any:
            found = source.take(step, given)
            rows, reported = found if isinstance(found, tuple) else (found, {})
            return [place.get(id(row), row) for row in rows], reported

        rows, reported = context.ranks.rollouts.on_rank0(take_rows)
        call = Call("source", name, f" in step {step}")
        check_source_rows(context, call, given, rows)
        first = max((one.group for one in given), default=-1) + 1
        numbers = dict[int, int]()
        kept = [given[row] for row in rows if isinstance(row, int)]
        for row in rows:
            if isinstance(row, Rollout):
                kept.append(replace(row, group=numbers.setdefault(row.group, first + len(numbers))))
        experts += [row for row in rows if isinstance(row, ExpertRow)]
        given, metrics = kept, metrics | reported
    own = {id(one) for one in rollouts}
    stored = [one for one in given if id(one) not in own]
    left_out = {one.group for one in rollouts} - {one.group for one in given}
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
    whole = Counter(one.group for one in given)
    for group, count in Counter(given[row].group for row in again).items():
        if count < whole[group]:
            raise call.fail(
                f"take returned {count} of the {whole[group]} rollouts of group {group}; return all or none"
            )
    brings = source_kind.traits_of(context.components.sources[call.name].component).brings
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
    limit, words = positions(context.loaded.model), context.loaded.vocabulary
    if len(ids) > limit or max(ids) >= words:
        return f"it does not fit the model, which has {limit} positions and {words} token ids"
    if (kind := "expert" if is_expert else "rollouts") not in brings:
        return f'its decorator must declare "{kind}" in brings to add such rows'
    if is_expert:
        trained = "expert" in context.objective.sources
        return "" if trained else 'no loss term trains on expert rows; add [[loss]] name = "sft"'
    if prompts.setdefault(row.group, row.prompt_ids) != row.prompt_ids:
        return f"group {row.group} has two prompts; give each prompt its own group"
    return ""


def _with_sources(context: RunContext, step: int, rounds: list[_Round], rollouts: Sequence[Rollout]) -> AddedRows:
    """Apply the sources to the rounds of a step.

    The filter drops groups of stored rollouts as well. Their round is appended to `rounds`.
    """
    found = rows_of_sources(context, step, rollouts)
    for part in rounds:
        _leave_out(part, found.left_out)
    if not found.stored:
        return found
    rounds.append(_filtered(context, step, _Round(found.stored, valid_rows(found.stored), rounds[-1].cursor, 0)))
    return found._replace(stored=rounds[-1].kept)


def _leave_out(found: _Round, left_out: set[int]) -> None:
    """Remove the groups that sources leave out from a round and from its batch."""
    if not left_out:
        return
    if found.batch is not None:
        kept = [row for row, one in enumerate(found.kept) if one.group not in left_out]
        found.batch = found.batch.rows(torch.tensor(kept, dtype=torch.long, device=found.batch.group_ids.device))
    found.kept = [one for one in found.kept if one.group not in left_out]


def _episodes_of(pipeline: Pipeline, source: EpisodeSource) -> list[Rollout]:
    """Return the episodes that the source provides for a step.

    Raises:
        ComponentError: credit assignment reads greedy completions, which a source does not provide.
    """
    if "greedy_rewards" in pipeline.reads:
        problem = "credit assignment needs greedy completions, and a served program samples none"
        raise ComponentError(problem, 'use another [algorithm] advantage_mode, such as "grpo"')
    return source.rollouts()


@dataclass
class _Round:
    """One round of sampling.

    Attributes:
        rollouts: all rollouts of the round.
        kept: the rollouts to train on.
        cursor: index of the task's next unused problem.
        too_long: number of problems skipped because their prompts are too long.
        problems: rendered problem of each group, by the group's number.
        dropped: the filter's metrics about the groups that it dropped.
        batch: the kept rollouts with advantages, if the filter needed them; otherwise None.
        credit: metrics of credit assignment, if the filter needed advantages.
    """

    rollouts: list[Rollout]
    kept: list[Rollout]
    cursor: int
    too_long: int
    problems: Mapping[int, RenderedPrompt] = field(default_factory=dict[int, RenderedPrompt])
    dropped: Metrics = field(default_factory=Metrics)
    batch: Batch | None = None
    credit: Metrics = field(default_factory=Metrics)

    @classmethod
    def of(cls, found: tuple[list[Rollout], dict[int, RenderedPrompt], int], least: int) -> _Round:
        """Return the round of what `sampled` found; `least` is the cursor if no prompt was too long."""
        rollouts, problems, cursor = found
        return cls(rollouts, valid_rows(rollouts), cursor, cursor - least, problems)


def _filtered(context: RunContext, step: int, found: _Round) -> _Round:
    """Drop the filter's groups from a round, and return the round.

    Nothing is dropped if the filter needs advantages and `[rollout] resample` is off: then the
    update computes them once and filters afterwards.
    """
    pipeline = context.pipeline
    if found.kept and (context.config.rollout.resamples or pipeline.judges_rollouts):
        batch = context.layout.batch(found.kept, step).replace(problems=found.problems)
        if not pipeline.judges_rollouts:
            batch, found.credit = assign_credit(pipeline, context.policy, batch)
        keep, found.dropped = pipeline.informative(batch)
        found.kept = [one for one, passes in zip(found.kept, keep.tolist(), strict=True) if passes]
        found.batch = None if pipeline.judges_rollouts else batch.rows(keep.nonzero()[:, 0])
    return found


def sampled(
    context: RunContext, cursor: int, prompts: int, seed: int, first: int = 0
) -> tuple[list[Rollout], dict[int, RenderedPrompt], int]:
    """Sample and score the groups of the next `prompts` problems.

    Args:
        cursor: index of the task's next unused problem.
        seed: of sampling.
        first: number of the first group.
    Returns:
        The scored rollouts, the rendered problem of each group by number, and the new cursor.
    """
    training = context.config.training
    rendered, after = next_problems(context, cursor, prompts)
    requests = requests_for(rendered, training.group_size, training.max_tokens)
    rollouts = roll(context, rendered, requests, train_sampling(context.config, context.loaded, seed), first)
    rollouts = score(context.chat, context.pool, rendered, rollouts, training.max_tokens)
    if "greedy_rewards" in context.pipeline.reads:
        rollouts = _against_greedy(context, rendered, rollouts, first)
    return rollouts, dict(enumerate(rendered, first)), after


def next_problems(context: RunContext, cursor: int, count: int) -> tuple[list[RenderedPrompt], int]:
    """Return the next problems whose prompts fit the run's limits, and the new cursor; see `draw`."""
    training = context.config.training
    left, most = positions(context.loaded.model) - training.max_tokens, training.max_prompt_tokens or float("inf")
    limit = "[training] max_prompt_tokens allows" if most <= left else "max_tokens leaves of the model's positions"
    return draw(context.task, context.chat, min(left, most), cursor, count, limit)


def _against_greedy(
    context: RunContext, rendered: Sequence[RenderedPrompt], rollouts: list[Rollout], first: int
) -> list[Rollout]:
    """Sample a greedy completion of every prompt, and return the rollouts with its reward."""
    most = context.config.training.max_tokens
    sampling = greedy_sampling(context)
    answers = roll(context, rendered, requests_for(rendered, 1, most), sampling, first)
    return with_greedy(rollouts, score(context.chat, context.pool, rendered, answers, most))


def with_greedy(rollouts: Sequence[Rollout], greedy: Sequence[Rollout]) -> list[Rollout]:
    """Return the rollouts with the reward of their group's greedy completion, or without a reward if it has none."""
    found = {one.group: one for one in greedy}
    return [
        replace(one, greedy=best.reward) if best.reward is not None else replace(one, reward=None, status=best.status)
        for one in rollouts
        for best in (found[one.group],)
    ]


def roll(
    context: RunContext,
    rendered: Sequence[RenderedPrompt],
    requests: Sequence[Request],
    sampling: Sampling,
    first: int = 0,
) -> list[Rollout]:
    """Sample one group for every problem: completions, or episodes if there is an environment.

    Every rank calls this and gets the same rollouts. Only rank 0 has environment processes.

    Args:
        first: number of the first group.
    """
    sampler, chat, pool = context.sampler, context.chat, context.env_pool
    if pool is None:
        return EpisodeRunner(sampler, chat, sampling).roll(rendered, requests, first)
    return sampler.run_on_rank0(lambda one: EpisodeRunner(one, chat, sampling, pool).roll(rendered, requests, first))


def assign_credit(pipeline: Pipeline, policy: Policy, batch: Batch) -> tuple[Batch, Metrics]:
    """Assign credit: return the batch with its advantages and signals, and their metrics.

    If a signal reads log-probs or entropies of the policy, a forward pass computes them first.
    """
    if columns := sorted(pipeline.policy_columns):
        batch = batch.replace(**policy.logprobs(batch, columns))
    metrics = pipeline.before(batch)
    batch, reported = pipeline.credit(batch)
    return batch, metrics | reported


def added(counts: Iterable[Metrics]) -> Metrics:
    """Add up metrics by name."""
    total: Metrics = {}
    for part in counts:
        total |= {name: total.get(name, 0.0) + value for name, value in part.items()}
    return total


def _weighted(reports: Sequence[tuple[int, Metrics]]) -> Metrics:
    """Return the mean of each metric over the rounds that report it, weighted by their rollouts.

    Args:
        reports: (number of rollouts, metrics) of each round.
    """
    names = dict.fromkeys(name for _, report in reports for name in report)
    rows = {name: sum(count for count, report in reports if name in report) for name in names}
    return {name: sum(n * r[name] for n, r in reports if name in r) / rows[name] for name in names}


def draw(
    task: Task, chat: Chat, most_tokens: float, cursor: int, count: int, limit: str
) -> tuple[list[RenderedPrompt], int]:
    """Return the next `count` rendered problems whose prompts have at most `most_tokens` tokens.

    Longer prompts are skipped, because a single one must not end a run of many hours.

    Args:
        cursor: index of the task's next unused problem.
        limit: origin of `most_tokens`, for the error message: completes "longer than the tokens that ...".
    Returns:
        The problems, and the new cursor.
    Raises:
        DataError: 1000 prompts in one step are too long.
    """
    found, too_long = list[RenderedPrompt](), list[int]()
    while len(found) < count:
        if len(too_long) >= _MOST_TOO_LONG:
            raise DataError(
                f"{_MOST_TOO_LONG} prompts in one step are longer than the {most_tokens:g} tokens that {limit}: they "
                f"have {min(too_long)} to {max(too_long)} tokens; change the limit, or the data"
            )
        problem = task.problem(cursor)
        prompt = chat.prompt(problem.prompt)
        cursor += 1
        if len(prompt.ids) <= most_tokens:
            found.append((problem, prompt))
        else:
            too_long.append(len(prompt.ids))
    return found, cursor


def greedy_sampling(context: RunContext) -> Sampling:
    """Return the sampling settings of the greedy completions that credit compares with."""
    return replace(train_sampling(context.config, context.loaded, 0), temperature=0.0)


def train_sampling(config: Config, loaded: Loaded, seed: int) -> Sampling:
    """Return the sampling settings of training.

    The trainer computes log-probs at the same temperature. The configuration refuses a truncation by
    top_p or top_k, because the trainer would not apply it.
    """
    rollout = config.rollout
    return Sampling(
        config.training.temperature, rollout.top_p, rollout.top_k, loaded.stop_ids, seed, vocabulary=loaded.vocabulary
    )


def requests_for(rendered: Sequence[RenderedPrompt], count: int, max_tokens: int) -> list[Request]:
    """Return a request for `count` completions of each prompt.

    The random stream of a request is the index of its prompt.
    """
    return [Request(prompt.ids, count, max_tokens, stream) for stream, (_, prompt) in enumerate(rendered)]


def score(
    chat: Chat, pool: RewardPool, rendered: Sequence[RenderedPrompt], rollouts: Sequence[Rollout], max_tokens: int
) -> list[Rollout]:
    """Return the rollouts with reward, parts, correctness and status from `[[rewards]]`.

    Rollouts that an environment has rewarded, or that failed, stay as they are. Rewards get only the
    last turn of an episode with several turns.

    Args:
        rendered: the problems; the group with the smallest number belongs to the first.
    """
    first = min((rollout.group for rollout in rollouts), default=0)
    waiting = [index for index, rollout in enumerate(rollouts) if rollout.reward is None and rollout.status == "ok"]
    items: list[dict[str, Any]] = []
    for rollout in (rollouts[index] for index in waiting):
        problem, last = rendered[rollout.group - first][0], rollout.turns[-1]
        items.append(
            {
                "completion": chat.decode(rollout.completion_ids[last.start :]) if last.start else rollout.text,
                "answer": problem.answer,
                "prompt": rollout.prompt,
                "problem": problem.facts,
                "length": rollout.length,
                "max_tokens": max_tokens,
                "finish_reason": rollout.finish_reason,
                "completion_ids": rollout.completion_ids,
                "group": rollout.group,
            }
        )
    scored = list(rollouts)
    for index, s in zip(waiting, pool.score(items), strict=True):
        scored[index] = replace(rollouts[index], parts=dict(s.parts), correct=s.correct, status=s.status)
        if s.value is not None:
            scored[index] = scored[index].rewarded(s.value, s.parts, s.correct)
    return scored


def valid_rows(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the rollouts that have a reward, without groups that failures reduced to one rollout.

    A group sampled with one rollout is kept.
    """
    valid = [rollout for rollout in rollouts if rollout.reward is not None]
    sampled, scored = (Counter(rollout.group for rollout in some) for some in (rollouts, valid))
    return [rollout for rollout in valid if scored[rollout.group] >= min(2, sampled[rollout.group])]


def solved(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the share of correct completions of each problem, by its id.

    Completions without a reward do not count.
    """
    found: defaultdict[str, list[bool]] = defaultdict(list)
    for one in rollouts:
        if one.reward is not None:
            found[one.problem_id].append(bool(one.correct))
    return {name: sum(right) / len(right) for name, right in found.items()}


def rollout_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Return rollout and reward statistics of a step; means are over completions.

    Episodes add env/turns, env/cut_turns, env/ended_* and the means of the environment's own
    metrics. A mix of tasks or environments adds reward and accuracy of each, as task/LABEL/... or
    env/LABEL/...
    """
    scored = [r for r in rollouts if r.reward is not None]
    rewards = [float(r.reward) for r in scored if r.reward is not None]
    lengths = [r.length for r in rollouts]
    count = max(1, len(scored))
    mean = sum(rewards) / count
    metrics = {
        "reward/mean": mean,
        "reward/std": (sum((value - mean) ** 2 for value in rewards) / count) ** 0.5,
        "reward/accuracy": sum(bool(r.correct) for r in scored) / count,
        "reward/failed": float(len(rollouts) - len(scored)),
        "tokens/response": sum(lengths) / len(lengths),
        "tokens/sampled": float(sum(lengths)),
        "rollout/truncated": sum(r.truncated for r in rollouts) / len(rollouts),
        "rollout/completions": float(len(rollouts)),
    }
    texts: defaultdict[int, list[str]] = defaultdict(list)
    for one in rollouts:
        texts[one.group].append(one.text)
    if several := [Counter(found).most_common(1)[0][1] / len(found) for found in texts.values() if len(found) > 1]:
        metrics["rollout/identical"] = sum(several) / len(several)
    greedy = {one.group: one.greedy for one in rollouts if one.greedy is not None}
    metrics |= {"reward/greedy": sum(greedy.values()) / len(greedy)} if greedy else {}
    for name in sorted({name for r in scored for name in r.parts}):
        values = [part for r in scored if (part := r.parts.get(name)) is not None]
        if values:
            metrics[f"reward/{name}"] = sum(values) / len(values)
    played = [one for one in rollouts if one.ended]  # episodes of an environment or a harness
    metrics |= _episodes("env", played)
    for label in sorted({one.environment for one in rollouts} - {""}):
        episodes = [one for one in played if one.environment == label]
        area, own = f"{'env' if episodes else 'task'}/{label}", [one for one in scored if one.environment == label]
        metrics[f"{area}/reward"] = sum(float(one.reward or 0) for one in own) / max(1, len(own))
        metrics[f"{area}/accuracy"] = sum(bool(one.correct) for one in own) / max(1, len(own))
        metrics |= _episodes(area, episodes, float(len(episodes)))
    return metrics


def _episodes(area: str, played: Sequence[Rollout], count: float | None = None) -> Metrics:
    """Return statistics of episodes, as AREA/..., with their number if it is given."""
    if not played:
        return {}
    found = {f"{area}/turns": sum(len(one.turns) for one in played) / len(played)}
    # A turn cut at [environment] turn_tokens; if the episode ended with it, ended_tokens counts it.
    turns = [(turn, one.truncated and turn is one.turns[-1]) for one in played for turn in one.turns]
    found[f"{area}/cut_turns"] = sum(turn.finish_reason == "length" and not end for turn, end in turns) / len(turns)
    found |= {f"{area}/ended_{end}": sum(one.ended == end for one in played) / len(played) for end in _ENDS}
    for name in sorted({name for one in played for name in one.metrics}):
        found[f"{area}/{name}"] = sum(one.metrics.get(name, 0.0) for one in played) / len(played)
    return found if count is None else found | {f"{area}/episodes": count}
