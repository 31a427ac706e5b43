"""The credit audit: compares the credit and the gradient of methods with the true advantages and the policy gradient.

The audit samples the batches that the run would have trained on next. It measures the value of every prefix of a
completion as the mean reward of continuations. Two independent halves of the continuations give two independent
estimates of the true advantage of every token, and of the policy gradient.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy.special import stdtrit
from torch import Tensor

from retrain.algorithms.graph.objective import Objective, source_of
from retrain.algorithms.planning.token_text import TokenText
from retrain.api import RunContext, sampled, valid_rows
from retrain.errors import ComponentError, DataError
from retrain.functional import masked
from retrain.functional.seeds import derive_seed
from retrain.lab.audit import gradient_quality as G
from retrain.lab.audit.methods import BASELINE, DEFAULT_METHODS, ORACLE, Method, own_method
from retrain.lab.controls import PLACEBO, permuted_in_rows
from retrain.lab.monte_carlo.continued_episodes import ContinuedEpisodes
from retrain.lab.monte_carlo.prefixes import credit, prefixes, values_at
from retrain.report.samples import best_and_worst
from retrain.types import POLICY_COLUMNS, Batch, Continue, Rollout

LEVEL = 0.05
"""Intervals have the level 1 - LEVEL."""
COSTLIEST = "costliest token of a wrong answer"
"""Label of the token with the lowest true advantage of a wrong completion."""
_ROUNDING = 1e-5
"""Largest difference of the credit of one row's tokens, relative to the largest credit, that is rounding."""
_SHOWN_FACTOR = 8
"""Completions on the page get this many times more continuations than others."""

CreditFn = Callable[[Batch, int], Tensor]
"""(batch, index of the batch) -> advantages [N, T]."""


class Figure(NamedTuple):
    """An estimate with its interval; all three are None if the data are too noisy for an estimate."""

    value: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, numbers: Tensor, least: float = -math.inf, most: float = math.inf) -> Figure:
        """Make a figure from [value, low, high], clipped to the range of possible values, `least` to `most`."""
        value, low, high = numbers.tolist()
        if not all(map(math.isfinite, (value, low, high))):
            return cls(None, None, None)
        return cls(*(min(max(number, least), most) for number in (value, low, high)))


@dataclass(frozen=True)
class MeasuredBatch:
    """A batch with measured true advantages.

    Attributes:
        batch: has the columns that methods share, among them `token_values`.
        first, second: [N, T], two independent estimates of every token's true advantage.
        classes: masks [N, T] of kinds of tokens, by name.
    """

    batch: Batch
    first: Tensor
    second: Tensor
    classes: Mapping[str, Tensor]

    @property
    def true_advantages(self) -> Tensor:
        """Mean of both estimates [N, T], which is the better estimate."""
        return (self.first + self.second) / 2


@dataclass(frozen=True)
class Verdict:
    """Figures of a method; docs/audit.md explains them.

    Attributes:
        effective_batch: effective signal-to-noise ratio of the gradient, relative to the baseline's.
        oracle_ratio: the same relative to the oracle's. Method and oracle are measured on the same batches, so the
            interval of this ratio, not those of two effective batches, shows if a method is above the oracle.
        bias, noise: see `gradient_quality.Quality`.
        correlation: correlation of credit with the true advantage over tokens.
        placebo_ratio: effective batch relative to that of the same credit at random tokens of its row; None if every
            row has one credit for all tokens. Both are measured on the same batches.
        where: size of credit on each kind of token, relative to its size on all tokens.
    """

    effective_batch: Figure
    oracle_ratio: Figure
    bias: Figure
    noise: Figure
    correlation: Figure
    placebo_ratio: Figure | None
    where: Mapping[str, float]

    @property
    def figures(self) -> dict[str, Figure]:
        """Figures by their names in the output of `retrain audit --json`."""
        return {
            "effective_batch": self.effective_batch,
            "of_oracle": self.oracle_ratio,
            "bias": self.bias,
            "noise": self.noise,
            "correlation": self.correlation,
        }


