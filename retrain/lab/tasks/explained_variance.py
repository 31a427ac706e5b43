"""Share of an outcome's variance that a choice explains, for measuring the premise of a task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


def explained(answers: Sequence[tuple[str, str, float]]) -> float:
    r"""Return the share of the outcome's variance within kinds of problems that a choice explains: epsilon squared.

    (SSB - d * MSW) / SST, where SSB and SSW are the sums of squares between and within the choices of each kind of
    problem, SST = SSB + SSW, d is the number of choices minus one, summed over kinds, and MSW = SSW / (number of
    answers - number of choices, summed over kinds). 0 if the outcomes do not vary.

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
        outcomes_of_kind = [outcome for outcomes in choices.values() for outcome in outcomes]
        total += _sum_of_squares(outcomes_of_kind)
        within += sum(map(_sum_of_squares, choices.values()))
        freedom += len(choices) - 1
        left += len(outcomes_of_kind) - len(choices)
    # d * MSW is what d choices explain by chance. Without it, many rare choices would look decisive.
    return (total - within - freedom * within / left) / total if total and left else 0.0


def _sum_of_squares(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values)
