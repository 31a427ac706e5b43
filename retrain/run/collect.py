"""From prompts to a scored batch: sample, score, and resample what teaches nothing; and the parity gate."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from retrain.engines.capability import positions
from retrain.errors import DataError, EngineError
from retrain.functional.mismatch import is_stale
from retrain.functional.seeds import derive_seed
from retrain.protocols import Policy, Sampler, Task
from retrain.run.run_parts import Parts, SamplingParts
from retrain.training.chat import Chat, Posed, TokenizedPrompt
from retrain.types import Batch, ExpertRow, Metrics, Problem, Request, Rollout, Sampling, State, Turn

if TYPE_CHECKING:
    from retrain.algorithms.graph.pipeline import Pipeline

_MOST_TOO_LONG = 1000
_ENDS = ("done", "turns", "tokens", "context", "error", "timeout")
"""Of episodes: `Rollout.ended`."""
_PARITY_ROWS = 8
"""Completions re-scored per check: enough to see wrong weights, cheap enough not to matter."""


@dataclass(frozen=True)
class Collection:
    """The rollouts of one step.

    Attributes:
        step: the step that trains on them, from 0.
        rollouts: everything that was sampled, failed scores included.
        experts: rows of an expert to train on as well.
        batch: the rows to train on, an expert's last; None if there are none.
        kept: index into `rollouts` of every row of the batch that is not an expert's.
        cursor: the next unused problem of the task.
        metrics: rollout and reward statistics.
        dropped: what the filter counts in the groups that it kept out of the batch.
        credit: what credit reports, if the filter needed it and the batch has its advantages already.
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

    def state_dict(self) -> State:
        """The collection without its batch, which is made from the rest."""
        plain: State = {name: value for name, value in vars(self).items() if name not in ("batch", "credit")}
        rows = {"rollouts": [r.row() for r in self.rollouts], "experts": [asdict(row) for row in self.experts]}
        return plain | rows

    @classmethod
    def restored(cls, parts: Parts, state: Mapping[str, Any]) -> Collection:
        """What `state_dict` gave, with its batch."""
        rollouts = [Rollout.of_row(row) for row in state["rollouts"]]
        experts = [ExpertRow(**row) for row in state["experts"]]
        train = [rollouts[index] for index in state["kept"]]
        batch = parts.layout.batch(train, state["step"], experts) if train or experts else None
        fields: State = {**state, "rollouts": rollouts, "experts": experts, "batch": batch}
        return cls(**fields)


def collect(parts: Parts, step: int, cursor: int) -> Collection:
    """Sample and score the rollouts of one step.

    With `[rollout] overlap` this runs while the trainer updates: it reads nothing that an update changes.

    A filter that judges rollouts alone drops its groups here. With `[rollout] resample` on, the groups that any
    filter drops are replaced by new prompts, at most `max_resample` times; after that the step trains on the fewer
    groups it has. A filter that reads credit gets it here, round by round, and it is not computed again.
    """
    rollout = parts.config.rollout
    rounds: list[_Round] = []
    missing, first = parts.prompts if parts.source is None else 0, 0
    if parts.source is not None:
        rollouts = parts.source.rollouts()
        rounds = [_judged(parts, step, _Round(rollouts, valid_rows(rollouts), cursor, 0))]
    while missing and len(rounds) <= (rollout.max_resample if rollout.resamples else 0):
        rounds.append(_round(parts, step, len(rounds), rounds[-1].cursor if rounds else cursor, missing, first))
        missing -= len({one.group for one in rounds[-1].kept})
        first += len({one.group for one in rounds[-1].rollouts})
    rollouts = [one for part in rounds for one in part.rollouts]
    kept = [one for part in rounds for one in part.kept]
    train = {id(one) for one in kept}
    metrics = rollout_metrics(rollouts) | {"rollout/too_long": float(sum(part.too_long for part in rounds))}
    metrics |= parts.sampler.metrics()
    if parts.world is not None:
        metrics |= parts.ranks.rollouts.first(parts.world.metrics)
    metrics["rollout/staleness"] = step - sum(one.weights_version for one in rollouts) / len(rollouts)
    experts: list[ExpertRow] = []
    if parts.experts is not None:
        prompts = {one.group: one.prompt_ids for one in rollouts}.values()
        experts = parts.experts.buffer.take(parts.experts.per_step, prompts)
        metrics["expert/epoch"] = float(parts.experts.buffer.epoch)
    metrics |= parts.task.learn(solved(rollouts))  # between steps alone: a step's problems depend on earlier steps
    problems = {group: posed for part in rounds for group, posed in part.problems.items()}
    batch = parts.layout.batch(kept, step, experts).replace(problems=problems) if kept or experts else None
    credited = [part.batch for part in rounds if part.batch is not None and len(part.kept)]
    return Collection(
        step=step,
        rollouts=rollouts,
        experts=experts,
        batch=batch.filled(credited) if batch and credited else batch,
        kept=[index for index, one in enumerate(rollouts) if id(one) in train],
        cursor=rounds[-1].cursor,
        metrics=metrics,
        dropped=added(part.dropped for part in rounds),
        credit=_weighted([(len(part.rollouts), part.credit) for part in rounds]) if credited else None,
    )


