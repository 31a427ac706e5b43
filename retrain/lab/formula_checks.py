"""Properties of the formulas, checked on random inputs with the registered components."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from retrain.algorithms.graph.objective import Objective
from retrain.functional.seeds import derive_seed
from retrain.registry import find
from retrain.types import Batch

Columns = Mapping[str, Any]

_ROUNDING = 1e-9  # float64 has 16 digits, and sums over 64 rows lose a few of them


@dataclass(frozen=True)
class FormulaCheck:
    """Result of checking one property.

    Attributes:
        name: the property.
        figure: the worst value over all trials, in float64.
        limit: upper bound of `figure`, or its lower bound if `above` is True.
        above: True if `figure` must be above `limit`.
        trials: number of random inputs.
    """

    name: str
    figure: float
    limit: float
    above: bool
    trials: int

    @property
    def ok(self) -> bool:
        """True if the property held in every trial; False for NaN."""
        return self.figure > self.limit if self.above else self.figure <= self.limit


def verify(trials: int = 100, seed: int = 0) -> Iterator[FormulaCheck]:
    """Run every check on random inputs of its own.

    Args:
        trials: number of random inputs per check.
        seed: seed of the inputs.
    """
    for name, (figure, limit, above) in _CHECKS.items():
        # A stream for each check, so that adding a check changes the inputs of no other.
        rng = Random(derive_seed(seed, "verify", name))
        figures = [figure(rng) for _ in range(trials)]
        # min and max skip or keep NaN by its place; a NaN must fail the check.
        worst = math.nan if any(map(math.isnan, figures)) else (min if above else max)(figures)
        yield FormulaCheck(name, worst, limit, above, trials)


def _groups(rng: Random, all_correct: bool = False) -> Columns:
    """Make random columns of four groups of 2 to 16 completions in random order, with rewards 0 and 1 and lengths."""
    ids = [group for group in range(4) for _ in range(rng.randint(2, 16))]
    # Sorted groups would hide a formula that takes neighbors for members of a group.
    rng.shuffle(ids)
    correct = torch.tensor([all_correct or rng.random() < 0.6 for _ in ids])
    return {
        "group_ids": torch.tensor(ids),
        "correct": correct,
        "rewards": correct.double(),
        "lengths": torch.tensor([rng.randint(1, 1000) for _ in ids]),
        "turn_ids": torch.zeros((len(ids), 1), dtype=torch.long),
        "max_tokens": 1000,
    }


def _run(kind: str, name: str, columns: Columns, **params: Any) -> Tensor:
    bound = find(kind, name).bind(params)
    return bound(*(columns[column] for column in bound.reads))


def _length_part(name: str, columns: Columns) -> Tensor:
    """Return A_len [N], the part of the advantages that a brevity weight of 1 adds."""
    return _run("advantage", name, columns, beta=1.0) - _run("advantage", name, columns, beta=0.0)


def _coupled_change(rng: Random) -> float:
    """Return the largest change of the advantages of all-correct groups between two length penalties."""
    columns = _groups(rng, all_correct=True)
    low, high = (_run("advantage", "grpo_lp", columns, gamma=10 ** -rng.uniform(3, 4)) for _ in range(2))
    return float((low - high).abs().max())


def _decoupled_ratio(rng: Random) -> float:
    """Return the largest difference between A(2 beta) and 2 A(beta), in all-correct groups."""
    columns = _groups(rng, all_correct=True)
    once, twice = (_run("advantage", "dca", columns, beta=beta) for beta in (0.2, 0.4))
    return float((twice - 2 * once).abs().max())


def _zero_sum(rng: Random) -> float:
    """Return the largest sum of length advantages over a group's correct rows, or their size on wrong rows."""
    columns = _groups(rng)
    brevity, ids = _length_part("dca", columns), columns["group_ids"]
    outside = float(brevity[~columns["correct"]].abs().sum())
    return max(outside, *(abs(float(brevity[(ids == group) & columns["correct"]].sum())) for group in range(4)))


def _largest_length_part(rng: Random) -> float:
    return float(_length_part("dca", _groups(rng)).abs().max())


