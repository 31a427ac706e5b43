"""Which stored completions a page shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
