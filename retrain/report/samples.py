"""Which stored completions a page shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]

_SHOWN = 3


def best_and_worst(rows: Sequence[Row]) -> list[int]:
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


def conversation(row: Row) -> Conversation:
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
