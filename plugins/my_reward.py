"""A reward: completion and answer in, a number out, or None for no opinion.

[[rewards]]
name = "plugins.my_reward.brevity"
weight = 0.1
params = { target = 20 }
"""

from __future__ import annotations


def brevity(completion: str, answer: str, *, target: int = 20) -> float | None:
    """1 for up to `target` characters, then target / length; no opinion on an answer that is missing."""
    if answer not in completion:
        return None
    return min(1.0, target / max(len(completion), 1))
