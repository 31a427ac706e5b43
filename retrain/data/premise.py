"""What tasks with a premise share: how their problems are drawn, and how a premise is measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from retrain.types import Problem, Rollout

Span = tuple[int, int]
"""(first, behind the last) character of a completion's text."""

SHORT: Mapping[str, Any] = {"training": {"max_steps": 60}, "eval": {"every": 20, "problems": 512}}
"""Trait `settings` of a task that a run of less than a minute of CPU learns."""


def answered(problems: Sequence[Problem], answers: Sequence[Sequence[Rollout]]) -> list[tuple[Problem, Rollout]]:
    """Every answer with its problem."""
    return [(problem, answer) for problem, group in zip(problems, answers, strict=True) for answer in group]


def explained(answers: Sequence[tuple[str, str, float]]) -> float:
    r"""Share of the outcome's variance that a choice explains, among problems of one kind: unbiased epsilon squared.

    (SSB - d * MSW) / SST, with the sums of squares between and within choices of each kind of problem, their mean
    square within MSW, and d the choices less one, summed over kinds. 0 where outcomes do not vary.

    Args:
        answers: (kind of problem, choice, outcome) of every answer.
    References: Kelley, An Unbiased Correlation Ratio Measure (1935).
    """
    cells: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for kind, choice, outcome in answers:
        cells[kind][choice].append(outcome)
    within = total = 0.0
    freedom = left = 0
    for choices in cells.values():
        every = [outcome for found in choices.values() for outcome in found]
        total += _squares(every)
        within += sum(map(_squares, choices.values()))
        freedom, left = freedom + len(choices) - 1, left + len(every) - len(choices)
    return (total - within - freedom * within / left) / total if total and left else 0.0


def _squares(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values)
