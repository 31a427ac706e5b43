"""From tables of results to one table of comparisons, each with its verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from statistics import fmean

from retrain.campaign.plan.outcome import Outcome
from retrain.campaign.verdict import statistics, withholding
from retrain.campaign.verdict.results import ALL_TASKS, Cell, Results, mean_over_tasks
from retrain.campaign.verdict.statistics import Estimate, Mean, Test, Tested, mean_of
from retrain.campaign.verdict.verdict_kinds import KINDS, VerdictKind
from retrain.functional.evaluation import aes
from retrain.report.page import plural

Measure = Callable[[Cell], "float | None"]
Pairing = tuple[Results, str, str]
"""Results, condition, and the condition that it is compared with."""
result, area, length = (attrgetter(name) for name in ("result", "area", "avg_tokens"))
NOTHING = Estimate(math.nan, math.nan, math.nan)
"""Estimate without a run."""


@dataclass(frozen=True)
class Judged:
    """Result of the tests of a family for one of its comparisons.

    Attributes:
        test, p, corrected: see `Tested`.
        equality, not_worse: corrected p-values of the two one-sided t tests of the margin; 1 without a margin, and
            where the 95% interval reaches beyond it.
        kind: "better" and "worse" are corrected differences; "equal" is within the margin; "not worse" is not worse by
            more than the margin; "same" is for identical runs.
    """

    test: Test = ""
    p: float = 1.0
    corrected: float = 1.0
    equality: float = 1.0
    not_worse: float = 1.0
    kind: VerdictKind = "open"


@dataclass(frozen=True)
class Comparison:
    """Comparison of two conditions in the results of their runs.

    Attributes:
        condition, against: labels; differences are condition minus against.
        task: name of the task; "" if there is one, "all tasks" for the mean over tasks.
        family: "primary" (the declared comparison), "ladder" (the condition extends `against`), "baseline", "pooled"
            (the mean over tasks) or "tasks"; those of controls end with "of controls". Each family is corrected alone.
        size, alpha: number of comparisons in the family, and its family-wise level.
        outcome: what is measured.
        seeds: seeds that finished in both conditions; of unpaired runs, those of the condition.
        runs: number of runs with a result of the condition, and of the other.
        paired: True if the seeds are pairs.
        starts: number of warm starts of these runs. With several, the differences of one warm start are averaged and
            count as one observation.
        left_out: seeds of the plan without a pair.
        mean: mean difference with its standard error; difference: the same with a 95% t interval, uncorrected.
        judged: the tests.
        effect: Hedges' g of the paired differences.
        area, avg_tokens, aes: paired differences that are not tested; see `functional.evaluation.aes`.
        failures: a sentence part that counts failed runs as the worst value seen; "" if none failed.
        withheld: why the verdict is withheld; "" otherwise.
        warning: a further remark; "" otherwise.
    """

    condition: str
    against: str
    task: str
    family: str
    size: int
    alpha: float
    outcome: Outcome
    seeds: tuple[int, ...]
    runs: tuple[int, int]
    paired: bool
    starts: int
    left_out: tuple[int, ...]
    mean: Mean
    judged: Judged = field(default_factory=Judged)
    effect: float = math.nan
    area: Estimate = NOTHING
    avg_tokens: Estimate = NOTHING
    aes: Estimate = NOTHING
    failures: str = ""
    withheld: str = ""
    warning: str = ""

    @property
    def difference(self) -> Estimate:
        """Mean difference with its 95% t interval."""
        return self.mean.interval

    @property
    def kind(self) -> VerdictKind:
        """The verdict; "open" if it is withheld."""
        return "open" if self.withheld else self.judged.kind

    @property
    def count(self) -> int:
        """Number of independent differences: seeds, or warm starts if there are several."""
        return self.starts if self.starts > 1 else len(self.seeds)

    @property
    def deviation(self) -> float:
        """Standard deviation of a paired difference: error * sqrt(dof + 1)."""
        return self.mean.error * math.sqrt(self.mean.dof + 1)

    @property
    def detectable(self) -> float:
        """Smallest true difference that is detected with a probability of 80 %; infinite or NaN if none is."""
        if not self.paired:
            return self.mean.error * statistics.detectable_shift(max(self.mean.dof, 1), self.size, self.alpha)
        return self.deviation * statistics.detectable_effect(int(self.mean.dof) + 1, self.size, self.alpha)

    @property
    def needed(self) -> int | None:
        """Number of seeds that would show equality within the margin; None without a margin, a spread or pairs."""
        if self.outcome.margin is None or not self.mean.error > 0 or not self.paired:
            return None
        return statistics.seeds_needed(self.outcome.margin, self.deviation, self.size, self.alpha)


@dataclass(frozen=True)
class Analysis:
    """All numbers of a report.

    Attributes:
        tables: results by outcome and task, in this order.
        comparisons: all comparisons, family by family within an outcome.
    """

    tables: tuple[Results, ...]
    comparisons: tuple[Comparison, ...]

    @property
    def first(self) -> Results:
        """Table of the first outcome and task; conditions, baseline and seeds are the same in all tables."""
        return self.tables[0]

    @property
    def main(self) -> list[Results]:
        """Tables of the first outcome, one for each task."""
        return [one for one in self.tables if one.outcome == self.first.outcome]

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes."""
        return list(dict.fromkeys(one.outcome for one in self.tables))

    @property
    def shown(self) -> list[Comparison]:
        """Comparisons without those of the baseline that are in the ladder as well."""
        ladder = {(one.outcome, one.condition, one.against) for one in self.comparisons if one.family == "ladder"}
        return [
            one
            for one in self.comparisons
            if one.family != "baseline" or (one.outcome, one.condition, one.against) not in ladder
        ]

    def of(self, outcome: Outcome) -> list[Comparison]:
        """Return the shown comparisons of an outcome."""
        return [comparison for comparison in self.shown if comparison.outcome == outcome]

    @property
    def lost(self) -> list[tuple[str, Cell]]:
        """Runs without a result in some outcome, with their task."""
        cells = {(table.task, cell.condition, cell.seed): cell for table in self.tables for cell in table.lost}
        return [(task, cell) for (task, _, _), cell in cells.items()]


