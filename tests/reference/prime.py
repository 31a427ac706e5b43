"""PRIME's advantages and losses as the formulas are printed, over lists, one term at a time."""

import math


def to_come(values, gamma=1.0):
    return [sum(gamma ** (s - t) * values[s] for s in range(t, len(values))) for t in range(len(values))]


def process_rloo(episode, rewards, groups, gamma=1.0, norm="batch"):
    """Advantages of ragged rows: `episode` per row, `rewards` per token of each row, `groups` per row."""
    if norm == "batch":
        largest = max((abs(value) for row in rewards for value in to_come(row)), default=0.0)
        rewards = [[value / (largest + 1e-6) for value in row] for row in rewards]
    result = []
    for i, row in enumerate(rewards):
        others = [
            sum(other) / len(other) for j, other in enumerate(rewards) if j != i and groups[j] == groups[i] and other
        ]
        if others:
            baseline = sum(others) / len(others)
            result.append([episode[i] + later for later in to_come([value - baseline for value in row], gamma)])
        else:
            result.append([episode[i]] * len(row))
    return result


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def cross_entropy(scores, correct):
    terms = [
        y * math.log(sigmoid(r)) + (1 - y) * math.log(1 - sigmoid(r)) for r, y in zip(scores, correct, strict=True)
    ]
    return -sum(terms) / len(terms)


def dpo(scores, correct, groups):
    """Over the rows that have an opposite in their group; None if there are none."""
    losses = []
    for i, score in enumerate(scores):
        opposite = [s for j, s in enumerate(scores) if groups[j] == groups[i] and correct[j] != correct[i]]
        if opposite:
            sign = 1 if correct[i] else -1
            losses.append(-math.log(sigmoid(sign * (score - sum(opposite) / len(opposite)))))
    return sum(losses) / len(losses) if losses else None