def _margin(rng: Random) -> float:
    """Return the smallest margin of a correct answer over a wrong one of its group; infinite without a mixed group."""
    columns, margins = _groups(rng), [math.inf]
    for name in ("dca", "dca_rloo"):
        actual, correct = _run("advantage", name, columns, beta=0.2), columns["correct"]
        for group in range(4):
            rows = columns["group_ids"] == group
            right, wrong = actual[rows & correct], actual[rows & ~correct]
            if len(right) and len(wrong):
                margins.append(float(right.min() - wrong.max()))
    return min(margins)


def _leave_one_out(rng: Random) -> float:
    """Return the largest difference between leave-one-out forms and n/(n-1) times the others."""
    columns = _groups(rng)
    same = columns["group_ids"][:, None] == columns["group_ids"]
    sizes, right = same.sum(-1).double(), (same & columns["correct"]).sum(-1).double()
    plain = _run("advantage", "rloo", columns) - _run("advantage", "grpo", columns) * sizes / (sizes - 1)
    # With one correct row nobody is left to compare it with, and its length credit is 0.
    factor = (right / (right - 1)).where(right > 1, 0.0)
    length = _length_part("dca_rloo", columns) - _length_part("dca", columns) * factor
    return float(torch.cat([plain, length]).abs().max())


def _dca_by_hand(rng: Random) -> float:
    """Return the largest difference between DCA's advantages and the printed formula, term by term."""
    columns = _groups(rng)
    actual = _run("advantage", "dca", columns, beta=0.2).tolist()
    ids, lengths, rewards, correct = (columns[name].tolist() for name in ("group_ids", "lengths", "rewards", "correct"))
    worst = 0.0
    for group in set(ids):
        rows = [row for row, other in enumerate(ids) if other == group]
        members = [row for row in rows if correct[row]]
        scaled = zip(members, _standardized([lengths[row] for row in members]), strict=True)
        # Clamped, because exp overflows far out; beyond 20 the sigmoid is 0 or 1 to eight digits.
        scores = {row: 1 / (1 + math.exp(-max(-20.0, min(20.0, z)))) for row, z in scaled}
        mean = sum(scores.values()) / max(len(scores), 1)
        for row, outcome in zip(rows, _standardized([rewards[row] for row in rows]), strict=True):
            worst = max(worst, abs(actual[row] - outcome + 0.2 * (scores.get(row, mean) - mean)))
    return worst


def _standardized(values: Sequence[float]) -> list[float]:
    mean = sum(values) / max(len(values), 1)
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / max(len(values), 1))
    return [(value - mean) / (spread + 1e-8) if spread >= 1e-8 else 0.0 for value in values]


def _prime_by_hand(rng: Random) -> float:
    """Return the largest difference between PRIME's advantages and the printed formula, term by term."""
    width, gamma = 12, rng.choice([1.0, rng.uniform(0.5, 1.0)])
    columns = dict(_groups(rng))
    # Gaps in the mask are the observations of an environment; a row has at least one token.
    mask = torch.tensor([[t == 0 or rng.random() < 0.7 for t in range(width)] for _ in columns["group_ids"]])
    rewards = torch.tensor([[rng.gauss(0, 0.1) for _ in range(width)] for _ in columns["group_ids"]]).double()
    outcome = _run("advantage", "rloo", columns)
    columns |= {"response_mask": mask, "process_rewards": rewards, "advantages": outcome[:, None] * mask, "step": 0}
    actual = _run("transform", "process_rloo", columns, gamma=gamma, norm="none").tolist()
    ids, outcomes = columns["group_ids"].tolist(), columns["rewards"].tolist()
    steps = [[float(r) for r, on in zip(*row, strict=True) if on] for row in zip(rewards, mask, strict=True)]
    worst = 0.0
    for i, row in enumerate(steps):
        others = [j for j in range(len(ids)) if ids[j] == ids[i] and j != i]
        first = outcomes[i] - sum(outcomes[j] for j in others) / len(others)
        baseline = sum(sum(steps[j]) / len(steps[j]) for j in others) / len(others)
        places = [t for t in range(width) if mask[i, t]]
        for t, position in enumerate(places):
            process = sum(gamma ** (s - t) * (row[s] - baseline) for s in range(t, len(row)))
            worst = max(worst, abs(actual[i][position] - first - process))
    return worst


