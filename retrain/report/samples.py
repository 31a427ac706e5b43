"""Choose the stored completions that a page shows, and prepare them for its template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any

from retrain.report.page import percent, plural
from retrain.rewards.entry import unique_names
from retrain.storage.run_files import read_evaluation, read_rows
from retrain.system.records import read_json

_COLORED = 60_000
"""Largest number of tokens on that page that are colored by their credit, which takes about 90 characters each."""

RolloutRow = Mapping[str, Any]

_SHOWN = 3
"""Largest number of completions shown of one group."""
_COMPARED = 4
"""Number of held-out problems shown before and after training."""
_OF_THE_ENVIRONMENT = ("env", "turns")
"""Parts of a reward that come from the environment and have weight 1 in the sum."""
_CHARACTERS = 5_000_000
"""Largest number of characters on the page of all samples; more would make a browser slow."""


def step_of(file: Path) -> int:
    """Return the step of a file of rollouts or of an evaluation."""
    return int(file.name.removesuffix(".jsonl.gz").rpartition("-")[2])


def steps(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the stored steps of a run in order, with their groups.

    Each step has an equal share of `_CHARACTERS`; groups beyond it are left out and counted in "left". Beyond its share
    of `_COLORED`, groups have no credit.
    """
    files = sorted(run.glob("rollouts/step-*.jsonl.gz"))
    # Runs log parts without weights, which are settings.
    weights = reward_weights(read_json(run / "config.resolved.json"))
    for file in files:
        rows, groups, size, colored = read_rows(file), list[dict[str, Any]](), 0, 0
        for _, rows_of_group in groupby(rows, lambda row: row["group"]):
            group = [*rows_of_group]
            size += sum(len(row["text"]) for row in group) + len(str(group[0]["prompt"]))
            if size <= _CHARACTERS / len(files) or not groups:
                shown = [completion(row, weights) for row in group]
                colored += sum(len(row["advantages"] or ()) for row in shown)
                if colored > _COLORED / len(files):
                    shown = [row | {"advantages": None} for row in shown]
                groups.append({"prompt": shown[0]["prompt"], "answer": shown[0]["answer"], "rows": shown})
        judged = [bool(row["correct"]) for row in rows if row.get("correct") is not None]
        right = f", {percent(sum(judged) / len(judged))} right" if judged else ""
        left = len(rows) - sum(len(group["rows"]) for group in groups)
        head = f"{plural(len(rows), 'completion')}{right}"
        about = {"scale": largest_advantage(rows), "plain": colored > _COLORED / len(files)}
        yield {"step": step_of(file), "head": head, "groups": groups, "left": left, "file": file.name, **about}


def largest_advantage(rows: Iterable[RolloutRow]) -> float:
    """Return the largest absolute advantage of any token; 0 without one."""
    # A diverged run stores NaN and inf, which would make all other colors vanish.
    return max((abs(float(a)) for row in rows for a in row.get("advantages") or () if isfinite(a)), default=0.0)