@dataclass(frozen=True)
class ShownCompletion:
    """A completion of the page, with its true advantages and each method's credit, one value per token."""

    rollout: Rollout
    tokens: Sequence[str]
    true_advantages: Sequence[float]
    credit: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Audit:
    """The audit of a checkpoint.

    Attributes:
        run: directory of the run.
        step: training step of the checkpoint.
        reliability: share of the measured advantages' variance that is not measurement noise, in [0, 1].
        methods: verdicts by the method's name, the oracle among them.
        where: size of the true advantages on each kind of token, relative to their size on all tokens.
        shown: completions of one prompt.
        tokens: number of tokens sampled in continuations.
        batches: number of batches.
        continuations: number of continuations of every prefix.
    """

    run: str
    step: int
    reliability: float
    methods: Mapping[str, Verdict]
    where: Mapping[str, float]
    shown: Sequence[ShownCompletion]
    tokens: int
    batches: int
    continuations: int

    def facts(self) -> dict[str, Any]:
        """Return the output of `retrain audit --json` as JSON values."""
        methods = {
            name: {
                **{figure: estimate._asdict() for figure, estimate in verdict.figures.items()},
                "of_placebo": verdict.placebo_ratio._asdict() if verdict.placebo_ratio else None,
            }
            for name, verdict in self.methods.items()
        }
        return {"run": self.run, "step": self.step, "reliability": self.reliability, "methods": methods}


ReportProgress = Callable[[str], None]
"""Called with a line of progress: completed work, its seconds, and an estimate of the seconds left."""


def audit(
    context: RunContext,
    run: Path,
    names: Sequence[str],
    batches: int,
    continuations: int,
    progress: ReportProgress = lambda _: None,
) -> Audit:
    """Audit the credit of methods under the policy of a run.

    Args:
        context: the reopened run.
        run: its directory.
        names: names of methods; empty selects `DEFAULT_METHODS` and the run's own method.
        batches: number of batches, at least 4.
        continuations: number of continuations of every prefix, at least 2.
        progress: called after each batch, and after each method.
    Raises:
        ComponentError: a method does not exist, or an environment's episodes cannot be replayed.
        DataError: no completion of a batch could be scored.
        UserCodeError: a replayed episode of an environment differs from the recorded one.
    """
    # Episodes must be replayed up to a prefix; without an environment a prefix is only its tokens.
    if context.env_pool is not None:
        resources = {**context.trained.resources, "continue_from": ContinuedEpisodes(context)}
        context = replace(context, trained=replace(context.trained, resources=resources))
    trained = context.trained
    # The baseline is always computed, because effective batches are relative to it.
    wanted = dict.fromkeys([BASELINE, *(names or (*DEFAULT_METHODS, own_method(trained.plan)))])
    methods = {name: Method(context, name) for name in wanted if name != ORACLE}
    sampler = BatchSampler(context, continuations)
    reduction = policy_reduction(trained.objective)
    measured: list[MeasuredBatch] = []
    began = time.monotonic()
    for index in range(batches):
        measured.append(sampler.batch(index))
        progress(_progress_line(f"sampled continuations of batch {index + 1}/{batches}", began, index + 1, batches))
    reliability, verdicts = judge(measured, methods, trained.policy.gradient, reduction, progress)
    where = _where([batch.first for batch in measured], [batch.second for batch in measured], measured)
    shown = sampler.shown(measured[0], methods)
    return Audit(str(run), trained.steps, reliability, verdicts, where, shown, sampler.tokens, batches, continuations)


def _progress_line(text: str, began: float, done: int, total: int) -> str:
    """Add to a text the time since `began`, and an estimate of the time for the other `total - done` units."""
    spent = time.monotonic() - began
    return f"{text} in {spent:.0f} s, about {spent / done * (total - done):.0f} s left of this part"


def policy_reduction(objective: Objective) -> Callable[[Batch], Tensor]:
    """Return the function that computes the weights [N, T] of a batch's tokens in the run's policy loss."""
    terms = [term.name for term in objective.terms if source_of(term) == "policy"]
    if not terms:
        problem = "this run has no credit: none of its loss terms trains on the policy's samples"
        raise ComponentError(problem, "add a policy loss to [algorithm]")
    return lambda batch: objective.step(batch).weights[terms[0]]


