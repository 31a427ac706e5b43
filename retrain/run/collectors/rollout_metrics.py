"""Statistics of the rollouts of a step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from retrain.types import Metrics, Rollout

_ENDS = ("done", "turns", "tokens", "context", "error", "timeout")
"""Values of `Rollout.ended` that are counted in the metrics of episodes."""


def rollout_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Return rollout and reward statistics of a step; means are over completions.

    Episodes add env/turns, env/cut_turns, env/ended_* and the means of the environment's own
    metrics. A mix of tasks or environments adds reward and accuracy of each, as task/LABEL/... or
    env/LABEL/...
    """
    scored = [r for r in rollouts if r.reward is not None]
    rewards = [float(r.reward) for r in scored if r.reward is not None]
    lengths = [r.length for r in rollouts]
    # The scoring of all completions may have failed.
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
    for rollout in rollouts:
        texts[rollout.group].append(rollout.text)
    # A single completion has no other to be identical with.
    if several := [Counter(group).most_common(1)[0][1] / len(group) for group in texts.values() if len(group) > 1]:
        metrics["rollout/identical"] = sum(several) / len(several)
    for name, right in (("right", True), ("wrong", False)):
        if lengths_of_kind := [r.length for r in scored if bool(r.correct) is right]:
            metrics[f"tokens/{name}"] = sum(lengths_of_kind) / len(lengths_of_kind)
    greedy = {rollout.group: rollout.greedy for rollout in rollouts if rollout.greedy is not None}
    metrics |= {"reward/greedy": sum(greedy.values()) / len(greedy)} if greedy else {}
    # Sorted, because the order of a set of texts differs between processes.
    for name in sorted({name for r in scored for name in r.parts}):
        values = [part for r in scored if (part := r.parts.get(name)) is not None]
        if values:
            metrics[f"reward/{name}"] = sum(values) / len(values)
    played = [rollout for rollout in rollouts if rollout.ended]  # episodes of an environment or a harness
    metrics |= _episodes("env", played)
    for label in sorted({rollout.environment for rollout in rollouts} - {""}):
        episodes = [episode for episode in played if episode.environment == label]
        area = f"{'env' if episodes else 'task'}/{label}"
        members = [rollout for rollout in scored if rollout.environment == label]
        metrics[f"{area}/reward"] = sum(float(rollout.reward or 0) for rollout in members) / max(1, len(members))
        metrics[f"{area}/accuracy"] = sum(bool(rollout.correct) for rollout in members) / max(1, len(members))
        metrics |= _episodes(area, episodes, float(len(episodes)))
    return metrics


def _episodes(area: str, played: Sequence[Rollout], count: float | None = None) -> Metrics:
    """Return statistics of episodes, as AREA/..., with their number if it is given."""
    if not played:
        return {}
    metrics = {f"{area}/turns": sum(len(episode.turns) for episode in played) / len(played)}
    # A turn cut at [environment] turn_tokens; if the episode ended with it, ended_tokens counts it.
    turns = [(turn, episode.truncated and turn is episode.turns[-1]) for episode in played for turn in episode.turns]
    metrics[f"{area}/cut_turns"] = sum(turn.finish_reason == "length" and not end for turn, end in turns) / len(turns)
    metrics |= {f"{area}/ended_{end}": sum(episode.ended == end for episode in played) / len(played) for end in _ENDS}
    for name in sorted({name for episode in played for name in episode.metrics}):
        metrics[f"{area}/{name}"] = sum(episode.metrics.get(name, 0.0) for episode in played) / len(played)
    return metrics if count is None else metrics | {f"{area}/episodes": count}


def solved(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the share of correct completions of each problem, by its id.

    Completions without a reward do not count.
    """
    correct: defaultdict[str, list[bool]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.reward is not None:
            correct[rollout.problem_id].append(bool(rollout.correct))
    return {name: sum(right) / len(right) for name, right in correct.items()}


def added(counts: Iterable[Metrics]) -> Metrics:
    """Add up metrics by name."""
    total: Metrics = {}
    for part in counts:
        total |= {name: total.get(name, 0.0) + value for name, value in part.items()}
    return total