def analyze(tables: Sequence[Results]) -> Analysis:
    """Compare the conditions of all tables, family by family. The result is deterministic."""
    outcomes = dict.fromkeys(one.outcome for one in tables)
    families = [_families([one for one in tables if one.outcome == outcome]) for outcome in outcomes]
    return Analysis(tuple(tables), tuple(one for found in families for one in found))


def _families(tables: Sequence[Results]) -> list[Comparison]:
    """Compare the tables of one outcome: the declared comparison, then the families of the others."""
    first = tables[0]
    others = [one for one in first.conditions if one != first.baseline]
    families: dict[str, list[Pairing]] = {"primary": []}
    if len(tables) == 1 and not first.task:
        ladder = set(first.ladder) != {(one, first.baseline) for one in others}
        families["ladder"] = [(first, *pair) for pair in first.ladder if ladder]
        families["baseline"] = [(first, one, first.baseline) for one in others]
    else:
        mean = [replace(mean_over_tasks(tables), units=withholding.task_units(tables))] if len(tables) > 1 else []
        for label, controls in (("", False), (" of controls", True)):
            side = [one for one in others if (one in first.controls) is controls]
            families[f"pooled{label}"] = [(table, one, first.baseline) for table in mean for one in side]
            families[f"tasks{label}"] = [(table, one, first.baseline) for one in side for table in tables]
    claimed = [place for places in families.values() for place in places if _key(place) == first.claimed][-1:]
    rest = {name: [place for place in places if _key(place) != first.claimed] for name, places in families.items()}
    return [one for name, places in (rest | {"primary": claimed}).items() for one in compare(places, name)]


def _key(place: Pairing) -> tuple[str, str, str]:
    return place[0].task, place[1], place[2]


def compare(places: Sequence[Pairing], family: str) -> list[Comparison]:
    """Compare the places (table, condition, against) as one family."""
    judged, found = _judge(places), list[Comparison]()
    failed = [(table.with_failures(), one, other) for table, one, other in places]
    counted = _judge(failed) if any(cell.status == "failed" for table, *_ in places for cell in table.runs) else judged
    for place, own, other, with_failures in zip(places, judged, counted, failed, strict=True):
        one = _described(place, family, len(places))
        notes = _remarks(place, replace(one, judged=own), other, with_failures)
        if place[0].units:
            notes["withheld"] = place[0].units
        kind = "same" if _same(place) else own.kind
        found.append(replace(one, judged=replace(own, kind=kind), **notes))
    return found


def _judge(places: Sequence[Pairing]) -> list[Judged]:
    """Test the comparisons of one family."""
    if not places:
        return []
    means = [_mean(place) for place in places]
    bounds = [_margin_tests(place[0], mean) for place, mean in zip(places, means, strict=True)]
    equality, not_worse = (statistics.holm([bound[side] for bound in bounds]) for side in (0, 1))
    judged: list[Judged] = []
    for place, tested, mean, *margin in zip(places, _tested(places), means, equality, not_worse, strict=True):
        alone = Judged(*tested, equality=margin[0], not_worse=margin[1]) if tested.test else Judged()
        judged.append(replace(alone, kind=_kind(alone, place[0].outcome.sign * mean.value, place[0].alpha)))
    return judged