def _mixed_batch(rng: Random) -> tuple[Batch, Tensor, Objective]:
    """Make a batch of policy and expert rows in random order, the current log-probs, and MIX's objective."""
    count, width = rng.randint(3, 10), 8
    mask = torch.tensor(
        [[t < length for t in range(width)] for length in [rng.randint(1, width) for _ in range(count)]]
    )
    old, new, advantages = (
        torch.tensor([[rng.gauss(centre, 0.5) for _ in range(width)] for _ in range(count)]).double() * mask
        for centre in (-1.0, -1.0, 0.0)
    )
    # Row 0 is the expert's and row 1 the policy's, so that no batch lacks one of the two.
    expert = torch.tensor([row < 1 or (row > 1 and rng.random() < 0.4) for row in range(count)])
    batch = Batch(
        input_ids=mask.long(),
        attention_mask=mask,
        response_mask=mask,
        sampler_logprobs=old,
        rewards=old[:, 0],
        correct=expert,
        lengths=mask.sum(-1),
        group_ids=torch.arange(count),
        is_expert=expert,
        advantages=advantages.where(~expert[:, None], 0.0),
        max_tokens=width,
        extra={"old_logprobs": old},
    )
    terms = [find("loss", name).bind({"weight": 1.0}) for name in ("ppo_clip", "sft")]
    reduction = find("reduction", rng.choice(["token_mean", "sequence_mean"])).bind()
    return batch, new, Objective(terms, reduction)


def _loss_of(batch: Batch, new: Tensor, objective: Objective, parts: Sequence[Sequence[int]]) -> Tensor:
    """Return the loss and its gradient with respect to every log-prob, summed over parts of the rows, as one vector."""
    step = objective.step(batch)
    logprobs = new.clone().requires_grad_()
    total: Any = 0.0
    for part in parts:
        rows = torch.tensor(part)
        columns = {name: batch.column(name)[rows] for name in objective.reads - {objective.share}}
        columns |= {"logprobs": logprobs[rows], objective.share: 0.1}
        total = total + step.of(columns, {name: weight[rows] for name, weight in step.weights.items()})[0]
    total.backward()
    assert logprobs.grad is not None
    return torch.cat([total.detach()[None], logprobs.grad.flatten()])


def _split_rows(rng: Random, ranks: bool) -> float:
    """Return the largest difference between loss and gradient summed over micro-batches and those of all rows at once.

    Args:
        rng: source of the random inputs.
        ranks: divide the rows, in random order, among simulated ranks, each with its own micro-batches.
    """
    batch, new, objective = _mixed_batch(rng)
    rows = list(range(len(new)))
    order, size = (rng.sample(rows, len(rows)), rng.randint(2, len(rows))) if ranks else (rows, 1)
    parts = [part for rank in range(size) for part in _cut(order[rank::size], rng)]
    return float((_loss_of(batch, new, objective, parts) - _loss_of(batch, new, objective, [rows])).abs().max())


def _cut(rows: Sequence[int], rng: Random) -> Iterator[list[int]]:
    start = 0
    while start < len(rows):
        end = start + rng.randint(1, 3)
        yield list(rows[start:end])
        start = end


_CHECKS: dict[str, tuple[Callable[[Random], float], float, bool]] = {
    "coupled penalty: gamma does not change advantages of an all-correct group": (_coupled_change, 1e-3, False),
    "DCA: twice the beta gives an all-correct group twice the advantages": (_decoupled_ratio, _ROUNDING, False),
    "DCA: length advantages sum to 0 over the correct, and are 0 elsewhere": (_zero_sum, _ROUNDING, False),
    "DCA: the size of a length advantage is below 1": (_largest_length_part, 1 - _ROUNDING, False),
    "DCA: margin of correct over wrong answers at beta 0.2": (_margin, 0.0, True),
    "leave-one-out is n/(n-1) times the mean-centered form": (_leave_one_out, _ROUNDING, False),
    "DCA equals its formula, term by term": (_dca_by_hand, _ROUNDING, False),
    "PRIME: its literal form (norm none, no whiten) equals its formula": (_prime_by_hand, _ROUNDING, False),
    "MIX: loss and gradient do not depend on micro-batches": (partial(_split_rows, ranks=False), _ROUNDING, False),
    "MIX: loss and gradient do not depend on the number of simulated ranks": (
        partial(_split_rows, ranks=True),
        _ROUNDING,
        False,
    ),
}
"""Property -> (function that computes the figure of one trial, limit, True if the figure must be above the limit)."""
