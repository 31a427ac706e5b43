"""Which stored completions a page shows, and what of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from retrain.report.page import percent, plural
from retrain.storage.run_files import read_rows

RolloutRow = Mapping[str, Any]

_SHOWN = 3
_CHARACTERS = 5_000_000
"""Of all completions on the page of all samples: more would make a browser slow."""


def step_of(file: Path) -> int:
    """The step whose rollouts the file has."""
    return int(file.name.removesuffix(".jsonl.gz").rpartition("-")[2])


def steps(run: Path) -> Iterator[dict[str, Any]]:
    """The stored steps of a run with their groups, in order; of each as many groups as its share of the page holds."""
    files = sorted(run.glob("rollouts/step-*.jsonl.gz"))
    for file in files:
        rows, groups, size = read_rows(file), list[dict[str, Any]](), 0
        for _, found in groupby(rows, lambda row: row["group"]):
            group = [*found]
            size += sum(len(row["text"]) for row in group) + len(str(group[0]["prompt"]))
            if size <= _CHARACTERS / len(files) or not groups:
                shown = [completion(row) for row in group]
                groups.append({"prompt": shown[0]["prompt"], "answer": shown[0]["answer"], "rows": shown})
        judged = [bool(row["correct"]) for row in rows if row.get("correct") is not None]
        right = f", {percent(sum(judged) / len(judged))} right" if judged else ""
        left = len(rows) - sum(len(group["rows"]) for group in groups)
        head = f"{plural(len(rows), 'completion')}{right}"
        yield {"step": step_of(file), "head": head, "groups": groups, "left": left, "file": file.name}


def best_and_worst(rows: Sequence[RolloutRow]) -> list[int]:
    """Positions of the best, second best and worst completion of one group, by reward.

    The group is the first one with different rewards; without any, the first that was scored, or else the first.
    Equal completions (text and reward) count once. An unscored completion is shown only if its whole group is unscored.
    """
    groups: dict[int, list[int]] = {}
    for position, row in enumerate(rows):
        groups.setdefault(int(row["group"]), []).append(position)
    scored = [[i for i in group if rows[i]["reward"] is not None] for group in groups.values()]
    mixed = [group for group in scored if len({rows[i]["reward"] for i in group}) > 1]
    chosen = next((group for group in (*mixed, *scored, *groups.values()) if group), [])
    distinct = {(rows[i]["text"], rows[i]["reward"]): i for i in chosen}
    ordered = sorted(distinct.values(), key=lambda i: -float(rows[i]["reward"] or 0.0))
    return [*ordered[: _SHOWN - 1], ordered[-1]] if len(ordered) > _SHOWN else ordered


@dataclass(frozen=True)
class Conversation:
    """What a strip of tokens shows of an episode in an environment.

    Attributes:
        heard: of every token, whether the environment said it; empty if nobody did.
        badges: position of each turn's last token -> number of the turn and what it earned.
        tokens: sampled.
        summary: turns and how the episode ended; empty without an environment.
    """

    heard: Sequence[bool] = ()
    badges: Mapping[int, str] = field(default_factory=dict[int, str])
    tokens: int = 0
    summary: str = ""


def conversation(row: RolloutRow) -> Conversation:
    """Of a stored rollout."""
    size, turns = len(row["completion_ids"]), [turn for turn in row.get("turns", ()) if turn["end"]]
    if not row.get("ended"):
        return Conversation(tokens=size)
    sampled = {place for turn in turns for place in range(turn["start"], turn["end"])}
    badges = {
        turn["end"] - 1: f"{number}: {turn['reward']:+.3g}" if turn.get("reward") else str(number)
        for number, turn in enumerate(turns, 1)
    }
    summary = f"{len(turns)} turn{'s' if len(turns) != 1 else ''}, ended: {row['ended']}"
    return Conversation([place not in sampled for place in range(size)], badges, len(sampled), summary)


def completion(row: RolloutRow) -> dict[str, Any]:
    """What a page shows of a stored completion; without credit if it was not trained on."""
    reward = "not scored" if row["reward"] is None else f"reward {row['reward']:.3f}"
    right = "" if row.get("correct") is None else "right" if row["correct"] else "wrong"
    several = {name: value for name, value in row.get("parts", {}).items() if value is not None}
    parts = " + ".join(f"{name} {value:.3g}" for name, value in several.items()) if len(several) > 1 else ""
    talk = conversation(row)
    return {
        "head": ", ".join(filter(None, (reward, parts, right, f"{talk.tokens} tokens", talk.summary))),
        "answer": row.get("answer"),
        "heard": talk.heard,
        "badges": talk.badges,
        "verdict": right,
        "prompt": row["prompt"],
        "text": row["text"],
        "tokens": row.get("tokens"),
        "advantages": row.get("tokens") and row.get("advantages"),
        "planning": row.get("planning"),
    }