def _tested(places: Sequence[Pairing]) -> list[Tested]:
    """Return the test that decides on each comparison of a family, with its p-values."""
    floors = [_floor(table) for table, *_ in places]
    if places[0][0].paired:
        rows = [_paired(*place, result) for place in places]
        units = sorted({unit for row in rows for unit in row})
        paired = [[row.get(unit, math.nan) for unit in units] for row in rows]
        tested = statistics.paired_tests(paired, floors, places[0][0].alpha)
    else:
        sides = [(table.values(condition), table.values(against)) for table, condition, against in places]
        tested = statistics.unpaired_tests(sides, floors)
    for index, (table, *pair) in enumerate(places):
        if all(len(table.done(label)) == 1 for label in pair):
            tested[index] = _problem_test(*_answers(table, *pair), len(places))
    return tested


def _problem_test(values: Sequence[float], others: Sequence[float], size: int) -> Tested:
    """Test two single runs by their problems, right or wrong; no test for other values, or fewer than two problems."""
    if len(values) < 2 or not {*values, *others} <= {0.0, 1.0}:
        return Tested()
    p = statistics.mcnemar(values, others)
    return Tested("McNemar", p, min(1.0, size * p))


def _kind(one: Judged, gain: float, alpha: float) -> VerdictKind:
    if one.corrected <= alpha:
        return "better" if gain > 0 else "worse"
    if one.equality <= alpha:
        return "equal"
    return "not worse" if one.not_worse <= alpha else "open"


def _margin_tests(table: Results, mean: Mean) -> tuple[float, float]:
    """Return the p-values of equality within the margin, and of being not worse by more than it.

    Both are 1 where the printed 95% interval reaches beyond the margin: it would contradict the verdict.
    """
    margin = table.outcome.margin
    if margin is None or withholding.margin_problem(table):
        return 1.0, 1.0
    above = mean.p_not_above(-margin) if mean.interval.low > -margin else 1.0
    below = mean.p_not_below(margin) if mean.interval.high < margin else 1.0
    return max(above, below), above if table.outcome.sign > 0 else below


def _mean(place: Pairing) -> Mean:
    table, condition, against = place
    if table.paired:
        return mean_of(list(_paired(*place, result).values()), _floor(table))
    return statistics.welch(table.values(condition), table.values(against), _floor(table))


def _floor(table: Results) -> float:
    """Return half the resolution of the metric: .5 / problems; 0 if it is unknown."""
    problems = max((cell.problems for cell in table.runs), default=0)
    return 0.5 / problems if problems else 0.0


def _paired(table: Results, condition: str, against: str, measure: Measure) -> dict[int, float]:
    """Return the differences of a measure by seed; with several warm starts, their means by warm start."""
    cells = [pair for pair in table.pairs(condition, against) if None not in map(measure, pair)]
    values = statistics.differences(*([measure(pair[side]) or 0.0 for pair in cells] for side in (0, 1)))
    starts = [cell.start for cell, _ in cells]
    if len(set(starts)) < 2:
        return {cell.seed: value for (cell, _), value in zip(cells, values, strict=True)}
    return {at: fmean(value for own, value in zip(starts, values, strict=True) if own == at) for at in set(starts)}


def _answers(table: Results, condition: str, against: str) -> tuple[list[float], list[float]]:
    """Return the values of both conditions for the problems of their only runs, which are the same."""
    left, right = (next(iter(table.done(one).values())).answers for one in (condition, against))
    return [*left.values()], [right[problem] for problem in left]


def _described(place: Pairing, family: str, size: int) -> Comparison:
    """Return a comparison with its estimates, before the tests."""
    table, condition, against = place
    pairs = table.pairs(condition, against)
    seeds = tuple(cell.seed for cell, _ in pairs) if table.paired else tuple(table.done(condition))
    planned = {cell.seed for label in (condition, against) for cell in table.of(label)}
    paired = list(_paired(*place, result).values())
    return Comparison(
        condition=condition,
        against=against,
        task=table.task,
        family=family,
        size=size,
        alpha=table.alpha,
        outcome=table.outcome,
        seeds=seeds,
        runs=(len(table.done(condition)), len(table.done(against))),
        paired=table.paired,
        starts=len({cell.start for cell, _ in pairs}) if table.paired else 1,
        left_out=tuple(sorted(planned - set(seeds))) if table.paired else (),
        mean=_mean(place),
        effect=statistics.effect_size(paired),
        area=mean_estimate(list(_paired(*place, area).values())),
        avg_tokens=mean_estimate(list(_paired(*place, length).values())),
        aes=mean_estimate([value for cell, other in pairs if (value := _aes(table, cell, other)) is not None]),
    )