@dataclass
class _Round:
    """The rollouts of some prompts, those that are kept, and their batch if the filter needed its credit."""

    rollouts: list[Rollout]
    kept: list[Rollout]
    cursor: int
    too_long: int
    problems: Mapping[int, Posed] = field(default_factory=dict[int, Posed])
    dropped: Metrics = field(default_factory=Metrics)
    batch: Batch | None = None
    credit: Metrics = field(default_factory=Metrics)


def _round(parts: Parts, step: int, attempt: int, cursor: int, prompts: int, first: int) -> _Round:
    """Sample and score the groups of the next `prompts` problems, the first of which is group number `first`."""
    seed = derive_seed(parts.config.training.seed, "sampling", step, attempt)
    rollouts, problems, after = sampled(parts, cursor, prompts, seed, first)
    return _judged(parts, step, _Round(rollouts, valid_rows(rollouts), after, after - cursor - prompts, problems))


def _judged(parts: Parts, step: int, found: _Round) -> _Round:
    """The round without the groups that the filter drops, where that is known before the update."""
    pipeline = parts.pipeline
    if found.kept and (parts.config.rollout.resamples or pipeline.judges_rollouts):
        batch = parts.layout.batch(found.kept, step).replace(problems=found.problems)
        if not pipeline.judges_rollouts:
            batch, found.credit = assign_credit(pipeline, parts.policy, batch)
        keep, found.dropped = pipeline.informative(batch)
        found.kept = [one for one, passes in zip(found.kept, keep.tolist(), strict=True) if passes]
        found.batch = None if pipeline.judges_rollouts else batch.rows(keep.nonzero()[:, 0])
    return found


def sampled(
    parts: Parts, cursor: int, prompts: int, seed: int, first: int = 0
) -> tuple[list[Rollout], dict[int, Posed], int]:
    """Scored rollouts of the next `prompts` problems, what each group answers, and the cursor behind the problems."""
    training = parts.config.training
    room = min(positions(parts.loaded.model) - training.max_tokens, training.max_prompt_tokens or float("inf"))
    posed, after = draw(parts.task, parts.chat, room, cursor, prompts)
    requests = ask(posed, training.group_size, training.max_tokens)
    rollouts = roll(parts, posed, requests, train_sampling(parts, seed), first)
    return score(parts, posed, rollouts, training.max_tokens), dict(enumerate(posed, first)), after


def roll(
    parts: Parts, posed: Sequence[Posed], requests: Sequence[Request], sampling: Sampling, first: int = 0
) -> list[Rollout]:
    """Every problem's group of completions, or of episodes in the environment; groups count from `first`.

    On every rank, though rank 0 alone has an environment.
    """
    if (world := parts.world) is None:
        return complete(parts.sampler, parts.chat, posed, requests, sampling, first)
    from retrain.run import episodes

    return parts.sampler.lead(
        lambda sampler: episodes.roll(episodes.Player(sampler, parts.chat, world), posed, requests, sampling, first)
    )


def complete(
    sampler: Sampler,
    chat: Chat,
    posed: Sequence[Posed],
    requests: Sequence[Request],
    sampling: Sampling,
    first: int = 0,
) -> list[Rollout]:
    """Every problem's group of completions of one turn. Token ids stay as sampled; text is decoded."""
    found: list[Rollout] = []
    for group, some in enumerate(sampler.sample(requests, sampling), first):
        for one in some:
            turn = Turn(0, len(one.ids), one.finish_reason, one.weights_version)
            found.append(chat.rollout(posed[group - first], group, one.ids, one.logprobs, [turn]))
    return found


