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
    for name, right in (("right", True), ("wrong", False)):
        if found := [r.length for r in scored if bool(r.correct) is right]:
            metrics[f"tokens/{name}"] = sum(found) / len(found)
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


def solved(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the share of correct completions of each problem, by its id.

    Completions without a reward do not count.
    """
    found: defaultdict[str, list[bool]] = defaultdict(list)
    for one in rollouts:
        if one.reward is not None:
            found[one.problem_id].append(bool(one.correct))
    return {name: sum(right) / len(right) for name, right in found.items()}


def added(counts: Iterable[Metrics]) -> Metrics:
    """Add up metrics by name."""
    total: Metrics = {}
    for part in counts:
        total |= {name: total.get(name, 0.0) + value for name, value in part.items()}
    return total
