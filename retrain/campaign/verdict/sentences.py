"""Verdicts as sentences, as lines with a picture for a terminal, and as JSON data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pydantic_core import to_jsonable_python

from retrain.campaign.plan.outcome import Outcome
from retrain.campaign.verdict import statistics
from retrain.campaign.verdict.analysis import Analysis, Comparison, claims
from retrain.campaign.verdict.results import ALL_TASKS, Cell
from retrain.campaign.verdict.statistics import Estimate
from retrain.report.page import Table, plural

MARKS = {"better": "▲", "worse": "▼", "equal": "=", "same": "=", "not worse": "≥", "open": "○"}
"""Mark of each kind of verdict in a terminal."""
TITLES = {
    "primary": "Declared before the runs, tested alone",
    "ladder": "Each condition against the one that it extends",
    "baseline": "Each condition against the baseline",
    "pooled": "Mean over tasks",
    "pooled of controls": "Mean over tasks, controls",
    "tasks": "Task by task",
    "tasks of controls": "Task by task, controls",
}
"""Title of each family."""
_PICTURE = 29
"""Columns of the picture of an interval; an odd number has a column in the middle, for 0 on a symmetric axis."""
_NAMED = 5
"""Largest number of inconclusive comparisons with a line of their own, and half that of runs without a result."""


def headline(analysis: Analysis) -> str:
    """Return the first sentences: numbers of runs with a result, and of verdicts for each outcome."""
    runs = [cell for table in analysis.main for cell in table.runs]
    done, verb = sum(cell.done for cell in runs), analysis.first.with_result
    start = f"All {len(runs)} runs {verb}." if done == len(runs) else f"{done} of {len(runs)} runs {verb}."
    if not analysis.comparisons:
        return f"{start} There is one condition, so there is nothing to compare."
    several = len(analysis.outcomes) > 1
    counts = [(f"{one.metric}: " if several else "") + _counted(_of(analysis, one)) for one in analysis.outcomes]
    return " ".join([start, *counts])


def _of(analysis: Analysis, outcome: Outcome) -> list[Comparison]:
    return [one for one in analysis.shown if one.outcome == outcome]


def _counted(found: Sequence[Comparison]) -> str:
    """Count the verdicts of the first families: `2 of 2 conditions measured: 1 worse (t test), 1 inconclusive.`"""
    main = next((one.family for one in found if one.family != "primary"), "primary")
    first = [one for one in found if one.family in ("primary", main)]
    kinds = Counter(short(one) for one in sorted(first, key=lambda one: [*MARKS].index(one.kind)) if one.seeds)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no seed has a result in both"
    what = plural(len(first), {"ladder": "change", "tasks": "comparison"}.get(main, "condition"))
    where = " in the mean over tasks" if main == "pooled" else ""
    return f"{sum(bool(one.seeds) for one in first)} of {what} measured{where}: {counts}."


def short(one: Comparison) -> str:
    """Return the verdict in a few words: `worse (t test)`, `equal within 0.02`, `inconclusive`."""
    margin = f"{one.outcome.margin:g}" if one.outcome.margin else ""
    words = {"equal": f"equal within {margin}", "not worse": f"not worse by more than {margin}"}
    words |= {"same": "identical", "open": "inconclusive"}
    by = f" ({one.judged.test})" if one.judged.test in ("t test", "McNemar") and one.kind in ("better", "worse") else ""
    if one.withheld:
        return "no verdict"
    if one.kind == "open" and not one.judged.test:
        return "no verdict" if one.seeds else "no pair"
    return words.get(one.kind, one.kind) + by


def sentence(one: Comparison) -> str:
    """Format a comparison as a sentence, such as

    `gtpo on top of maxrl: +0.012 accuracy (more is better), 95% CI [-0.004, +0.028], 8 seeds: inconclusive; ...`.
    """
    if not one.seeds:
        return f"{title(one)}: no seed has a result in both."
    return f"{title(one)}: {numbers(one)}: {conclusion(one)}."


def title(one: Comparison) -> str:
    """Return `gtpo on top of maxrl` for a condition that adds one stage to the other, else `maxrl against grpo`."""
    where = {"": "", ALL_TASKS: " in the mean over tasks"}.get(one.task, f" on {one.task}")
    added = one.condition.removeprefix(one.against)
    if added != one.condition and (added[:1] == "+" or (added[:1] == "_" and "+" in one.against)):
        return f"{added[1:]} on top of {one.against}{where}"
    return f"{one.condition} against {one.against}{where}"


def numbers(one: Comparison) -> str:
    """Return difference, interval and number of seeds."""
    seeds = plural(len(one.seeds), "seed" if one.paired else "run")
    seeds += f" on {one.starts} warm starts" if one.starts > 1 else "" if one.paired else ", not paired"
    if one.left_out:
        lone = ", ".join(map(str, one.left_out))
        seeds += f" (seed{'s' * (len(one.left_out) != 1)} {lone} without a pair)"
    unit = f" {one.outcome.metric} ({one.outcome.direction})"
    return f"{estimate(one.difference, '+.3f', unit)}, {seeds}"


def conclusion(one: Comparison) -> str:
    """Return the verdict with its reasons: p-value, assumptions, failed runs, and what these seeds can detect."""
    tested = _tested(one)
    start = short(one).removesuffix(f" ({one.judged.test})") + (f" ({'; '.join(tested)})" if tested else "")
    return "; ".join([*(_withheld(one) or [start]), *_remarked(one)])


def why(one: Comparison) -> str:
    """Return the reasons of a verdict for a reader who has just read it; what a t test assumes is in `notes`."""
    tested = [part for part in _tested(one) if part != _assumption(one)]
    return "; ".join(filter(None, [one.withheld, *tested, *_remarked(one)]))


def _withheld(one: Comparison) -> list[str]:
    return [f"no verdict: {one.withheld}"] if one.withheld else []


def _remarked(one: Comparison) -> list[str]:
    return [part for part in (*_reasons(one), one.failures, one.warning) if part]


def _tested(one: Comparison) -> list[str]:
    """Return the direction, the test with its p-value, and what it assumes."""
    judged, corrected = one.judged, "corrected " * (one.size > 1)
    if not judged.test or one.withheld or one.kind == "same":
        return []
    found: list[str] = []
    margins = {"equal": (judged.equality, "two one-sided t tests"), "not worse": (judged.not_worse, "one-sided t test")}
    if one.kind in margins:
        p, test = margins[one.kind]
        return [*found, f"{test}, {corrected}p {p_value(p)}"]
    test = "" if judged.test == "exact" else f"{judged.test}, "
    if one.family == "primary":
        test = f"tested alone, as declared; {test}"
    found.append(f"{test}{corrected}p {p_value(judged.corrected)}")
    if judged.test == "McNemar":
        found.append("of these two models, not of the methods")
    if judged.test == "t test" and one.kind in ("better", "worse"):
        found.append(_assumption(one))
    return found


def _assumption(one: Comparison) -> str:
    unit = "warm start" if one.starts > 1 else "seed" if one.paired else "run"
    least = plural(statistics.min_seeds_for_exact_test(one.alpha), unit)
    return f"assumes roughly normal differences; with {least} the exact test can decide"


def _reasons(one: Comparison) -> list[str]:
    """Return what would make an open comparison conclusive, and how a difference compares with the margin."""
    if one.kind in ("better", "worse") and one.judged.equality <= one.alpha:
        return [f"by less than the margin of {one.outcome.margin:g}"]
    if one.kind != "open" or one.withheld or not one.seeds:
        return []
    unit = "warm start" if one.starts > 1 else "seed" if one.paired else "run"
    if not one.judged.test:
        least = statistics.MIN_SEEDS
        return [f"{plural(one.count, unit)}, a verdict needs {least}"] if one.count < least else []
    found = [detects(one)] if detects(one) else []
    if (needed := one.needed) and needed > one.count:
        found.append(f"about {needed:,} {unit}s would show equality within {one.outcome.margin:g}")
    return found


def detects(one: Comparison) -> str:
    """Return what these seeds can detect: `8 seeds detect a difference of 0.031 in 80%`; "" if unknown."""
    if not 0 < one.detectable < math.inf or one.judged.test == "McNemar":
        return ""
    unit = "warm start" if one.starts > 1 else "seed" if one.paired else "run"
    number = plural(one.count, unit)
    return f"{number} detect{'s' * (one.count == 1)} a difference of {one.detectable:.3f} with 80% power"


def text(analysis: Analysis) -> str:
    """Format the verdict for a terminal: headline, a line with a picture for each comparison, and remarks."""
    lines = [headline(analysis)]
    for outcome in analysis.outcomes:
        lines += ["", *pictured(found)] if (found := _of(analysis, outcome)) else []
    return "\n".join([*lines, *(f"  {line}" for line in remarks(analysis))])


def pictured(found: Sequence[Comparison]) -> list[str]:
    """Return a header and a line with a picture for each comparison of one outcome, family by family."""
    span = drawn_range(found)
    outcome, families = found[0].outcome, list(dict.fromkeys(one.family for one in found))
    rows: list[tuple[str, ...]] = []
    for family in families:
        rows += [("", TITLES[family], "", "", "", "")] if len(families) > 1 else []
        for one in (one for one in found if one.family == family):
            row = texts(one)
            first = f"{MARKS[one.kind]} {row['verdict']}", row["comparison"], picture(one, span)
            rows.append((*first, row["difference"], row["seeds"], row["decided"]))
    p = "p" if all(one.size == 1 for one in found) else "corrected p"
    header = ("", "", _axis(span), f"{outcome.metric}, {outcome.direction}", "seeds" if found[0].paired else "runs", p)
    return [line.rstrip() for line in Table(header, rows).aligned()]


def texts(one: Comparison) -> dict[str, str]:
    """Return a comparison as a row of texts, by column; every table, line and page shows some of them."""
    judged, known = one.judged, bool(one.judged.test) and not one.withheld
    decided = {"equal": judged.equality, "not worse": judged.not_worse}.get(one.kind, judged.corrected)
    p = {"p": judged.p, "corrected p": judged.corrected, "decided": decided}
    return {
        "comparison": title(one),
        "difference": estimate(one.difference, "+.3f"),
        "verdict": short(one),
        "seeds": str(len(one.seeds)),
        "test": judged.test if known else "-",
        **{name: p_value(value).removeprefix("= ") if known else "-" for name, value in p.items()},
        "detectable": f"±{one.detectable:.3f}" if known and math.isfinite(one.detectable) else "-",
        "effect g": "-" if math.isnan(one.effect) else f"{one.effect:+.2f}",
        "P(improvement)": estimate(one.improvement, ".2f"),
        "area under curve": estimate(one.area, "+.3f"),
        "tokens per answer": estimate(one.avg_tokens, "+.1f"),
        "AES": estimate(one.aes, "+.3f"),
    }


def drawn_range(found: Sequence[Comparison]) -> tuple[float, float]:
    """Return the range of an axis with 0, the margin and every interval; wide intervals are cut.

    An interval can be ten times as wide as others. It is cut at three times the largest difference, margin, or half of
    the narrowest interval.
    """
    differences = [one.difference for one in found]
    largest = max((abs(one.value) for one in differences if math.isfinite(one.value)), default=0.0)
    narrowest = min((one.high - one.value for one in differences if math.isfinite(one.high)), default=0.0)
    limit = 3 * max([largest, narrowest, *(one.outcome.margin or 0.0 for one in found)])
    ends = [end for one in differences for end in one if math.isfinite(end)]
    ends += [side * (one.outcome.margin or 0.0) for one in found for side in (-1, 1)]
    low, high = max(-limit, min([0.0, *ends])), min(limit, max([0.0, *ends]))
    return (low, high) if high > low else (-1.0, 1.0)


def picture(one: Comparison, span: tuple[float, float]) -> str:
    """Draw an interval with its value, 0 and the margin in text: `   ├──●──┤  ┊   `."""
    found, cells = one.difference, [" "] * _PICTURE

    def place(value: float) -> int:
        share = (min(max(value, span[0]), span[1]) - span[0]) / (span[1] - span[0])
        return round(share * (_PICTURE - 1))

    for side in (-1, 1):
        if one.outcome.margin and span[0] <= side * one.outcome.margin <= span[1]:
            cells[place(side * one.outcome.margin)] = "·"
    cells[place(0.0)] = "┊"
    if math.isfinite(found.low):
        low, high = place(found.low), place(found.high)
        cells[low : high + 1] = ["─" if cell != "┊" else "┼" for cell in cells[low : high + 1]]
        cells[low], cells[high] = "├" if found.low >= span[0] else "◂", "┤" if found.high <= span[1] else "▸"
    if math.isfinite(found.value):
        cells[place(found.value)] = "○" if one.kind == "open" else "●"
    return "".join(cells)


def _axis(span: tuple[float, float]) -> str:
    """Return the header of the pictures: the ends of their axis."""
    low, high = (f"{end:+.3g}" if end else "0" for end in span)
    return low + " " * max(1, _PICTURE - len(low) - len(high)) + high


def remarks(analysis: Analysis) -> list[str]:
    """Return sentences on withheld verdicts, failed runs, and what open comparisons detect; then `notes`."""
    found = [one for one in analysis.shown if one.withheld or one.failures or one.warning]
    lines = [f"{title(one)}: {'; '.join([*_withheld(one), *_remarked(one)])}" for one in found]
    open_ones = [one for one in analysis.shown if one.kind == "open" and one not in found]
    if len(open_ones) > _NAMED and (known := sorted(one.detectable for one in open_ones if detects(one))):
        span = f"{known[0]:.3f} to {known[-1]:.3f} with 80% power"
        lines.append(f"{len(open_ones)} inconclusive comparisons: their seeds detect differences of {span}")
    else:
        reasons = {one: "; ".join(_reasons(one)) for one in open_ones}
        for reason in dict.fromkeys(filter(None, reasons.values())):
            same = [title(one) for one in open_ones if reasons[one] == reason]
            lines += [f"{one}: {reason}" for one in _named(same, "comparison")]
    return [*lines, *notes(analysis)]


def _named(names: Sequence[str], what: str) -> Sequence[str]:
    """Return the names, or their number if they are many."""
    return names if len(names) <= _NAMED else [plural(len(names), what)]


def notes(analysis: Analysis) -> list[str]:
    """Return sentences on claims, assumptions of tests, missing pairs, declarations, steps and lost runs."""
    found = analysis.shown
    lines = list[str]()
    for word, kept in (("holds for", True), ("not shown for", False)):
        if labels := [label for label, holds in claims(analysis).items() if holds is kept]:
            lines.append(f"claim, every outcome together: {word} {', '.join(_named(labels, 'condition'))}")
    by_t = [one for one in found if one.judged.test == "t test" and one.kind in ("better", "worse")]
    lines += dict.fromkeys(f"t test: {_assumption(one)}" for one in by_t)
    if any(one.judged.test == "McNemar" for one in found):
        lines.append("McNemar's exact test speaks of these two models, not of the methods: train several seeds of each")
    if any(one.paired and not one.seeds and _has_results(analysis, one) for one in found):
        lines.append("no seed in common: give --unpaired, or train both methods with the same seeds")
    return [*lines, *circumstances(analysis), *lost_lines(analysis), *findings_lines(analysis)]


def _has_results(analysis: Analysis, one: Comparison) -> bool:
    tables = [table for table in analysis.tables if table.task == one.task]
    return all(table.values(label) for table in tables for label in (one.condition, one.against))


def circumstances(analysis: Analysis) -> list[str]:
    """Return sentences on the declaration, and on the step at which runs are compared."""
    declared = [analysis.first.declared.sentence] if analysis.first.declared else []
    notes = [(table.task, table.steps_note) for table in analysis.main if table.steps_note]
    return [*declared, *(f"{task}: {note}" if task else note for task, note in notes)]


def findings_lines(analysis: Analysis) -> list[str]:
    """Name what the runs of each condition say is wrong with them: `grpo: cut_off in 3 of 8 runs`."""
    lines: list[str] = []
    for label in analysis.first.conditions:
        runs = [cell for results in analysis.main for cell in results.done(label).values()]
        counts = Counter(name for cell in runs for name in cell.findings)
        named = [f"{name} in {count} of {plural(len(runs), 'run')}" for name, count in counts.most_common()]
        lines += [f"findings of {label}: {', '.join(named)}"] if named else []
    return lines


def lost_lines(analysis: Analysis, most: int = 2 * _NAMED) -> list[str]:
    """Describe the runs without a result: `no result: maxrl seed 3 failed: loss became NaN (exit 4)`."""
    lines = [f"no result: {f'{task}, ' if task else ''}{lost_cell(cell)}" for task, cell in analysis.lost]
    more = [f"{plural(len(lines) - most, 'more run')} without a result"] if len(lines) > most else []
    return [*lines[:most], *more]


def lost_cell(cell: Cell) -> str:
    """Describe a run without a result: `maxrl seed 3 failed: loss became NaN (exit 4)`."""
    return f"{cell.condition} seed {cell.seed} {cell.status}: {cell.reason}"


def note(analysis: Analysis) -> str:
    """Return a note about the tests and intervals used, and the families with their levels."""
    first = analysis.first
    level, families = f"{100 * first.alpha:g}%", dict.fromkeys(one.family for one in analysis.comparisons)
    count = len(families)
    pairs = "Differences are paired by seed. " if first.paired else "Runs are not paired. "
    exact = (
        f"From {statistics.min_seeds_for_exact_test(first.alpha)} seeds on, verdicts are those of the step-down max-t "
        "test, which flips the signs of all differences of a seed together (all sign vectors up to "
        f"{statistics.MAX_ENUMERATED_SEEDS} seeds, 20,000 beyond); with three to five, of the paired t test, corrected "
        "by Holm's method. "
    )
    if not first.paired:
        exact = "p is that of the permutation test of the difference of means, corrected by Holm's method. "
    family = f"The probability of a false claim is at most {level} in a family of comparisons"
    tests = {name: {one.judged.test for one in analysis.comparisons if one.family == name} for name in families}
    if any({"exact", "t test"} <= of for of in tests.values()):
        family += ", or twice that in a family with both tests"
    family += (
        f"; there are {count} families ({', '.join(TITLES[one].lower() for one in families)}). " if count > 1 else ". "
    )
    start = " All runs use one warm start, so the findings hold for this start only." if first.one_start else ""
    return f"{pairs}{exact}{family}95% CIs are t intervals, uncorrected.{start}"


def as_json(analysis: Analysis) -> dict[str, Any]:
    """Return the analysis as JSON data; numbers that are not finite are null."""
    first = analysis.first
    facts = {
        "name": first.name,
        "baseline": first.baseline,
        "seeds": first.seeds,
        "threshold": first.threshold,
        "declaration": first.declared and first.declared.facts(),
        "headline": headline(analysis),
        "claims": claims(analysis),
        "steps_note": first.steps_note,
        "remarks": remarks(analysis),
        "comparisons": [_facts(one) for one in analysis.comparisons],
        "without_result": [
            {"task": task, "condition": cell.condition, "seed": cell.seed, "status": cell.status, "reason": cell.reason}
            for task, cell in analysis.lost
        ],
    }
    return to_jsonable_python(facts, inf_nan_mode="null")


def _facts(one: Comparison) -> dict[str, Any]:
    estimates = {
        name: getattr(one, name)._asdict() for name in ("difference", "improvement", "area", "avg_tokens", "aes")
    }
    plain = {key: value for key, value in asdict(one).items() if key not in {*estimates, "judged", "mean", "outcome"}}
    goal = "min" if one.outcome.sign < 0 else "max"
    outcome = {"metric": one.outcome.metric, "goal": goal, "margin": one.outcome.margin}
    words = {"kind": one.kind, "verdict": short(one), "sentence": sentence(one)}
    power = {"detectable": one.detectable, "needed_for_margin": one.needed}
    tests = {key: value for key, value in asdict(one.judged).items() if key != "kind"}
    return plain | outcome | estimates | tests | power | words


def p_value(p: float) -> str:
    """Format a p-value: `= .19`, `= .0078`, `< .001`, `= 1`."""
    if p < 0.001:
        return "< .001"
    return f"= {p:.2f}".replace("0.", ".").replace("1.00", "1") if p >= 0.1 else f"= {p:.2g}".replace("0.", ".")


def estimate(value: Estimate, form: str, unit: str = "") -> str:
    """Format an estimate for a table, or with a unit for a sentence.

    `0.512 [0.480, 0.541]`; with a unit `+0.512 accuracy, 95% CI [+0.480, +0.541]`; without an interval `0.512`; without
    a value `-`.
    """
    if math.isnan(value.value):
        return "-"
    label = ", 95% CI" if unit else ""
    interval = "" if math.isnan(value.low) else f"{label} [{value.low:{form}}, {value.high:{form}}]"
    return f"{value.value:{form}}{unit}{interval}"


def amount(value: Estimate) -> str:
    """Format a cost with its interval: `1.2 M [1.1 M, 1.3 M]`, `340`; `-` for NaN."""
    if math.isnan(value.value):
        return "-"
    ends = "" if math.isnan(value.low) else f" [{_amount(value.low)}, {_amount(value.high)}]"
    return _amount(value.value) + ends


def _amount(value: float) -> str:
    if abs(value) >= 1e4:
        return f"{value / 1e6:.3g} M" if abs(value) >= 1e6 else f"{value / 1e3:.3g} k"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