class BatchSampler:
    """Samples batches of the run's next problems and measures their true advantages.

    Attributes:
        tokens: number of tokens sampled in continuations so far.
        rollouts: the rows of the first batch.
    """

    def __init__(self, context: RunContext, continuations: int) -> None:
        self._context = context
        self._count = continuations
        self._continue: Continue = context.trained.resources["continue_from"]
        self._text = TokenText(context.trained.loaded.tokenizer)
        planning = context.trained.plan.signal("planning_mask")
        assert planning is not None, "planning_mask is a component of this package"
        self._planning = planning.build(context.trained.resources)
        # The audited problems are those that training would have come to next.
        self._cursor = context.trained.steps * context.prompts
        self.tokens = 0
        self.rollouts: list[Rollout] = []

    def batch(self, index: int) -> MeasuredBatch:
        """Sample and measure batch number `index`.

        Its random numbers derive from the seed, the step and the index, so it is independent of other batches and of
        training.
        """
        context = self._context
        seed = derive_seed(context.config.training.seed, "audit", context.trained.steps, index)
        first_group = index * context.prompts  # a group has one number in all batches, which `record` needs
        rollouts, problems, self._cursor = sampled(context, self._cursor, context.prompts, seed, first_group)
        kept = valid_rows(rollouts)
        if not kept:
            raise DataError("no completion of a batch could be scored; check the rewards with `retrain score`")
        if isinstance(self._continue, ContinuedEpisodes):
            self._continue.record(kept, seed)
        self.rollouts = self.rollouts or kept
        batch = context.layout.batch(kept, context.trained.steps).replace(problems=problems)
        columns = context.trained.policy.logprobs(batch, sorted(POLICY_COLUMNS))
        planning, _ = self._planning(batch.input_ids, batch.response_mask)
        first, second, values = self._true_advantages(batch, self._count, seed)
        batch = batch.replace(**columns, planning_mask=planning, token_values=values)
        return MeasuredBatch(batch, first, second, self._classes(batch))

    def _true_advantages(self, batch: Batch, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Measure the true advantages of a batch.

        Returns:
            Two estimates [N, T] of the advantages, each from half of the `count` continuations of every prefix, and
            the values [N, T] from all of them.
        """
        mask = batch.response_mask
        unique_prefixes, numbers = prefixes(batch.input_ids, mask, batch.group_ids, mask)
        seed = derive_seed(seed, "continuations")
        rewards, tokens = self._continue(batch.problems, unique_prefixes, count, seed)
        self.tokens += tokens
        halves = rewards[:, : count // 2], rewards[:, count // 2 :]
        first, second = (credit(values_at(mask, part, numbers), mask, batch.rewards, mask) for part in halves)
        return first, second, values_at(mask, rewards, numbers)

    def _classes(self, batch: Batch) -> dict[str, Tensor]:
        """Return masks [N, T] of kinds of tokens by name.

        The kinds are planning and execution tokens, the answer (the last word), spans that the task names, and
        quarters of the policy's entropy.
        """
        mask = batch.response_mask
        planning = batch.column("planning_mask").bool()
        masks = {"planning": planning & mask, "execution": mask & ~planning, "answer": torch.zeros_like(mask)}
        for row, (ids, response, group) in enumerate(zip(batch.input_ids, mask, batch.group_ids.tolist(), strict=True)):
            texts = self._text.pieces(ids[response].tolist())
            text = "".join(texts)
            ends = [*accumulate(map(len, texts))]
            last = len(text.rstrip()) - len((text.split() or [""])[-1])
            of_task = self._context.task.spans(batch.problems[group][0], text)
            for name, spans in {
                "answer": [(last, len(text))],
                **{f"task: {name}": of_task[name] for name in of_task},
            }.items():
                inside = [
                    # A token belongs to a span if they share a character: spans end within tokens.
                    any(a < end and end - len(t) < b for a, b in spans)
                    for t, end in zip(texts, ends, strict=True)
                ]
                masks.setdefault(name, torch.zeros_like(mask))[row, response] = mask.new_tensor(inside)
        entropy = batch.column("entropy")
        # Quartiles of this batch; an open lower end keeps the smallest entropy.
        edges = [-math.inf, *(float(entropy[mask].quantile(share)) for share in (0.25, 0.5, 0.75)), math.inf]
        for quarter, (low, high) in enumerate(pairwise(edges), 1):
            masks[f"entropy, quarter {quarter}"] = mask & (entropy > low) & (entropy <= high)
        return masks

    def shown(self, measured: MeasuredBatch, methods: Mapping[str, CreditFn]) -> list[ShownCompletion]:
        """Return the best and the worst completions of a prompt, with true advantages from more continuations."""
        indices = best_and_worst([rollout.row() for rollout in self.rollouts])
        rows = measured.batch.rows(torch.tensor(indices))
        seed = derive_seed(self._context.config.training.seed, "shown")
        # A reader looks at single tokens, where the noise of a few continuations would dominate.
        first, second, _ = self._true_advantages(rows, self._count * _SHOWN_FACTOR, seed)
        given = {name: method(measured.batch, 0)[indices] for name, method in methods.items()}
        shown: list[ShownCompletion] = []
        for row, index in enumerate(indices):
            rollout = self.rollouts[index]
            span = slice(len(rollout.prompt_ids), len(rollout.prompt_ids) + len(rollout.completion_ids))
            tokens = self._context.chat.pieces(rollout.completion_ids)
            advantages = ((first + second) / 2)[row, span].tolist()
            credits_ = {name: every_row[row, span].tolist() for name, every_row in given.items()}
            shown.append(ShownCompletion(rollout, tokens, advantages, credits_))
        return shown


def judge(
    batches: Sequence[MeasuredBatch],
    methods: Mapping[str, CreditFn],
    gradient: Callable[[Batch, Tensor], Tensor],
    reduction: Callable[[Batch], Tensor],
    progress: ReportProgress = lambda _: None,
) -> tuple[float, dict[str, Verdict]]:
    """Compute the reliability of the true advantages and the verdicts on the oracle and every method.

    The oracle's gradient has two independent estimates. Their inner product estimates the squared length of the exact
    gradient without bias.

    Args:
        batches: at least 3 measured batches.
        methods: methods by name; the baseline must be among them.
        gradient: see `Policy.gradient`.
        reduction: returns the weights [N, T] of a batch's tokens in the loss.
        progress: called after the true gradients, and after each method.
    Returns:
        The reliability in [0, 1], and the verdicts by name.
    """
    # The jackknife has one value for each batch, so B - 1 degrees of freedom.
    quantile = float(stdtrit(len(batches) - 1, 1 - LEVEL / 2))
    weights = [reduction(measured.batch) for measured in batches]
    began = time.monotonic()
    passes = 3 + len(methods)  # two halves, the true gradient, and the methods

    def gradients(credits_: Sequence[Tensor]) -> Tensor:
        pairs = zip(batches, weights, credits_, strict=True)
        return torch.stack([gradient(measured.batch, weight * given) for measured, weight, given in pairs])

    first = [measured.first for measured in batches]
    second = [measured.second for measured in batches]
    halves = gradients(first), gradients(second)
    moved = gradients(_shuffled(first, batches, ORACLE)), gradients(_shuffled(second, batches, ORACLE))
    # The true gradient gives every completion the same weight, unlike some reductions.
    exact = [measured.true_advantages / len(measured.batch.rewards) for measured in batches]
    true = torch.stack([gradient(measured.batch, weight) for measured, weight in zip(batches, exact, strict=True)])
    # Its squared length comes from the two halves, because that of their mean would contain their noise.
    quality = {ORACLE: G.quality((halves[0] + halves[1]) / 2, true, (halves[0] * halves[1]).sum(-1))}
    placebos = {ORACLE: G.quality((moved[0] + moved[1]) / 2, true, (moved[0] * moved[1]).sum(-1))}
    others = {ORACLE: (Figure(1.0, 1.0, 1.0), _where(first, second, batches))}
    # Each holds a gradient of the whole model for every batch.
    del halves, moved
    progress(_progress_line("computed the true gradients", began, 3, passes))
    for number, (name, method) in enumerate(methods.items(), 4):
        given = [method(measured.batch, index) for index, measured in enumerate(batches)]
        gradients_of_method = gradients(given)
        quality[name] = G.quality(gradients_of_method, true, gradients_of_method.square().sum(-1))
        # Shuffling credit that is the same at all tokens of a row changes nothing.
        if _distributes(given, batches):
            gradients_of_method = gradients(_shuffled(given, batches, name))
            placebos[name] = G.quality(gradients_of_method, true, gradients_of_method.square().sum(-1))
        others[name] = _correlation(batches, given, quantile), _where(given, given, batches)
        progress(_progress_line(f"computed the gradients of {name}", began, number, passes))
    base = quality[BASELINE].effective_snr
    best = quality[ORACLE].effective_snr

    def ratio(name: str, to: Tensor) -> Figure:
        return Figure.of(G.log_interval(quality[name].effective_snr / to, quantile), least=0.0)

    verdicts = {
        name: Verdict(
            effective_batch=ratio(name, base),
            oracle_ratio=ratio(name, best),
            bias=Figure.of(G.interval(quality[name].bias, quantile), 0.0, 2.0),
            noise=Figure.of(G.interval(quality[name].noise, quantile), least=0.0),
            correlation=others[name][0],
            placebo_ratio=ratio(name, placebos[name].effective_snr) if name in placebos else None,
            where=others[name][1],
        )
        for name in quality
    }
    return _reliability(batches), verdicts


def _shuffled(given: Sequence[Tensor], batches: Sequence[MeasuredBatch], name: str) -> list[Tensor]:
    """Return the credit of every batch with that of each row in a random order; one order for all calls of a method."""
    return [
        permuted_in_rows(token_credit, measured.batch.response_mask, derive_seed(index, PLACEBO, name))
        for index, (token_credit, measured) in enumerate(zip(given, batches, strict=True))
    ]


def _distributes(given: Sequence[Tensor], batches: Sequence[MeasuredBatch]) -> bool:
    """Return True if some tokens of a row have other credit than the rest of it, beyond rounding."""
    for token_credit, measured in zip(given, batches, strict=True):
        mask = measured.batch.response_mask
        spread = masked.keep(token_credit - masked.row_mean(token_credit, mask), mask).abs().amax()
        if spread > _ROUNDING * masked.keep(token_credit, mask).abs().amax():
            return True
    return False


def _covariance(batches: Sequence[MeasuredBatch], given: Sequence[Tensor]) -> Tensor:
    """Covariances [1 + B, 3, 3] of credit, first and second estimate over tokens; see `gradient_quality`."""
    columns = [
        torch.stack(
            [values[measured.batch.response_mask] for values in (token_credit, measured.first, measured.second)], 1
        )
        for measured, token_credit in zip(batches, given, strict=True)
    ]
    return G.covariance(torch.stack([G.moments(of_batch) for of_batch in columns]))


def _reliability(batches: Sequence[MeasuredBatch]) -> float:
    """Reliability of the mean of both estimates: 2 c / (1 + c), with c the correlation between them over tokens.

    References: Spearman (1910) and Brown (1910), the Spearman-Brown formula.
    """
    covariance = _covariance(batches, [measured.first for measured in batches])[0]
    # Noise can make the correlation negative, which would be a reliability below 0.
    half = max(0.0, float(covariance[1, 2] / (covariance[1, 1] * covariance[2, 2]).sqrt().clamp(min=1e-30)))
    return 2 * half / (1 + half)


def _correlation(batches: Sequence[MeasuredBatch], given: Sequence[Tensor], quantile: float) -> Figure:
    """Correlation of credit with the true advantage over tokens, corrected for measurement noise.

    The covariance of the two estimates replaces the variance of their mean, because their noise is independent.
    """
    covariances = _covariance(batches, given)
    if float(G.interval(covariances[:, 1, 2], quantile)[1]) <= 0:  # the estimates may consist of noise alone
        return Figure(None, None, None)
    along = (covariances[:, 0, 1] + covariances[:, 0, 2]) / 2
    return Figure.of(G.interval(along / (covariances[:, 0, 0] * covariances[:, 1, 2]).sqrt(), quantile), -1.0, 1.0)


def _where(first: Sequence[Tensor], second: Sequence[Tensor], batches: Sequence[MeasuredBatch]) -> dict[str, float]:
    """Size of credit on each kind of token, relative to its size on all tokens.

    A size is the root of the mean product of two independent estimates, which noise does not bias. COSTLIEST is
    different: it is a mean that keeps its sign, of tokens that one estimate selects and the other evaluates.

    Args:
        first, second: two independent estimates of the credit [N, T] of each batch.
        batches: the batches.
    """

    def size(masks: Sequence[Tensor]) -> float:
        products = torch.cat([(a * b)[mask] for a, b, mask in zip(first, second, masks, strict=True)])
        return math.sqrt(max(0.0, float(products.double().mean()))) if len(products) else math.nan

    whole = size([measured.batch.response_mask for measured in batches]) or math.nan
    names = dict.fromkeys(name for measured in batches for name in measured.classes)
    # A task may name spans in some batches only; in the others the class has no token.
    masks = {
        name: [measured.classes.get(name, torch.zeros_like(measured.batch.response_mask)) for measured in batches]
        for name in names
    }
    sizes = {name: size(several) / whole for name, several in masks.items()}
    costliest: list[Tensor] = []
    for measured, a, b in zip(batches, first, second, strict=True):
        mask = measured.batch.response_mask
        wrong = ~measured.batch.correct & mask.any(-1)
        for selecting, evaluated in ((measured.first, b), (measured.second, a)):
            lowest = selecting.masked_fill(~mask, math.inf).argmin(-1, keepdim=True)
            costliest.append(evaluated.gather(-1, lowest)[wrong, 0])
    return sizes | {COSTLIEST: float(torch.cat(costliest).mean()) / whole}
