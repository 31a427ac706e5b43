"""Rewards in the forms of TRL and verl, as they are: the signature says how each is called.

[[rewards]]
name = "plugins.borrowed_rewards.accuracy"
"""

from __future__ import annotations

import re
from typing import Any


def accuracy(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """TRL's form: all completions of a step at once, with the columns of the data as lists."""
    said = [re.findall(r"so (\S+)", completion) for completion in completions]
    return [float(bool(words) and words[-1] == right) for words, right in zip(said, answer, strict=True)]


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """verl's form: one completion; the other numbers of the dict are recorded as parts of the reward."""
    return {"score": float(ground_truth in solution_str), "characters": float(len(solution_str))}


async def short(completion: str) -> float:
    """An async reward would ask a server here; `concurrency` completions are scored at once."""
    return min(1.0, 20 / max(len(completion), 1))