def assign_credit(pipeline: Pipeline, policy: Policy, batch: Batch) -> tuple[Batch, Metrics]:
    """The batch with what the policy's scoring forward adds, and with advantages; a forward only if one is needed."""
    if columns := sorted(pipeline.policy_columns):
        batch = batch.replace(**policy.logprobs(batch, columns))
    metrics = pipeline.before(batch)
    batch, reported = pipeline.credit(batch)
    return batch, metrics | reported


def added(counts: Iterable[Metrics]) -> Metrics:
    """Sums of counts, name by name."""
    total: Metrics = {}
    for part in counts:
        total |= {name: total.get(name, 0.0) + value for name, value in part.items()}
    return total


def _weighted(reports: Sequence[tuple[int, Metrics]]) -> Metrics:
    """Mean of every metric, weighted by the rows of the rounds that report it."""
    names = dict.fromkeys(name for _, report in reports for name in report)
    rows = {name: sum(count for count, report in reports if name in report) for name in names}
    return {name: sum(n * r[name] for n, r in reports if name in r) / rows[name] for name in names}


def draw(task: Task, chat: Chat, room: float, cursor: int, count: int) -> tuple[list[Posed], int]:
    """The next `count` problems, rendered, of prompts up to `room` tokens; and the cursor behind them.

    One prompt that is too long for the model must not end a run of many hours.
    """
    found, first = list[Posed](), cursor
    while len(found) < count:
        if cursor - first - len(found) >= _MOST_TOO_LONG:
            raise DataError(
                f"{_MOST_TOO_LONG} prompts in one step are longer than the {room:g} tokens that max_tokens "
                "leaves of the model's positions, or [training] max_prompt_tokens allows; change these, or the data"
            )
        problem = task.problem(cursor)
        prompt = chat.prompt(problem.prompt)
        cursor += 1
        if len(prompt.ids) <= room:
            found.append((problem, prompt))
    return found, cursor


def train_sampling(parts: SamplingParts, seed: int) -> Sampling:
    """Sampling for training: the trainer takes its log-probs at the same temperature, over the same support."""
    rollout = parts.config.rollout
    return Sampling(parts.config.training.temperature, rollout.top_p, rollout.top_k, parts.loaded.stop_ids, seed)


def ask(posed: Sequence[Posed], count: int, max_tokens: int) -> list[Request]:
    """`count` completions of each prompt; the stream of a prompt is its place."""
    return [Request(prompt.ids, count, max_tokens, stream) for stream, (_, prompt) in enumerate(posed)]


def score(parts: Parts, posed: Sequence[Posed], rollouts: Sequence[Rollout], max_tokens: int) -> list[Rollout]:
    """The rollouts, whose groups answer these problems in order, with reward, parts, correctness and status.

    What an environment has given a reward, or what has failed in it, is not scored. Of several turns the last is.
    """
    first = min((rollout.group for rollout in rollouts), default=0)
    waiting = [index for index, rollout in enumerate(rollouts) if rollout.reward is None and rollout.status == "ok"]
    items: list[dict[str, Any]] = []
    for rollout in (rollouts[index] for index in waiting):
        problem, last = posed[rollout.group - first][0], rollout.turns[-1]
        items.append(
            {
                "completion": parts.chat.decode(rollout.completion_ids[last.start :]) if last.start else rollout.text,
                "answer": problem.answer,
                "prompt": rollout.prompt,
                "problem": problem.facts,
                "length": rollout.length,
                "max_tokens": max_tokens,
                "finish_reason": rollout.finish_reason,
                "completion_ids": rollout.completion_ids,
            }
        )
    scored = list(rollouts)
    for index, s in zip(waiting, parts.pool.score(items), strict=True):
        scored[index] = replace(rollouts[index], parts=dict(s.parts), correct=s.correct, status=s.status)
        if s.value is not None:
            scored[index] = scored[index].rewarded(s.value, s.parts, s.correct)
    return scored


