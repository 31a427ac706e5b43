"""Verdicts as sentences, as lines with a picture for a terminal, and as JSON data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pydantic_core import to_jsonable_python

from retrain.campaign.verdict import statistics
from retrain.campaign.verdict.analysis import Analysis, Comparison, claims, noise_sources
from retrain.campaign.verdict.results import ALL_TASKS
from retrain.campaign.verdict.statistics import Estimate
from retrain.campaign.verdict.verdict_kinds import KINDS
from retrain.report.page import Table, plural

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
    runs = [cell for results in analysis.main for cell in results.runs]
    done = sum(cell.done for cell in runs)
    count = f"All {len(runs)}" if done == len(runs) else f"{done} of {len(runs)}"
    start = f"{count} runs {analysis.first.with_result}."
    if not analysis.comparisons:
        return f"{start} There is one condition, so there is nothing to compare."
    several = len(analysis.outcomes) > 1
    counts = [
        (f"{outcome.metric}: " if several else "") + _counted(analysis.of(outcome)) for outcome in analysis.outcomes
    ]
    return " ".join([start, *counts])


def _counted(comparisons: Sequence[Comparison]) -> str:
    """Count the verdicts of the first families: `2 of 2 conditions measured: 1 worse (t test), 1 inconclusive.`"""
    # Conditions are counted once: the family of the baseline, behind the ladder, has the same conditions again.
    main = next((each.family for each in comparisons if each.family != "primary"), "primary")
    first = [each for each in comparisons if each.family in ("primary", main)]
    measured = [each for each in first if each.seeds]
    kinds = Counter(short(each) for each in sorted(measured, key=lambda each: [*KINDS].index(each.kind)))
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no seed has a result in both"
    what = plural(len(first), {"ladder": "change", "tasks": "comparison"}.get(main, "condition"))
    where = " in the mean over tasks" if main == "pooled" else ""
    return f"{len(measured)} of {what} measured{where}: {counts}."


def short(comparison: Comparison) -> str:
    """Return the verdict in a few words: `worse (t test)`, `equal within 0.02`, `inconclusive`."""
    test = comparison.judged.test
    # Before its look a comparison is neither open nor decided, and must not be read as either.
    if comparison.waits and not comparison.withheld:
        return "continues"
    if comparison.withheld or (comparison.kind == "open" and not test):
        return "no verdict" if comparison.seeds else "no pair"
    words = KINDS[comparison.kind].words.format(margin=f"{comparison.outcome.margin or 0:g}")
    return f"{words} ({test})" if test not in ("", "exact") and comparison.kind in ("better", "worse") else words


def sentence(comparison: Comparison) -> str:
    """Format a comparison as a sentence, such as

    `gtpo on top of maxrl: +0.012 accuracy (more is better), 95% CI [-0.004, +0.028], 8 seeds: inconclusive; ...`.
    """
    if not comparison.seeds:
        return f"{title(comparison)}: no seed has a result in both."
    unit = f" {comparison.outcome.metric} ({comparison.outcome.direction})"
    level = comparison.look.level if comparison.look else statistics.LEVEL
    numbers = f"{estimate(comparison.difference, '+.3f', unit, level)}, {seeds(comparison)}"
    return f"{title(comparison)}: {numbers}: {conclusion(comparison)}."


def title(comparison: Comparison) -> str:
    """Return `gtpo on top of maxrl` for a condition that adds one stage to the other, else `maxrl against grpo`."""
    where = {"": "", ALL_TASKS: " in the mean over tasks"}.get(comparison.task, f" on {comparison.task}")
    # A label of several stages joins them with + or _, as `conditions` and the names of transforms do.
    against = comparison.against
    added = comparison.condition.removeprefix(against)
    if added != comparison.condition and (added[:1] == "+" or (added[:1] == "_" and "+" in against)):
        return f"{added[1:]} on top of {against}{where}"
    return f"{comparison.condition} against {against}{where}"


def seeds(comparison: Comparison) -> str:
    """Return the number of seeds or runs: `8 seeds`, `9 seeds (seed 3 without a pair)`, `12 against 4 runs`."""
    starts = f" on {plural(comparison.starts, 'warm start')}" if comparison.by_start else ""
    if not comparison.paired:
        return f"{comparison.runs[0]} against {plural(comparison.runs[1], 'run')}{starts}, not paired"
    count = plural(len(comparison.seeds), "seed") + starts
    left_out = comparison.left_out
    lone = f" (seed{'s' * (len(left_out) != 1)} {', '.join(map(str, left_out))} without a pair)" if left_out else ""
    return count + lone


def conclusion(comparison: Comparison) -> str:
    """Return the verdict with its reasons: p-value, assumptions, failed runs, and what these seeds can detect."""
    tested = _tested(comparison)
    verdict = short(comparison).removesuffix(f" ({comparison.judged.test})")
    verdict += f" ({'; '.join(tested)})" if tested else ""
    if comparison.withheld:
        verdict = f"no verdict: {comparison.withheld}"
    return "; ".join([verdict, *_reasons(comparison)])


def why(comparison: Comparison) -> str:
    """Return the reasons of a verdict for a reader who has just read it; what a t test assumes is in `notes`."""
    tested = [part for part in _tested(comparison) if part != _assumption(comparison)]
    return "; ".join(filter(None, [comparison.withheld, *tested, *_reasons(comparison)]))


def _tested(comparison: Comparison) -> list[str]:
    """Return the test with its p-value, and what it assumes."""
    judged = comparison.judged
    if not judged.test or comparison.withheld or comparison.kind == "same":
        return []
    corrected = "corrected " * (comparison.size > 1)
    if comparison.kind == "equal":
        return [f"two one-sided t tests, {corrected}p {p_value(judged.equality)}", *_stopped(comparison)]
    if comparison.kind == "not worse":
        return [f"one-sided t test, {corrected}p {p_value(judged.not_worse)}", *_stopped(comparison)]
    test = "" if judged.test == "exact" else f"{judged.test}, "
    if comparison.family == "primary":
        test = f"tested alone, as declared; {test}"
    parts = [f"{test}{corrected}p {p_value(judged.corrected)}"]
    if judged.test == "McNemar":
        parts.append("of these two models, not of the methods")
    if judged.test.endswith("t test") and comparison.kind in ("better", "worse"):
        parts.append(_assumption(comparison))
    return [*parts, *_stopped(comparison)]


def _stopped(comparison: Comparison) -> list[str]:
    """Return the look at which a comparison ended before the last seed."""
    look = comparison.look
    if look is None or not look.ended or look.number == len(look.sizes):
        return []
    return [f"stopped at {len(look.seeds)} of {look.sizes[-1]} seeds by the declared looks"]


def _assumption(comparison: Comparison) -> str:
    if not comparison.paired:
        return "assumes roughly normal results in each condition"
    # Naming the number shows how to get rid of the assumption.
    least = plural(statistics.min_seeds_for_exact_test(comparison.alpha), _unit(comparison))
    return f"assumes roughly normal differences; with {least} the exact test can decide"


def _unit(comparison: Comparison) -> str:
    return "warm start" if comparison.by_start else "seed" if comparison.paired else "run"


def _reasons(comparison: Comparison) -> list[str]:
    """Return further parts of a sentence: contradictions, missing seeds, failed runs, and warnings."""
    parts = [] if comparison.withheld else [disagreement(comparison), *_open_reasons(comparison)]
    if comparison.kind in ("better", "worse") and comparison.judged.equality <= comparison.alpha:
        parts.append(f"by less than the margin of {comparison.outcome.margin:g}")
    return [part for part in (*parts, comparison.failures, comparison.warning) if part]


def disagreement(comparison: Comparison) -> str:
    """Explain an interval that seems to contradict the verdict; "" if it does not."""
    judged = comparison.judged
    low, high = comparison.difference[1:]
    if not judged.test or comparison.withheld or math.isnan(low):
        return ""
    outside = low > 0 or high < 0
    test = "exact test" if judged.test == "exact" else judged.test
    if comparison.kind in ("better", "worse") and not outside:
        return f"0 is inside of the interval, and the {test} decides"
    # A reader takes an interval that excludes 0 for a difference, unless told why it is none.
    if comparison.kind != "open" or not outside:
        return ""
    if judged.p <= comparison.alpha:
        return f"0 is outside of the interval, but not after correction for {comparison.size} comparisons"
    return f"0 is outside of the interval, and the {test}, p {p_value(judged.p)}, decides"


def _open_reasons(comparison: Comparison) -> list[str]:
    """Return what would make an open comparison conclusive."""
    if comparison.kind != "open" or not comparison.seeds:
        return []
    if (look := comparison.look) and not look.ended:
        return [f"look {look.number} of {len(look.sizes)} waits for {len(look.seeds)} of {look.sizes[-1]} seeds"]
    if not comparison.judged.test:
        if not comparison.paired:
            return [f"a verdict needs 2 {_unit(comparison)}s of each"]
        # A look has the exact test only, because the t test of few pairs does not know of the earlier looks.
        least = statistics.min_seeds_for_exact_test(comparison.alpha) if comparison.look else statistics.MIN_SEEDS
        return [f"{plural(comparison.count, _unit(comparison))}, a verdict needs {least}"]
    parts = [detects(comparison)]
    if (needed := comparison.needed) and needed > comparison.count:
        unit = _unit(comparison)
        parts.append(f"about {needed:,} {unit}s would show equality within {comparison.outcome.margin:g}")
    return parts


def detects(comparison: Comparison) -> str:
    """Return what these seeds can detect: `8 seeds detect a difference of 0.031 in 80%`; "" if unknown."""
    # McNemar's test has one run of each, whose seeds cannot be planned from it.
    if not 0 < comparison.detectable < math.inf or comparison.judged.test == "McNemar":
        return ""
    number = plural(comparison.count, _unit(comparison)) if comparison.paired else "these runs"
    verb = "detects" if number.startswith("1 ") else "detect"
    return f"{number} {verb} a difference of {comparison.detectable:.3f} with 80% power"


def text(analysis: Analysis) -> str:
    """Format the verdict for a terminal: headline, a line with a picture for each comparison, and remarks."""
    lines = [headline(analysis)]
    for outcome in analysis.outcomes:
        lines += ["", *pictured(comparisons)] if (comparisons := analysis.of(outcome)) else []
    return "\n".join([*lines, *(f"  {line}" for line in remarks(analysis))])


def pictured(comparisons: Sequence[Comparison]) -> list[str]:
    """Return a header and a line with a picture for each comparison of one outcome, family by family."""
    span = drawn_range(comparisons)
    outcome = comparisons[0].outcome
    families = list(dict.fromkeys(each.family for each in comparisons))
    rows: list[tuple[str, ...]] = []
    for family in families:
        rows += [("", TITLES[family], "", "", "", "")] if len(families) > 1 else []
        for comparison in (each for each in comparisons if each.family == family):
            row = texts(comparison)
            mark = f"{KINDS[comparison.kind].mark} {row['verdict']}"
            drawn = picture(comparison, span)
            rows.append((mark, row["comparison"], drawn, row["difference"], row["seeds"], row["decided"]))
    p = "p" if all(each.size == 1 for each in comparisons) else "corrected p"
    unit = f"{outcome.metric}, {outcome.direction}"
    header = ("", "", _axis(span), unit, "seeds" if comparisons[0].paired else "runs", p)
    return [line.rstrip() for line in Table(header, rows).aligned()]


def texts(comparison: Comparison) -> dict[str, str]:
    """Return a comparison as a row of texts, by column; every table, line and page shows some of them."""
    judged = comparison.judged
    tested = bool(judged.test) and not comparison.withheld
    decided = {"equal": judged.equality, "not worse": judged.not_worse}.get(comparison.kind, judged.corrected)
    p = {"p": judged.p, "corrected p": judged.corrected, "decided": decided}
    runs = str(len(comparison.seeds)) if comparison.paired else "{}, {}".format(*comparison.runs)
    left_out = f" (without {', '.join(map(str, comparison.left_out))})" if comparison.left_out else ""
    return {
        "comparison": title(comparison),
        "difference": estimate(comparison.difference, "+.3f"),
        "verdict": short(comparison),
        "seeds": runs + left_out,
        "test": judged.test if tested else "-",
        **{name: p_value(value).removeprefix("= ") if tested else "-" for name, value in p.items()},
        "detectable": f"±{comparison.detectable:.3f}" if tested and math.isfinite(comparison.detectable) else "-",
        "effect g": "-" if math.isnan(comparison.effect) else f"{comparison.effect:+.2f}",
        "area under curve": estimate(comparison.area, "+.3f"),
        "tokens per answer": estimate(comparison.avg_tokens, "+.1f"),
        "AES": estimate(comparison.aes, "+.3f"),
    }


def drawn_range(comparisons: Sequence[Comparison]) -> tuple[float, float]:
    """Return the range of an axis with 0, the margin and every interval; wide intervals are cut.

    An interval can be ten times as wide as others. It is cut at three times the largest difference, margin, or half of
    the narrowest interval.
    """
    differences = [each.difference for each in comparisons]
    margins = [each.outcome.margin or 0.0 for each in comparisons]
    largest = max((abs(each.value) for each in differences if math.isfinite(each.value)), default=0.0)
    narrowest = min((each.high - each.value for each in differences if math.isfinite(each.high)), default=0.0)
    # Three times shows the end of most intervals and keeps a difference wider than a column.
    limit = 3 * max([largest, narrowest, *margins])
    ends = [end for each in differences for end in each if math.isfinite(end)]
    ends += [side * margin for margin in margins for side in (-1, 1)]
    low = max(-limit, min([0.0, *ends]))
    high = min(limit, max([0.0, *ends]))
    return (low, high) if high > low else (-1.0, 1.0)


def picture(comparison: Comparison, span: tuple[float, float]) -> str:
    """Draw an interval with its value, 0 and the margin in text: `   ├──●──┤  ┊   `."""
    value, low, high = comparison.difference
    cells = [" "] * _PICTURE

    def column(number: float) -> int:
        share = (min(max(number, span[0]), span[1]) - span[0]) / (span[1] - span[0])
        return round(share * (_PICTURE - 1))

    for end in (-(comparison.outcome.margin or 0.0), comparison.outcome.margin or 0.0):
        if end and span[0] <= end <= span[1]:
            # The margin first, then 0, then the interval: what matters more is drawn over the rest.
            cells[column(end)] = "·"
    cells[column(0.0)] = "┊"
    if math.isfinite(low):
        left = column(low)
        right = column(high)
        # Where the interval covers 0 the crossing stays visible.
        cells[left : right + 1] = ["─" if cell != "┊" else "┼" for cell in cells[left : right + 1]]
        cells[left] = "├" if low >= span[0] else "◂"
        cells[right] = "┤" if high <= span[1] else "▸"
    if math.isfinite(value):
        cells[column(value)] = "○" if comparison.kind == "open" else "●"
    return "".join(cells)


def _axis(span: tuple[float, float]) -> str:
    """Return the header of the pictures: the ends of their axis."""
    low, high = (f"{end:+.3g}" if end else "0" for end in span)
    return low + " " * max(1, _PICTURE - len(low) - len(high)) + high


def remarks(analysis: Analysis) -> list[str]:
    """Return what the lines of comparisons leave out, then `notes`: the text below a table in every output."""
    lines: list[str] = []
    plain: list[Comparison] = []
    for comparison in analysis.shown:
        if comparison.withheld or comparison.failures or comparison.warning or disagreement(comparison):
            parts = [f"no verdict: {comparison.withheld}"] * bool(comparison.withheld) + _reasons(comparison)
            lines.append(f"{title(comparison)}: {'; '.join(parts)}")
        elif comparison.kind == "open":
            plain.append(comparison)
    # Ten sentences that differ in one number hide the remarks that matter.
    detectable = sorted(each.detectable for each in plain if detects(each))
    if len(plain) > _NAMED and detectable:
        span = f"{detectable[0]:.3f} to {detectable[-1]:.3f} with 80% power"
        lines.append(f"{len(plain)} inconclusive comparisons: their seeds detect differences of {span}")
    else:
        reasons = {each: "; ".join(_reasons(each)) for each in plain}
        for reason in dict.fromkeys(filter(None, reasons.values())):
            same = [title(each) for each in plain if reasons[each] == reason]
            lines += [f"{name}: {reason}" for name in _named(same, "comparison")]
    return [*lines, *notes(analysis)]


def _named(names: Sequence[str], what: str) -> Sequence[str]:
    """Return the names, or their number if they are many."""
    return names if len(names) <= _NAMED else [plural(len(names), what)]


def notes(analysis: Analysis) -> list[str]:
    """Return sentences on claims, assumptions of tests, missing pairs, declarations, steps, lost runs and findings."""
    shown = analysis.shown
    lines: list[str] = []
    for words, kept in (("holds for", True), ("not shown for", False)):
        if labels := [label for label, holds in claims(analysis).items() if holds is kept]:
            lines.append(f"claim, every outcome together: {words} {', '.join(_named(labels, 'condition'))}")
    t_tested = [each for each in shown if each.judged.test.endswith("t test") and each.kind in ("better", "worse")]
    lines += dict.fromkeys(f"{each.judged.test}: {_assumption(each)}" for each in t_tested)
    if any(each.judged.test == "McNemar" for each in shown):
        lines.append("McNemar's exact test speaks of these two models, not of the methods: train several seeds of each")
    if any(each.paired and not each.seeds and min(each.runs) for each in shown):
        lines.append("no seed in common: give --unpaired, or train both methods with the same seeds")
    lines += filter(None, [noise_sources(analysis)])
    lines += [analysis.first.declared.sentence] if analysis.first.declared else []
    lines += [analysis.first.late] if analysis.first.late else []
    steps = [(results.task, results.steps_note) for results in analysis.main if results.steps_note]
    lines += [f"{task}: {note}" if task else note for task, note in steps]
    return [*lines, *_lost_lines(analysis), *_findings(analysis)]


def _findings(analysis: Analysis) -> list[str]:
    """Name what the runs of each condition say is wrong with them: `findings of grpo: cut_off in 3 of 8 runs`."""
    lines: list[str] = []
    for label in analysis.first.conditions:
        runs = [cell for results in analysis.main for cell in results.done(label).values()]
        counts = Counter(name for cell in runs for name in cell.findings)
        named = [f"{name} in {count} of {plural(len(runs), 'run')}" for name, count in counts.most_common()]
        lines += [f"findings of {label}: {', '.join(named)}"] if named else []
    return lines


def _lost_lines(analysis: Analysis) -> list[str]:
    """Describe the runs without a result: `no result: maxrl seed 3 failed: loss became NaN (exit 4)`."""
    lines = [
        f"no result: {f'{task}, ' if task else ''}{cell.condition} seed {cell.seed} {cell.status}: {cell.reason}"
        for task, cell in analysis.lost
    ]
    rest = lines[2 * _NAMED :]
    return [*lines[: 2 * _NAMED], *([f"{plural(len(rest), 'more run')} without a result"] if rest else [])]


def note(analysis: Analysis) -> str:
    """Return a note about the tests and intervals used, and the families with their levels."""
    first = analysis.first
    families = dict.fromkeys(each.family for each in analysis.comparisons)
    tests = "Differences are paired by seed. "
    tests += (
        f"From {statistics.min_seeds_for_exact_test(first.alpha)} seeds on, verdicts are those of the step-down max-t "
        "test, which flips the signs of all differences of a seed together (all sign vectors up to "
        f"{statistics.MAX_ENUMERATED_SEEDS} seeds, 20,000 beyond); with three to five, of the paired t test, corrected "
        "by Holm's method. "
    )
    if not first.paired:
        # Of unpaired runs nothing can be flipped, so that there is no exact test.
        tests = "Runs are not paired. Verdicts are those of Welch's t test, corrected by Holm's method. "
    claim = f"The probability of a false claim is at most {100 * first.alpha:g}% in a family of comparisons"
    of_family = [{each.judged.test for each in analysis.comparisons if each.family == name} for name in families]
    if any({"exact", "t test"} <= of for of in of_family):
        # Each test is corrected to alpha by itself, and errors of two tests add up at most.
        claim += ", or twice that in a family with both tests"
    if len(families) > 1:
        named = ", ".join(TITLES[name].lower() for name in families)
        claim += f"; there are {len(families)} families ({named})"
    start = " All runs use one warm start, so the findings hold for this start only." if first.one_start else ""
    intervals = "95% CIs are t intervals, uncorrected."
    if first.looks:
        sizes = tuple(map(len, first.looks))
        levels = zip(sizes, statistics.nominal_levels(sizes, first.alpha), strict=True)
        intervals = "Comparisons end at the declared looks; CIs are t intervals at the level of the look: "
        intervals += ", ".join(f"{100 - 100 * level:.1f}% at {size} seeds" for size, level in levels)
        intervals += ". An effect that stopped early is overestimated."
    return f"{tests}{claim}. {intervals}{start}"


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
        "note": note(analysis),
        "remarks": remarks(analysis),
        "comparisons": [_facts(comparison) for comparison in analysis.comparisons],
        "without_result": [
            {"task": task, "condition": cell.condition, "seed": cell.seed, "status": cell.status, "reason": cell.reason}
            for task, cell in analysis.lost
        ],
    }
    return to_jsonable_python(facts, inf_nan_mode="null")


def _facts(comparison: Comparison) -> dict[str, Any]:
    outcome = comparison.outcome
    estimates = {name: getattr(comparison, name)._asdict() for name in ("difference", "area", "avg_tokens", "aes")}
    left_out = {*estimates, "judged", "mean", "outcome"}
    return {
        **{key: value for key, value in asdict(comparison).items() if key not in left_out},
        "metric": outcome.metric,
        "goal": "min" if outcome.sign < 0 else "max",
        "margin": outcome.margin,
        **estimates,
        **{key: value for key, value in asdict(comparison.judged).items() if key != "kind"},
        "detectable": comparison.detectable,
        "needed_for_margin": comparison.needed,
        "kind": comparison.kind,
        "verdict": short(comparison),
        "sentence": sentence(comparison),
    }


def p_value(p: float) -> str:
    """Format a p-value: `= .19`, `= .0078`, `< .001`, `= 1`."""
    if p < 0.001:
        return "< .001"
    # Two digits, because a third would be noise of drawn sign vectors.
    return f"= {p:.2f}".replace("0.", ".").replace("1.00", "1") if p >= 0.1 else f"= {p:.2g}".replace("0.", ".")


def estimate(value: Estimate, form: str, unit: str = "", level: float = statistics.LEVEL) -> str:
    """Format an estimate for a table, or with a unit for a sentence.

    `0.512 [0.480, 0.541]`; with a unit `+0.512 accuracy, 95% CI [+0.480, +0.541]`; without an interval `0.512`; without
    a value `-`.
    """
    if math.isnan(value.value):
        return "-"
    # The inner format rounds, and the outer one drops `.0`: 95% and 96.9%.
    label = f", {float(f'{100 - 100 * level:.1f}'):g}% CI" if unit else ""
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
