"""From tables of results to one table of comparisons, each with its verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from retrain.campaign.plan.outcome import Outcome
from retrain.campaign.verdict import judging, statistics, withholding
from retrain.campaign.verdict.results import ALL_TASKS, Cell, Results, mean_over_tasks
from retrain.campaign.verdict.statistics import LEVEL, Estimate, Mean, SequentialFamily, Tested, mean_of
from retrain.campaign.verdict.verdict_kinds import KINDS, VerdictKind
from retrain.functional.evaluation import aes
from retrain.report.page import plural

_MORE = 4
"""Times as many problems, or more seeds, of which `noise_sources` says what they would bring."""
NOTHING = Estimate(math.nan, math.nan, math.nan)
"""Estimate without a run."""


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
        starts: number of warm starts of these runs.
        count: number of independent differences: seeds, or warm starts if the campaign has several.
        left_out: seeds of the plan without a pair.
        mean: mean difference with its standard error; difference: the same with a 95% t interval, uncorrected.
        judged: the tests.
        look: the look at which it ended or for which it waits, of a campaign with looks; else None.
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
    count: int
    left_out: tuple[int, ...]
    mean: Mean
    judged: judging.Judged = field(default_factory=judging.Judged)
    look: judging.Look | None = None
    effect: float = math.nan
    area: Estimate = NOTHING
    avg_tokens: Estimate = NOTHING
    aes: Estimate = NOTHING
    failures: str = ""
    withheld: str = ""
    warning: str = ""

    @property
    def difference(self) -> Estimate:
        """Mean difference with its 95% t interval; with looks, that of the level of its look."""
        return self.mean.interval(self.look.level if self.look else LEVEL)

    @property
    def kind(self) -> VerdictKind:
        """The verdict; "open" if it is withheld."""
        return "open" if self.withheld else self.judged.kind

    @property
    def by_start(self) -> bool:
        """True if the differences of each warm start are averaged."""
        return self.starts > 1 or (self.paired and self.count < len(self.seeds))

    @property
    def waits(self) -> bool:
        """True before the look of the comparison is complete."""
        return self.look is not None and not self.look.ended

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
        tables: results by outcome and task, in this order; with looks without the runs beyond them.
        comparisons: all comparisons, family by family within an outcome.
        passed: number of looks that are complete and tested.
        stopped: (task, condition) -> number of seeds at which the looks stopped it.
    """

    tables: tuple[Results, ...]
    comparisons: tuple[Comparison, ...]
    passed: int = 0
    stopped: Mapping[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])

    @property
    def first(self) -> Results:
        """Table of the first outcome and task; conditions, baseline and seeds are the same in all tables."""
        return self.tables[0]

    @property
    def main(self) -> list[Results]:
        """Tables of the first outcome, one for each task."""
        return [table for table in self.tables if table.outcome == self.first.outcome]

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes."""
        return list(dict.fromkeys(table.outcome for table in self.tables))

    @property
    def shown(self) -> list[Comparison]:
        """Comparisons without those of the baseline that are in the ladder as well."""
        # Such a pair has two corrected p-values, one in each family, and a reader needs one.
        ladder = {(test.outcome, test.condition, test.against) for test in self.comparisons if test.family == "ladder"}
        return [
            test
            for test in self.comparisons
            if test.family != "baseline" or (test.outcome, test.condition, test.against) not in ladder
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
    outcomes = dict.fromkeys(results.outcome for results in tables)
    families: list[Family] = []
    for outcome in outcomes:
        families += families_of([results for results in tables if results.outcome == outcome])
    if tables[0].looks:
        return _analyze_looks(tables, families)
    compared = (compare(contrasts, name) for name, contrasts in families)
    return Analysis(tuple(tables), tuple(comparison for family in compared for comparison in family))


Family = tuple[str, list[judging.Contrast]]
"""Name of a family of comparisons that is corrected alone, and its comparisons."""


def families_of(tables: Sequence[Results]) -> list[Family]:
    """Return the families of one outcome: the declared comparison, then those of the others."""
    first = tables[0]
    others = [label for label in first.conditions if label != first.baseline]
    families: dict[str, list[judging.Contrast]] = {"primary": []}
    if len(tables) == 1 and not first.task:
        # A ladder on which all extend the baseline would be the family of the baseline again.
        ladder = set(first.ladder) != {(label, first.baseline) for label in others}
        families["ladder"] = [judging.Contrast(first, *pair) for pair in first.ladder if ladder]
        families["baseline"] = [judging.Contrast(first, label, first.baseline) for label in others]
    else:
        mean = [replace(mean_over_tasks(tables), units=withholding.task_units(tables))] if len(tables) > 1 else []
        for suffix, controls in (("", False), (" of controls", True)):
            side = [label for label in others if (label in first.controls) is controls]
            pairs = [(label, first.control_of.get(label, first.baseline)) for label in side]
            families[f"pooled{suffix}"] = [judging.Contrast(each, *pair) for each in mean for pair in pairs]
            families[f"tasks{suffix}"] = [judging.Contrast(each, *pair) for pair in pairs for each in tables]
    claimed: list[judging.Contrast] = []
    for name, contrasts in families.items():
        claimed += [each for each in contrasts if (each.results.task, *each.labels) == first.claimed]
        families[name] = [each for each in contrasts if (each.results.task, *each.labels) != first.claimed]
    # The pair may be in the ladder and in the baseline's family; it is tested once.
    families["primary"] = claimed[-1:]
    return [(name, contrasts) for name, contrasts in families.items() if contrasts]


def compare(contrasts: Sequence[judging.Contrast], family: str) -> list[Comparison]:
    """Compare conditions as one family."""
    if not contrasts:
        return []
    alpha = contrasts[0].results.alpha
    verdicts = judging.judge(contrasts, judging.tests_of(contrasts), alpha)
    return [_compared(family, contrasts, index, judged, alpha) for index, judged in enumerate(verdicts)]


def _compared(
    family: str,
    contrasts: Sequence[judging.Contrast],
    index: int,
    judged: judging.Judged,
    alpha: float,
    look: judging.Look | None = None,
) -> Comparison:
    """Return a comparison with its estimates, its verdict, and what qualifies it."""
    contrast = contrasts[index]
    # Runs that are equal in everything measured were not changed by the method, whatever the test says.
    if _same(contrast):
        judged = replace(judged, kind="same")
    comparison = replace(_described(contrast, family, len(contrasts)), judged=judged, look=look)
    counted = judged
    if not comparison.waits and any(cell.status == "failed" for each in contrasts for cell in each.results.runs):
        failed = [each._replace(results=each.results.with_failures()) for each in contrasts]
        counted = judging.judge(failed, judging.tests_of(failed), alpha, look)[index]
    return replace(comparison, **_remarks(contrast, comparison, counted))


def _described(contrast: judging.Contrast, family: str, size: int) -> Comparison:
    """Return a comparison with its estimates, before the tests."""
    results, condition, against = contrast
    pairs = results.pairs(condition, against)
    seeds = tuple(cell.seed for cell, _ in pairs) if results.paired else tuple(results.done(condition))
    planned = {cell.seed for label in contrast.labels for cell in results.of(label)}
    scores = [_aes(results, *pair) for pair in pairs]
    compared = [cell for pair in pairs for cell in pair]
    if not results.paired:
        compared = [cell for label in contrast.labels for cell in results.done(label).values()]
    differences = contrast.differences()
    return Comparison(
        condition=condition,
        against=against,
        task=results.task,
        family=family,
        size=size,
        alpha=results.alpha,
        outcome=results.outcome,
        seeds=seeds,
        runs=(len(results.done(condition)), len(results.done(against))),
        paired=results.paired,
        starts=len({cell.start for cell in compared}),
        count=len(differences),
        left_out=tuple(sorted(planned - set(seeds))) if results.paired else (),
        mean=contrast.mean,
        effect=statistics.hedges_g([*differences.values()]),
        area=mean_estimate([*contrast.differences(judging.area).values()]),
        avg_tokens=mean_estimate([*contrast.differences(judging.length).values()]),
        aes=mean_estimate([score for score in scores if score is not None]),
    )


def _same(contrast: judging.Contrast) -> bool:
    """Return True if results, areas under the curve and tokens are equal in every seed, and the latter are known."""
    measured = [contrast.differences(measure) for measure in (judging.result, judging.area, judging.length)]
    return bool(measured[-1]) and not any(any(differences.values()) for differences in measured)


def _remarks(contrast: judging.Contrast, comparison: Comparison, counted: judging.Judged) -> dict[str, str]:
    """Return the texts on failed runs, on a withheld verdict, and on runs without an effect.

    Args:
        contrast: the comparison's data.
        comparison: the comparison with its verdict.
        counted: its verdict if failed runs count as the worst value.
    """
    results = contrast.results
    labels = contrast.labels
    # A missing or unfinished run is no evidence against a condition; a failed one may have failed by its method.
    lost = {label: [cell for cell in results.of(label) if cell.status == "failed"] for label in labels}
    texts = {"failures": "", "withheld": "", "warning": ""}
    failed = sum(map(len, lost.values()))
    kind = comparison.judged.kind
    # A comparison that waits for its look gets no verdict, also not in the words on failed runs.
    if failed and comparison.seeds and not comparison.waits:
        mean = contrast._replace(results=results.with_failures()).mean
        whose = " and ".join(f"{len(cells)} of {label}" for label, cells in lost.items() if cells)
        texts["failures"] = f"with the {plural(failed, 'failed run')} ({whose}) counted as the worst value seen, "
        texts["failures"] += f"{mean.value:+.3f}: {KINDS[counted.kind].words.partition(' {')[0]}"
        # Failed runs of the condition make it look too good, and those of the other too bad.
        doubtful = {"better": lost[labels[0]], "worse": lost[labels[1]]}.get(kind, [*lost[labels[0]], *lost[labels[1]]])
        if doubtful and kind not in ("open", counted.kind):
            texts["withheld"] = "the failed runs decide"
    constant = [label for label in labels if _constant(results, label)]
    if constant and any(map(results.values, labels)):
        texts["warning"] = f"every seed of {' and of '.join(constant)} has the same result: the seed changes nothing"
    # Runs that ignore the seed are one run, so that several of them are no sample.
    if len(constant) == 2 and kind != "same":
        texts |= {"withheld": texts["warning"], "warning": ""}
    if (
        results.control_of.get(labels[0]) == labels[1]
        and (kind == "same" or comparison.judged.test)
        and kind != "worse"
    ):
        missing = f"so {labels[1]} is not shown to be better than this control"
        texts["warning"] = "; ".join(filter(None, (texts["warning"], missing)))
    return texts | withholding.health(results, labels, texts["warning"])


def _constant(table: Results, condition: str) -> bool:
    """Return True if all runs of a condition, at least two, have equal curves that do not end at 0 or 1."""
    curves = [cell.curve for cell in table.done(condition).values()]
    # At 0 or 1 several runs can end alike by themselves; `withholding` judges those.
    return len(curves) > 1 and len(set(curves)) == 1 and curves[0][-1][1] not in (0.0, 1.0)


def _aes(table: Results, cell: Cell, base: Cell) -> float | None:
    """Return the accuracy-efficiency score of a run against another; None if an evaluation has no length."""
    measured = (cell.result, base.result, cell.avg_tokens, base.avg_tokens)
    finite = [value for value in measured if value is not None]
    return aes(*finite)[0] if len(finite) == len(measured) and table.outcome.metric == "accuracy" else None


def _analyze_looks(tables: Sequence[Results], families: Sequence[Family]) -> Analysis:
    """Compare at the declared looks: each comparison with the runs of the look at which it ended."""
    first = tables[0]
    sizes = tuple(map(len, first.looks))
    tests = [_sequential(contrasts) for _, contrasts in families]
    # The looks are replayed in their order, so that the result depends on the stored runs and not on when it is
    # computed.
    levels = statistics.nominal_levels(sizes, first.alpha)
    ended: dict[tuple[int, int], Comparison] = {}
    stopped: dict[tuple[str, str], int] = {}
    passed = 0
    while passed < len(sizes) and _complete(tables, passed, stopped):
        look = judging.Look(passed + 1, first.looks[passed], sizes, levels[passed], ended=True)
        for number, (name, contrasts) in enumerate(families):
            equal: dict[int, int] = {}
            members: list[int] = []
            for index in range(len(contrasts)):
                earlier = ended.get((number, index))
                if earlier is None:
                    members.append(index)
                # A shown difference leaves the family and lowers the bounds of the others; what ended as equal stays.
                elif earlier.look and earlier.kind not in ("better", "worse"):
                    equal[index] = earlier.look.number - 1
            for index, comparison in _at_look(name, contrasts, tests[number], members, equal, look).items():
                if comparison.kind in ("better", "worse", "equal", "not worse") or look.number == len(sizes):
                    ended[number, index] = comparison
        passed += 1
        stopped |= {
            key: sizes[passed - 1]
            for key in dict.fromkeys((results.task, label) for results in tables for label in results.conditions)
            if key not in stopped and not _open(families, ended, *key)
        }
    # After the last look nothing waits, but an index beyond it would not exist.
    last = min(passed, len(sizes) - 1)
    waiting = judging.Look(last + 1, first.looks[last], sizes, levels[last], ended=False)
    comparisons = [
        ended.get((number, index)) or _compared(name, contrasts, index, judging.Judged(), first.alpha, waiting)
        for number, (name, contrasts) in enumerate(families)
        for index in range(len(contrasts))
    ]
    kept = [_used(results, stopped) for results in tables]
    return Analysis(tuple(kept), tuple(comparisons), passed, stopped)


def _used(results: Results, stopped: Mapping[tuple[str, str], int]) -> Results:
    """Return the results without runs that were under way when the looks stopped their condition."""
    order = results.looks[-1]
    used = {label: order[: stopped.get((results.task, label), len(order))] for label in results.conditions}
    return results.without(lambda cell: cell.seed not in used[cell.condition])


def _sequential(contrasts: Sequence[judging.Contrast]) -> SequentialFamily:
    results = contrasts[0].results
    seeds = results.looks[-1]
    sizes = [len(look) for look in results.looks]
    floors = [contrast.floor for contrast in contrasts]
    return SequentialFamily(judging.paired_matrix(contrasts, seeds), sizes, floors, seeds, results.alpha)


def _at_look(
    family: str,
    contrasts: Sequence[judging.Contrast],
    tests: SequentialFamily,
    members: Sequence[int],
    equal: Mapping[int, int],
    look: judging.Look,
) -> dict[int, Comparison]:
    """Test the open comparisons of a family at a look: index -> comparison over the seeds of this look."""
    spent = statistics.spending(look.sizes, contrasts[0].results.alpha)[look.number - 1]
    corrected = tests.test(look.number - 1, members, equal)
    # The p-value without correction is that of a family of one.
    alone = {index: tests.test(look.number - 1, [index], {})[index] for index in corrected}
    tested = [
        Tested("exact", alone[index], corrected[index]) if index in corrected else Tested()
        for index in range(len(contrasts))
    ]
    # Baseline and undecided conditions have runs beyond this look, which it must not see.
    of_look = [contrast.of_seeds(look.seeds) for contrast in contrasts]
    judged = judging.judge(of_look, tested, spent, look)
    return {index: _compared(family, of_look, index, judged[index], spent, look) for index in members}


def _complete(tables: Sequence[Results], look: int, stopped: Mapping[tuple[str, str], int]) -> bool:
    """Return True if every run of a look has ended, except for those of conditions that an earlier look stopped."""
    seeds = {*tables[0].looks[look]}
    return all(
        cell.ended
        for results in tables
        for cell in results.runs
        if cell.seed in seeds and (results.task, cell.condition) not in stopped
    )


def _open(families: Sequence[Family], ended: Mapping[tuple[int, int], Comparison], task: str, label: str) -> bool:
    """Return True if a comparison that needs further runs of a condition has not ended; the mean needs every task."""
    return any(
        label in contrast.labels and contrast.results.task in (task, ALL_TASKS) and (number, index) not in ended
        for number, (_, contrasts) in enumerate(families)
        for index, contrast in enumerate(contrasts)
    )


def average(table: Results, condition: str, measure: judging.Measure = judging.result) -> Estimate:
    """Mean of a measure over the finished runs of a condition, with its 95% t interval; NaN if no run has it."""
    values = [measure(cell) for cell in table.done(condition).values()]
    return mean_estimate([value for value in values if value is not None])


def mean_estimate(values: Sequence[float]) -> Estimate:
    """Return the mean with its 95% t interval; NaN if there is no value, or one that is not known."""
    return mean_of(values).interval() if values and all(map(math.isfinite, values)) else NOTHING


def claims(analysis: Analysis) -> dict[str, bool]:
    """Return for each condition whether it holds in every outcome against the baseline; empty for one outcome.

    An outcome holds if it is better, or with a margin equal or not worse; of several tasks the mean decides.
    """
    # A claim on each task separately would need every one of them, and one lucky task none.
    task = ALL_TASKS if len(analysis.main) > 1 else analysis.first.task
    agreement: dict[str, dict[str, bool]] = {}
    for comparison in analysis.shown:  # a pair of the ladder has no second verdict, as in every table
        if comparison.task == task and comparison.against == analysis.first.baseline:
            style = KINDS[comparison.kind]
            holds = comparison.outcome.margin is not None if style.holds == "margin" else style.holds
            agreement.setdefault(comparison.condition, {})[comparison.outcome.metric] = holds
    return {label: all(held.values()) for label, held in agreement.items()} if len(analysis.outcomes) > 1 else {}


def with_spread(analysis: Analysis) -> list[Comparison]:
    """Return the comparisons of the first outcome within a task that have two pairs or more."""
    tasks = {table.task for table in analysis.main}
    return [each for each in analysis.of(analysis.first.outcome) if each.mean.dof > 0 and each.task in tasks]


def pooled_deviation(compared: Sequence[Comparison]) -> float:
    """Return the standard deviation of a paired difference, pooled over comparisons by their degrees of freedom."""
    dof = sum(comparison.mean.dof for comparison in compared)
    squares = sum(comparison.deviation**2 * comparison.mean.dof for comparison in compared)
    return math.sqrt(squares / dof) if dof else 0.0


def noise_sources(analysis: Analysis) -> str:
    """Return how much of the spread over seeds the sample of problems can explain, and what would reduce it.

    A run's share p of right answers has the variance p (1 - p) / problems from the sample of problems. Of a difference
    it is the sum of two; the pairing of runs removes an unknown part of it, so it is an upper bound.

    Returns:
        A sentence; "" for other outcomes than shares of problems, and without pairs of runs.
    """
    outcome = analysis.first.outcome
    tables = {table.task: table for table in analysis.main}
    problems = min((cell.problems for table in analysis.main for cell in table.runs if cell.done), default=0)
    compared = [comparison for comparison in with_spread(analysis) if comparison.paired and comparison.starts == 1]
    deviation = pooled_deviation(compared)
    # A mean over evaluations has less of this variance; how much less depends on the runs.
    if not problems or not deviation or outcome.summary == "mean":
        return ""
    # Pairing removes a part of it, so that the formula can exceed the whole deviation.
    sampled = min(fmean(_of_problems(each, tables[each.task], problems) for each in compared) ** 0.5, deviation)
    if not sampled:  # every run is right on all problems or on none: the deviation is the resolution, not a spread
        return ""
    # Four times the problems leave a quarter of their part of the variance.
    fewer = math.sqrt(deviation**2 - sampled**2 * (1 - 1 / _MORE))
    # The comparison with the most seeds: the others wait for runs that are planned anyway.
    most = max(compared, key=lambda comparison: comparison.count)
    now = deviation * statistics.detectable_effect(most.count, most.size, most.alpha)
    then = deviation * statistics.detectable_effect(most.count + _MORE, most.size, most.alpha)
    return (
        f"of the pooled standard deviation of {deviation:.3f} over seeds, at most {sampled:.3f} is from {problems} "
        f"held-out problems, and the rest from the runs: {_MORE} times the problems would bring it to {fewer:.3f} at "
        f"best; {_MORE} more seeds would detect {then:.3f} instead of {now:.3f}"
    )


def _of_problems(comparison: Comparison, table: Results, problems: int) -> float:
    """Return the variance that the sample of problems gives to a difference of two independent shares."""
    rates = [
        fmean(table.cells[label, seed].result or 0.0 for seed in comparison.seeds)
        for label in (comparison.condition, comparison.against)
    ]
    return sum(rate * (1 - rate) for rate in rates) / problems
