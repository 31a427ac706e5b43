"""Credit against the truth: values by continuations, and the gradient that every method expects.

On batches that the run would have trained on next, the value of every beginning of a completion is measured: it is
continued. That gives the true advantage of every token, twice and independently, and with it the policy gradient.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy.special import stdtrit
from torch import Tensor

from retrain.algorithms.graph.objective import Objective, source_of
from retrain.algorithms.planning.token_text import TokenText
from retrain.errors import ComponentError, DataError
from retrain.functional.seeds import derive_seed
from retrain.lab.audit import gradient_quality as G
from retrain.lab.audit.methods import BASELINE, ORACLE, USUAL, Method, own_method
from retrain.lab.monte_carlo.prefixes import credit, prefixes, values_at
from retrain.report.samples import best_and_worst
from retrain.run.collect import sampled, valid_rows
from retrain.run.run_context import RunContext
from retrain.types import POLICY_COLUMNS, Batch, Rollout

LEVEL = 0.05
"""Intervals have the level 1 - LEVEL."""
LOST = "where a wrong answer was lost"
"""The token of a wrong completion whose true advantage is the least."""
_SHOWN = 8
"""Times as many continuations for the completions that are shown."""

CreditFn = Callable[[Batch, int], Tensor]
"""(batch, its number) -> advantages [N, T]."""


class Figure(NamedTuple):
    """An estimate with its interval; None for what the data cannot tell."""

    value: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, numbers: Tensor, least: float = -math.inf, most: float = math.inf) -> Figure:
        """From (value, low, high), cut to the range that is possible."""
        value, low, high = numbers.tolist()
        if not all(map(math.isfinite, (value, low, high))):
            return cls(None, None, None)
        return cls(*(min(max(one, least), most) for one in (value, low, high)))


@dataclass(frozen=True)
class Measured:
    """A batch with its truth.

    Attributes:
        batch: with the columns that methods share, and `token_values`.
        first, second: [N, T], two independent estimates of every token's advantage.
        classes: masks [N, T] of kinds of tokens, by name.
    """

    batch: Batch
    first: Tensor
    second: Tensor
    classes: Mapping[str, Tensor]

    @property
    def truth(self) -> Tensor:
        """[N, T], the better estimate."""
        return (self.first + self.second) / 2


@dataclass(frozen=True)
class Verdict:
    """Figures of a method.

    Attributes:
        effective_batch: over that of the baseline.
        of_oracle: effective batch over that of the oracle. Both share their batches, so this interval tells whether
            a method is above the oracle, and the intervals of two effective batches do not.
        bias, noise, correlation: see `gradient_quality.Quality`; correlation of credit with the true advantage.
        where: size of its credit by kind of token, in multiples of its size overall.
    """

    effective_batch: Figure
    of_oracle: Figure
    bias: Figure
    noise: Figure
    correlation: Figure
    where: Mapping[str, float]

    @property
    def figures(self) -> dict[str, Figure]:
        """By the names of `retrain audit --json`."""
        return {
            "effective_batch": self.effective_batch,
            "of_oracle": self.of_oracle,
            "bias": self.bias,
            "noise": self.noise,
            "correlation": self.correlation,
        }


@dataclass(frozen=True)
class Shown:
    """A completion with the credit of its tokens: `truth`, and by method."""

    rollout: Rollout
    tokens: Sequence[str]
    truth: Sequence[float]
    credit: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Audit:
    """The audit of a checkpoint.

    Attributes:
        reliability: share of the variance of the measured advantages that is no noise, in [0, 1].
        methods: by name, the oracle among them. where: as in a verdict, of the true advantages.
        tokens: sampled by continuations. batches, continuations: what it was made from.
    """

    run: str
    step: int
    reliability: float
    methods: Mapping[str, Verdict]
    where: Mapping[str, float]
    shown: Sequence[Shown]
    tokens: int
    batches: int
    continuations: int

    def facts(self) -> dict[str, Any]:
        """As `retrain audit --json` prints it."""
        methods = {
            name: {figure: found._asdict() for figure, found in one.figures.items()}
            for name, one in self.methods.items()
        }
        return {"run": self.run, "step": self.step, "reliability": self.reliability, "methods": methods}


ReportProgress = Callable[[str], None]
"""Called with a line on what an audit has done, and how long the rest will take by what it took so far."""


def audit(
    context: RunContext,
    run: Path,
    names: Sequence[str],
    batches: int,
    continuations: int,
    progress: ReportProgress = lambda _: None,
) -> Audit:
    """Audit the credit of methods under the policy of a run that has been opened again.

    Args:
        names: of methods; without any, the usual ones and the run's own.
        batches: at least 4. continuations: of every beginning, at least 2.
        progress: called after each batch, and after each method.
    Raises:
        ComponentError: a method that does not exist, or a run with an environment.
        DataError: a batch of which nothing could be scored.
    """
    if context.env_pool is not None:
        problem = "its [environment] cannot be put back to the middle of an episode, where completions are continued"
        raise ComponentError(f"this run cannot be audited: {problem}", "audit a run without one")
    wanted = dict.fromkeys([BASELINE, *(names or (*USUAL, own_method(context.components)))])
    methods = {name: Method(context, name) for name in wanted if name != ORACLE}
    sampler, reduction = _Sampler(context, continuations), _reduction(context.objective)
    found, began = list[Measured](), time.monotonic()
    for index in range(batches):
        found.append(sampler.batch(index))
        progress(_so_far(f"continued the completions of batch {index + 1} of {batches}", began, index + 1, batches))
    reliability, verdicts = judge(found, methods, context.policy.gradient, reduction, progress)
    truth = _where([one.first for one in found], [one.second for one in found], found)
    shown = sampler.shown(found[0], methods)
    return Audit(str(run), context.steps, reliability, verdicts, truth, shown, sampler.tokens, batches, continuations)


def _so_far(what: str, began: float, done: int, of: int) -> str:
    """A line of progress with an estimate: the rest takes as long for each as what is done."""
    spent = time.monotonic() - began
    return f"{what} in {spent:.0f} s, about {spent / done * (of - done):.0f} s left of this part"


def _reduction(objective: Objective) -> Callable[[Batch], Tensor]:
    """How the run's loss weighs the policy's tokens."""
    terms = [one.name for one in objective.terms if source_of(one) == "policy"]
    if not terms:
        raise ComponentError("no loss term trains on what the policy samples, so that there is no credit", "add one")
    return lambda batch: objective.step(batch).weights[terms[0]]


class _Sampler:
    """Batches with their truth, of the problems that the run would have come to next.

    Attributes:
        tokens: sampled in continuations so far.
        rollouts: the rows of the first batch.
    """

    def __init__(self, context: RunContext, continuations: int) -> None:
        self._context, self._count = context, continuations
        self._text = TokenText(context.loaded.tokenizer)
        planning = context.components.signal("planning_mask")
        assert planning is not None, "it is a component of the package"
        self._planning = planning.build(context.resources)
        self._cursor, self.tokens = context.steps * context.prompts, 0
        self.rollouts: list[Rollout] = []

    def batch(self, index: int) -> Measured:
        """Batch number `index`; streams of its own, so that it is independent of others and of any training."""
        context = self._context
        seed = derive_seed(context.config.training.seed, "audit", context.steps, index)
        rollouts, problems, self._cursor = sampled(context, self._cursor, context.prompts, seed)
        kept = valid_rows(rollouts)
        if not kept:
            raise DataError("none of the completions of a batch could be scored; see retrain score, or the rewards")
        self.rollouts = self.rollouts or kept
        batch = context.layout.batch(kept, context.steps).replace(problems=problems)
        columns = context.policy.logprobs(batch, sorted(POLICY_COLUMNS))
        planning, _ = self._planning(batch.input_ids, batch.response_mask)
        first, second, values = self._truth(batch, self._count, seed)
        batch = batch.replace(**columns, planning_mask=planning, token_values=values)
        return Measured(batch, first, second, self._classes(batch))

    def _truth(self, batch: Batch, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Two estimates of every token's advantage, each of half of the continuations; and the values."""
        mask = batch.response_mask
        found, numbers = prefixes(batch.input_ids, mask, batch.group_ids, mask)
        seed = derive_seed(seed, "continuations")
        rewards, tokens = self._context.resources["continue_from"](batch.problems, found, count, seed)
        self.tokens += tokens
        halves = rewards[:, : count // 2], rewards[:, count // 2 :]
        first, second = (credit(values_at(mask, part, numbers), mask, batch.rewards, mask) for part in halves)
        return first, second, values_at(mask, rewards, numbers)

    def _classes(self, batch: Batch) -> dict[str, Tensor]:
        """Masks of kinds of tokens: by the planning signal, by text as the task knows it, by entropy."""
        mask, planning = batch.response_mask, batch.column("planning_mask").bool()
        found = {"planning": planning & mask, "execution": mask & ~planning, "answer": torch.zeros_like(mask)}
        for row, (ids, own, group) in enumerate(zip(batch.input_ids, mask, batch.group_ids.tolist(), strict=True)):
            texts = self._text.pieces(ids[own].tolist())
            text, ends = "".join(texts), [*accumulate(map(len, texts))]
            last = len(text.rstrip()) - len((text.split() or [""])[-1])
            known = self._context.task.spans(batch.problems[group][0], text)
            for name, spans in {
                "answer": [(last, len(text))],
                **{f"task: {name}": known[name] for name in known},
            }.items():
                inside = [
                    any(a < end and end - len(t) < b for a, b in spans) for t, end in zip(texts, ends, strict=True)
                ]
                found.setdefault(name, torch.zeros_like(mask))[row, own] = mask.new_tensor(inside)
        entropy = batch.column("entropy")
        edges = [-math.inf, *(float(entropy[mask].quantile(share)) for share in (0.25, 0.5, 0.75)), math.inf]
        for quarter, (low, high) in enumerate(pairwise(edges), 1):
            found[f"entropy, quarter {quarter}"] = mask & (entropy > low) & (entropy <= high)
        return found

    def shown(self, one: Measured, methods: Mapping[str, CreditFn]) -> list[Shown]:
        """The best and the worst completions of a prompt, their truth by more continuations."""
        places = best_and_worst([rollout.row() for rollout in self.rollouts])
        rows, sharper = one.batch.rows(torch.tensor(places)), self._count * _SHOWN
        first, second, _ = self._truth(rows, sharper, derive_seed(self._context.config.training.seed, "shown"))
        given = {name: method(one.batch, 0)[places] for name, method in methods.items()}
        found: list[Shown] = []
        for row, place in enumerate(places):
            rollout = self.rollouts[place]
            span = slice(len(rollout.prompt_ids), len(rollout.prompt_ids) + len(rollout.completion_ids))
            tokens = self._context.chat.pieces(rollout.completion_ids)
            truth = ((first + second) / 2)[row, span].tolist()
            found.append(
                Shown(rollout, tokens, truth, {name: all_[row, span].tolist() for name, all_ in given.items()})
            )
        return found


def judge(
    batches: Sequence[Measured],
    methods: Mapping[str, CreditFn],
    gradient: Callable[[Batch, Tensor], Tensor],
    reduction: Callable[[Batch], Tensor],
    progress: ReportProgress = lambda _: None,
) -> tuple[float, dict[str, Verdict]]:
    """Reliability of the truth, and the verdicts of the oracle and of every method, the baseline among them.

    The oracle's gradient has two independent estimates as well; their product is the square of the exact one's.

    Args:
        gradient: see `Policy.gradient`. reduction: weights [N, T] of a batch's tokens in the loss.
    """
    quantile = float(stdtrit(len(batches) - 1, 1 - LEVEL / 2))
    weights = [reduction(one.batch) for one in batches]
    began, passes = time.monotonic(), 3 + len(methods)  # two halves and the truth

    def gradients(credits_: Sequence[Tensor]) -> Tensor:
        pairs = zip(batches, weights, credits_, strict=True)
        return torch.stack([gradient(one.batch, weight * given) for one, weight, given in pairs])

    first, second = [one.first for one in batches], [one.second for one in batches]
    halves = gradients(first), gradients(second)
    # The true gradient weighs every completion alike, whatever the run's reduction does.
    true = torch.stack([gradient(one.batch, one.truth / len(one.batch.rewards)) for one in batches])
    quality = {ORACLE: G.quality((halves[0] + halves[1]) / 2, true, (halves[0] * halves[1]).sum(-1))}
    others = {ORACLE: (Figure(1.0, 1.0, 1.0), _where(first, second, batches))}
    del halves
    progress(_so_far("computed the true gradients", began, 3, passes))
    for number, (name, method) in enumerate(methods.items(), 4):
        given = [method(one.batch, index) for index, one in enumerate(batches)]
        x = gradients(given)
        quality[name] = G.quality(x, true, x.square().sum(-1))
        others[name] = _correlation(batches, given, quantile), _where(given, given, batches)
        progress(_so_far(f"judged {name}", began, number, passes))
    base, best = quality[BASELINE].worth, quality[ORACLE].worth
    verdicts = {
        name: Verdict(
            Figure.of(G.ratio_interval(one.worth / base, quantile), least=0.0),
            Figure.of(G.ratio_interval(one.worth / best, quantile), least=0.0),
            Figure.of(G.interval(one.bias, quantile), 0.0, 2.0),
            Figure.of(G.interval(one.noise, quantile), least=0.0),
            *others[name],
        )
        for name, one in quality.items()
    }
    return _reliability(batches), verdicts


def _covariance(batches: Sequence[Measured], given: Sequence[Tensor]) -> Tensor:
    """[1 + B, 3, 3] of credit, first and second truth over tokens."""
    columns = [
        torch.stack([values[one.batch.response_mask] for values in (x, one.first, one.second)], 1)
        for one, x in zip(batches, given, strict=True)
    ]
    return G.covariance(torch.stack([G.moments(table) for table in columns]))


def _reliability(batches: Sequence[Measured]) -> float:
    """Of the mean of both halves, by Spearman and Brown's formula from the correlation of one with the other."""
    found = _covariance(batches, [one.first for one in batches])[0]
    half = max(0.0, float(found[1, 2] / (found[1, 1] * found[2, 2]).sqrt().clamp(min=1e-30)))
    return 2 * half / (1 + half)


def _correlation(batches: Sequence[Measured], given: Sequence[Tensor], quantile: float) -> Figure:
    """Of credit with the true advantage over tokens; the noise of the measurement is taken out of the variance."""
    found = _covariance(batches, given)
    if float(G.interval(found[:, 1, 2], quantile)[1]) <= 0:  # nothing but noise may have been measured
        return Figure(None, None, None)
    along = (found[:, 0, 1] + found[:, 0, 2]) / 2
    return Figure.of(G.interval(along / (found[:, 0, 0] * found[:, 1, 2]).sqrt(), quantile), -1.0, 1.0)


def _where(first: Sequence[Tensor], second: Sequence[Tensor], batches: Sequence[Measured]) -> dict[str, float]:
    """Size of credit by kind of token over its size on all tokens: roots of mean products of independent estimates.

    LOST is a mean with its sign: the token is chosen by one half of the truth, and looked at in the other.
    """

    def size(masks: Sequence[Tensor]) -> float:
        products = torch.cat([(a * b)[mask] for a, b, mask in zip(first, second, masks, strict=True)])
        return math.sqrt(max(0.0, float(products.double().mean()))) if len(products) else math.nan

    whole = size([one.batch.response_mask for one in batches]) or math.nan
    names = dict.fromkeys(name for one in batches for name in one.classes)
    masks = {name: [one.classes.get(name, ~one.batch.response_mask & False) for one in batches] for name in names}
    found = {name: size(several) / whole for name, several in masks.items()}
    lost: list[Tensor] = []
    for one, a, b in zip(batches, first, second, strict=True):
        mask = one.batch.response_mask
        wrong = ~one.batch.correct & mask.any(-1)
        for chosen_by, seen in ((one.first, b), (one.second, a)):
            place = chosen_by.masked_fill(~mask, math.inf).argmin(-1, keepdim=True)
            lost.append(seen.gather(-1, place)[wrong, 0])
    return found | {LOST: float(torch.cat(lost).mean()) / whole}