def _same(place: Pairing) -> bool:
    """Return True if results, areas under the curve and tokens are equal in every seed, and the latter are known."""
    measures = (result, area, length)
    return bool(_paired(*place, length)) and not any(any(_paired(*place, one).values()) for one in measures)


def _remarks(place: Pairing, one: Comparison, counted: Judged, with_failures: Pairing) -> dict[str, str]:
    """Return the texts on failed runs, on a withheld verdict, and on runs without an effect."""
    table, *pair = place
    lost = {label: [cell for cell in table.of(label) if cell.status == "failed"] for label in pair}
    texts = {"failures": "", "withheld": "", "warning": ""}
    failed = sum(map(len, lost.values()))
    if failed and one.seeds:
        mean = _mean(with_failures)
        verdict = "inconclusive" if counted.kind == "open" else counted.kind
        whose = " and ".join(f"{len(cells)} of {label}" for label, cells in lost.items() if cells)
        texts["failures"] = f"with the {plural(failed, 'failed run')} ({whose}) counted as the worst value seen, "
        texts["failures"] += f"{mean.value:+.3f}: {verdict}"
        gains = {"better": lost[pair[0]], "worse": lost[pair[1]]}.get(one.judged.kind, [*lost[pair[0]], *lost[pair[1]]])
        if gains and one.judged.kind not in ("open", counted.kind):
            texts["withheld"] = "the failed runs decide"
    constant = [label for label in pair if _constant(table, label)]
    if constant and any(map(table.values, pair)):
        texts["warning"] = f"every seed of {' and of '.join(constant)} has the same result: the seed changes nothing"
    if len(constant) == 2 and one.mean.value:
        texts |= {"withheld": texts["warning"], "warning": ""}
    return texts | _health(table, pair, texts["warning"])


def _health(table: Results, pair: Sequence[str], warning: str) -> dict[str, str]:
    """Return the texts on values of different units and on runs that trained nothing."""
    if units := withholding.other_units(table, pair):
        return {"withheld": units}
    some = [warning] if warning else []
    for label in pair:
        count, reason = withholding.trained_nothing(table, label)
        runs = len(table.done(label))
        if count and count == runs:
            return {"withheld": f"{'all ' * (runs > 1)}{plural(runs, 'run')} of {label} trained nothing: {reason}"}
        some += [f"{count} of {runs} runs of {label} trained nothing: {reason}"] if count else []
    return {"warning": "; ".join(some)}


def _constant(table: Results, condition: str) -> bool:
    """Return True if all runs of a condition, at least three, have equal curves that do not end at 0 or 1."""
    curves = [cell.curve for cell in table.done(condition).values()]
    return len(curves) >= statistics.MIN_SEEDS and len(set(curves)) == 1 and curves[0][-1][1] not in (0.0, 1.0)


def _aes(table: Results, cell: Cell, base: Cell) -> float | None:
    """Return the accuracy-efficiency score of a run against another; None if an evaluation has no length."""
    measured = (cell.result, base.result, cell.avg_tokens, base.avg_tokens)
    known = [value for value in measured if value is not None]
    return aes(*known)[0] if len(known) == len(measured) and table.outcome.metric == "accuracy" else None


def average(table: Results, condition: str, measure: Measure = result) -> Estimate:
    """Mean of a measure over the finished runs of a condition, with its 95% t interval; NaN if no run has it."""
    values = [measure(cell) for cell in table.done(condition).values()]
    return mean_estimate([value for value in values if value is not None])


def mean_estimate(values: Sequence[float]) -> Estimate:
    """Return the mean with its 95% t interval; NaN if there is no value, or one that is not known."""
    return mean_of(values).interval if values and all(map(math.isfinite, values)) else NOTHING


def claims(analysis: Analysis) -> dict[str, bool]:
    """Return for each condition whether it holds in every outcome against the baseline; empty for one outcome.

    An outcome holds if it is better, or with a margin equal or not worse; of several tasks the mean decides.
    """
    task = ALL_TASKS if len(analysis.main) > 1 else analysis.first.task
    found: dict[str, dict[str, bool]] = {}
    for one in analysis.comparisons:
        if one.task == task and one.against == analysis.first.baseline:
            style = KINDS[one.kind]
            holds = one.outcome.margin is not None if style.holds == "margin" else style.holds
            found.setdefault(one.condition, {})[one.outcome.metric] = holds
    return {label: all(own.values()) for label, own in found.items()} if len(analysis.outcomes) > 1 else {}