def valid_rows(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Those with a reward, of groups that failures did not shrink below two."""
    valid = [rollout for rollout in rollouts if rollout.reward is not None]
    sampled, scored = (Counter(rollout.group for rollout in some) for some in (rollouts, valid))
    return [rollout for rollout in valid if scored[rollout.group] >= min(2, sampled[rollout.group])]


def solved(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Share of right answers to each problem, by its id, over the completions that have a reward."""
    found: defaultdict[str, list[bool]] = defaultdict(list)
    for one in rollouts:
        if one.reward is not None:
            found[one.problem_id].append(bool(one.correct))
    return {name: sum(right) / len(right) for name, right in found.items()}


def rollout_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """What was sampled, over every rollout; means are over completions.

    Of episodes also env/turns, env/ended_* and the means of what the environment counted. Of a mix also the reward and
    accuracy of every task or environment, as task/LABEL/... or env/LABEL/...
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
    for name in sorted({name for r in scored for name in r.parts}):
        values = [part for r in scored if (part := r.parts.get(name)) is not None]
        if values:
            metrics[f"reward/{name}"] = sum(values) / len(values)
    played = [one for one in rollouts if one.ended]  # in an environment, or by a harness
    metrics |= _episodes("env", played)
    for label in sorted({one.environment for one in rollouts} - {""}):
        episodes = [one for one in played if one.environment == label]
        area, own = f"{'env' if episodes else 'task'}/{label}", [one for one in scored if one.environment == label]
        metrics[f"{area}/reward"] = sum(float(one.reward or 0) for one in own) / max(1, len(own))
        metrics[f"{area}/accuracy"] = sum(bool(one.correct) for one in own) / max(1, len(own))
        metrics |= _episodes(area, episodes, float(len(episodes)))
    return metrics


def _episodes(area: str, played: Sequence[Rollout], count: float | None = None) -> Metrics:
    if not played:
        return {}
    found = {f"{area}/turns": sum(len(one.turns) for one in played) / len(played)}
    found |= {f"{area}/ended_{end}": sum(one.ended == end for one in played) / len(played) for end in _ENDS}
    for name in sorted({name for one in played for name in one.metrics}):
        found[f"{area}/{name}"] = sum(one.metrics.get(name, 0.0) for one in played) / len(played)
    return found if count is None else found | {f"{area}/episodes": count}


def fresh_batch(parts: Parts, collection: Collection) -> Batch:
    """Completions of some of the step's prompts, sampled now: those that were sampled ahead show older weights."""
    few = list({one.group: one for one in collection.rollouts if one.length}.values())[:_PARITY_ROWS]
    posed = [(Problem(r.problem_id, r.prompt, r.answer), TokenizedPrompt(r.prompt, r.prompt_ids)) for r in few]
    sampling = train_sampling(parts, derive_seed(parts.config.training.seed, "parity", collection.step))
    longest = positions(parts.loaded.model) - max(len(r.prompt_ids) for r in few)
    requests = ask(posed, 1, int(min(parts.config.training.max_tokens, longest)))
    rollouts = complete(parts.sampler, parts.chat, posed, requests, sampling)
    return parts.layout.batch([replace(rollout, reward=0.0) for rollout in rollouts], collection.step)


def check_parity(policy: Policy, batch: Batch, limit: float) -> Metrics:
    """Re-score some rollouts with the trainer and compare with the sampler's own log-probs.

    Call it before the update: sampler and trainer then hold the same weights.

    Returns:
        parity/logp_diff_mean and parity/logp_diff_max, in nats per token.
    Raises:
        EngineError: the mean difference exceeds the limit, or the sampler is nearer to the policy without its
            update (see `is_stale`): with LoRA that is the base, else the weights of the last check. Stale or wrong
            sampler weights are the most expensive silent failure there is.
    """
    part = batch.rows((~batch.is_expert).nonzero()[:_PARITY_ROWS, 0])
    cells = part.response_mask
    if not cells.any():
        return {}
    sampler, trainer = part.sampler_logprobs[cells], policy.logprobs(part)["old_logprobs"][cells]
    difference = (trainer - sampler).abs()
    mean, largest = float(difference.mean()), float(difference.max())
    if not mean <= limit:
        raise EngineError(
            f"sampler and trainer disagree: mean |log-prob difference| {mean:.3g} per token (largest {largest:.3g}), "
            f"tolerance {limit:.3g}; the likeliest cause is that the sampler does not hold the trainer's weights; "
            "if the difference is rounding, raise [rollout] parity_tolerance"
        )
    earlier = policy.earlier_logprobs(part)
    if earlier is not None and is_stale(sampler, trainer, earlier[cells]):
        old = "the weights of the last check" if policy.adapter is None else "the base without LoRA's adapter"
        raise EngineError(
            f"the sampler has not followed the update: its log-probs are nearer to those of {old} than to the "
            f"trainer's, from which they differ by {mean:.3g} per token; it holds old weights, or it rounds the update "
            'away, as [vllm] lora = "merged" does in bfloat16'
        )
    policy.remember()
    return {"parity/logp_diff_mean": mean, "parity/logp_diff_max": largest}