def evaluations(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the stored evaluations of a run in order, with their problems.

    Each evaluation has an equal share of `_CHARACTERS`; problems beyond it are left out and counted in "left".
    """
    files = sorted(run.glob("eval/step-*.jsonl.gz"))
    for file in files:
        rows, groups, size = read_evaluation(file), list[dict[str, Any]](), 0
        for row in rows:
            shown = [*_predictions(row)]
            size += sum(len(row_of_group["text"]) for row_of_group in shown) + len(str(row["prompt"]))
            if size <= _CHARACTERS / len(files) or not groups:
                groups.append({"prompt": row["prompt"], "answer": row["ground_truth"], "rows": shown})
        step, _, name = file.name.removeprefix("step-").removesuffix(".jsonl.gz").partition(".")
        judged = [right for row in rows for right in row["correct"]]
        where = f", {name}" if name else ""
        head = f"{plural(len(rows), 'problem')}{where}, {percent(sum(judged) / max(1, len(judged)))} right"
        left = len(rows) - len(groups)
        yield {"step": int(step), "head": head, "groups": groups, "left": left, "file": file.name, "scale": 0.0}


def before_and_after(run: Path) -> dict[str, Any]:
    """Return the completions of the first held-out problems before training and at the last evaluation.

    It is the greedy completion if the evaluations have one, else the first sample.

    Returns:
        kind ("greedy" or "sampled"), first and last (the steps), and rows with prompt, answer and the data of both
        completions ("before", "after"). Empty without two stored evaluations of the run's own problems.
    """
    files = sorted(run.glob("eval/step-*.jsonl.gz"))
    # Files of named sets are called step-N.NAME: only the run's own problems are compared.
    files = [file for file in files if "." not in file.name.removesuffix(".jsonl.gz")]
    if len(files) < 2:
        return {}
    newest = {row["question_id"]: row for row in read_evaluation(files[-1])}
    # By id and not by position, because the two evaluations may have different problems.
    pairs = [(row, newest[row["question_id"]]) for row in read_evaluation(files[0]) if row["question_id"] in newest]
    rows = [
        {
            "prompt": first["prompt"],
            "answer": first["ground_truth"],
            "before": next(_predictions(first)),
            "after": next(_predictions(last)),
        }
        for first, last in pairs[:_COMPARED]
    ]
    kind = "greedy" if pairs and pairs[0][0].get("greedy") else "sampled"
    return {"kind": kind, "first": step_of(files[0]), "last": step_of(files[-1]), "rows": rows}


def _predictions(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the data of the completions of a held-out problem, the greedy one first."""
    greedy = row.get("greedy")
    every = [("greedy, ", greedy["prediction"], greedy["length"], greedy["correct"])] if greedy else []
    every += [("", *point) for point in zip(row["predictions"], row["lengths"], row["correct"], strict=True)]
    for kind, text, length, correct in every:
        verdict = "right" if correct else "wrong"
        yield {"head": f"{kind}{verdict}, {length} tokens", "verdict": verdict, "text": text, "advantages": None}


def best_and_worst(rows: Sequence[RolloutRow]) -> list[int]:
    """Return the positions of the best, the second best and the worst completion of one group, by reward.

    The group is the first one with different rewards, else the first with a scored completion, else the first. Equal
    completions (text and reward) count once. Unscored completions are shown only if the whole group is unscored.
    """
    groups: dict[int, list[int]] = {}
    for position, row in enumerate(rows):
        groups.setdefault(int(row["group"]), []).append(position)
    # A group of equal rewards teaches nothing, so a mixed one is shown if there is any.
    scored = [[i for i in group if rows[i]["reward"] is not None] for group in groups.values()]
    mixed = [group for group in scored if len({rows[i]["reward"] for i in group}) > 1]
    chosen = next((group for group in (*mixed, *scored, *groups.values()) if group), [])
    # A trained policy repeats itself; three copies of one answer would show nothing.
    distinct = {(rows[i]["text"], rows[i]["reward"]): i for i in chosen}
    ordered = sorted(distinct.values(), key=lambda i: -float(rows[i]["reward"] or 0.0))
    return [*ordered[: _SHOWN - 1], ordered[-1]] if len(ordered) > _SHOWN else ordered


@dataclass(frozen=True)
class Conversation:
    """Annotations of an episode's tokens.

    Attributes:
        observed: True on tokens of observations; empty without an environment.
        badges: position of each turn's last token -> number of the turn and its reward.
        tokens: number of sampled tokens.
        summary: number of turns, and the reason why the episode ended; empty without an environment.
    """

    observed: Sequence[bool] = ()
    badges: Mapping[int, str] = field(default_factory=dict[int, str])
    tokens: int = 0
    summary: str = ""


def conversation(row: RolloutRow) -> Conversation:
    """Return the annotations of a stored rollout."""
    size = len(row["completion_ids"])
    # A turn that ends at token 0 sampled nothing, and no token could carry its badge.
    turns = [turn for turn in row.get("turns", ()) if turn["end"]]
    if not row.get("ended"):
        return Conversation(tokens=size)
    sampled = {position for turn in turns for position in range(turn["start"], turn["end"])}
    badges = {
        turn["end"] - 1: f"{number}: {turn['reward']:+.3g}" if turn.get("reward") else str(number)
        for number, turn in enumerate(turns, 1)
    }
    summary = f"{len(turns)} turn{'s' if len(turns) != 1 else ''}, ended: {row['ended']}"
    return Conversation([position not in sampled for position in range(size)], badges, len(sampled), summary)


def reward_weights(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the weight of each reward by the name of its part, from the resolved configuration of a run."""
    rewards = config.get("rewards", [])
    names = unique_names([reward["name"] for reward in rewards])
    return {name: float(reward["weight"]) for name, reward in zip(names, rewards, strict=True)}


def _sum_of_parts(row: RolloutRow, weights: Mapping[str, float]) -> str:
    """Format the reward as a weighted sum, followed by other values that rewards report; "" for a single part.

    The rewards of an environment's episodes and turns have weight 1.
    """
    parts = {name: value for name, value in row.get("parts", {}).items() if value is not None}
    if len(parts) < 2:
        return ""
    added = [name for name in parts if name in weights or name in _OF_THE_ENVIRONMENT]
    others = ", ".join(f"{name} {parts[name]:.3g}" for name in parts if name not in added)
    terms = [f"{weights.get(name, 1.0):g} x {name} {parts[name]:.3g}" for name in added]
    return ", ".join(filter(None, (f"= {' + '.join(terms)}" if terms else "", others)))


def completion(row: RolloutRow, weights: Mapping[str, float]) -> dict[str, Any]:
    """Return the data of a stored completion for a page. Credit is missing if the completion was not trained on.

    Args:
        row: the stored completion.
        weights: see `reward_weights`.
    """
    reward = "not scored" if row["reward"] is None else f"reward {row['reward']:.3f}"
    if row["reward"] is not None and (parts := _sum_of_parts(row, weights)):
        reward += f" {parts}" if parts.startswith("=") else f", {parts}"
    right = "" if row.get("correct") is None else "right" if row["correct"] else "wrong"
    annotations = conversation(row)
    return {
        "head": ", ".join(filter(None, (reward, right, f"{annotations.tokens} tokens", annotations.summary))),
        "answer": row.get("answer"),
        "observed": annotations.observed,
        "badges": annotations.badges,
        "verdict": right,
        "prompt": row["prompt"],
        "text": row["text"],
        "tokens": row.get("tokens"),
        "advantages": row.get("tokens") and row.get("advantages"),
        "planning": row.get("planning"),
    }
