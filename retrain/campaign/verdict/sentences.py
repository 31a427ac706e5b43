"""Format a campaign's result: as sentences for a terminal, and as Markdown, LaTeX or JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pydantic_core import to_jsonable_python

from retrain.campaign.verdict import statistics
from retrain.campaign.verdict.analysis import Analysis, Comparison, Estimate, Summary
from retrain.campaign.verdict.results import SPENT, Cell, Results
from retrain.report.latex import tables as latex_tables
from retrain.report.page import Table, fill, plural


def headline(analysis: Analysis) -> str:
    """Return the first sentences: numbers of runs with a result and of significant differences."""
    results, found = analysis.results, analysis.primary
    verb = results.with_result
    runs, lost, clear = len(results.runs), len(results.lost), sum(one.significant for one in found)
    start = f"{runs - lost} of {runs} runs {verb}" if lost else f"All {runs} runs {verb}"
    if not found:
        return f"{start}. There is one condition, so there is nothing to compare."
    more = sum(one.untested for one in found)
    few = f" {more} more: the 95% CI excludes 0, but there are too few seeds for significance." if more else ""
    if analysis.ladder:
        return f"{start}. {clear} of {len(found)} changes made a significant difference.{few}"
    return (
        f"{start}. {clear} of {len(found)} conditions differ{'s' * (clear == 1)} significantly from the baseline.{few}"
    )


def sentence(one: Comparison) -> str:
    """Format a comparison as a sentence, such as

    `gtpo on top of maxrl: +0.012 accuracy, 95% CI [-0.004, +0.028], p = .19 (Holm .57), 8 seeds: inconclusive; ...`.
    """
    return f"{title(one)}: {numbers(one)}{conclusion(one)}."


def title(one: Comparison) -> str:
    """Return `gtpo on top of maxrl` for a condition that adds one stage to the other, else `maxrl against grpo`."""
    added = one.condition.removeprefix(one.against)
    if added != one.condition and (added[:1] == "+" or (added[:1] == "_" and "+" in one.against)):
        return f"{added[1:]} on top of {one.against}"
    return f"{one.condition} against {one.against}"


def numbers(one: Comparison) -> str:
    """Return difference, interval, p, corrected p and seeds, with a colon at the end; "" without a pair of runs."""
    if not one.seeds:
        return ""
    seeds = plural(len(one.seeds), "seed") + (f" on {one.starts} warm starts" if one.starts > 1 else "")
    if one.left_out:
        lone = ", ".join(map(str, one.left_out))
        seeds += f" (seed{'s' * (len(one.left_out) != 1)} {lone} without a pair)"
    how = "tested alone, as declared" if one.family == "primary" else f"Holm {p_value(one.holm).removeprefix('= ')}"
    test = f"p {p_value(one.p)} ({how})"
    return f"{estimate(one.difference, '+.3f', f' {one.metric}')}, {test}, {seeds}: "


def conclusion(one: Comparison) -> str:
    """Return the conclusion from a comparison.

    This is "better" or "worse" if the difference is significant. Otherwise it is "no difference" if the
    runs are identical, "higher" or "lower" without significance, or "inconclusive", if possible with the
    number of seeds needed.
    """
    unit = "warm start" if one.starts > 1 else "seed"
    if one.significant:
        return "better" if one.difference.value > 0 else "worse"
    if not one.seeds:
        return "inconclusive; no seed has a result in both"
    if one.same:
        return "no difference; the runs of both conditions are identical"
    if one.untested:
        way = "higher" if one.difference.value > 0 else "lower"
        every = f" in every {unit}" if one.p <= statistics.smallest_p(one.count) else ""
        family = f"{plural(one.size, 'comparison')}, at least {max(one.needed or 0, one.enough):,} needed"
        return f"{way}{every}, and its 95% CI excludes 0; not significant with so few {unit}s for {family}"
    if one.count < one.enough:
        few = f"inconclusive; {plural(one.count, unit)} cannot be significant, at least {one.enough} needed"
        return few if one.needed is None else f"{few}, about {max(one.needed, one.enough):,} for this difference"
    if one.needed is None:
        return "inconclusive; more seeds would not help, the difference is 0"
    return f"inconclusive; about {one.needed:,} {unit}s needed"


def text(analysis: Analysis) -> str:
    """Format the verdict for a terminal: headline, sentences, the declaration, and every run without a result."""
    lines = [headline(analysis), *(f"  {sentence(one)}" for one in analysis.primary)]
    if analysis.secondary:
        lines += [BASELINE, *(f"  {sentence(one)}" for one in analysis.secondary)]
    if analysis.results.declared:
        lines.append(analysis.results.declared.sentence)
    lines += [analysis.results.steps_note] if analysis.results.steps_note else []
    return "\n".join([*lines, *(f"  no result: {lost_cell(cell)}" for cell in analysis.results.lost)])


def conditions_text(analysis: Analysis) -> str:
    """Format the table of conditions, followed by `text`."""
    return "\n".join([*conditions(analysis).aligned(), "", text(analysis)])


def lost_cell(cell: Cell) -> str:
    """Describe a run without a result: `maxrl seed 3 failed: loss became NaN (exit 4)`."""
    return f"{cell.condition} seed {cell.seed} {cell.status}: {cell.reason}"


BASELINE = "Against the baseline, tested separately:"
"""Heading of the sentences about `Analysis.secondary`."""


def note(analysis: Analysis) -> str:
    """Return a note about the tests, intervals and threshold used."""
    threshold, both = analysis.results.threshold, (*analysis.primary, *analysis.secondary)
    how = "exact" if all(one.exact for one in both) else f"exact up to {statistics.EXACT_SEEDS} seeds, sampled beyond"
    family = (
        "Holm's correction treats the ladder and the comparisons with the baseline as two families"
        if analysis.secondary
        else "Holm's correction covers all comparisons"
    )
    level = f"{100 * analysis.results.alpha:g}%"
    if analysis.declared:
        family += f", except the declared one, which is a separate test at {level}"
    each = " in each family" if analysis.secondary else ""
    declared = f" {analysis.results.declared.sentence}" if analysis.results.declared else ""
    steps = analysis.results.steps_note and f" {analysis.results.steps_note}"
    reach = "" if threshold is None else f" The threshold is {analysis.results.measured} {threshold:.3f}."
    return (
        "Differences are paired by seed. p is the p-value of the two-sided sign-flip permutation test "
        f"({how}). {family}. The family-wise error rate is at most {level}{each}. "
        "95% CIs of differences are paired t intervals, uncorrected; those of conditions are bootstrap intervals over "
        "runs. Recommended numbers of seeds give a power of 80% at the observed effect size."
        f"{reach}{declared}{steps}{analysis.results.limits}"
    )


def tables(analysis: Analysis) -> dict[str, Table]:
    """Return the tables of a report.

    Returns:
        "differences" (tested), "described" (effects that are not tested), "conditions", "costs" and "runs".
    """
    results, both = analysis.results, analysis.every
    return {
        "differences": Table.of([_tested(one) for one in both]),
        "described": Table.of([_described(one, any(other.lengths_differ for other in both)) for one in both]),
        "conditions": conditions(analysis),
        "costs": Table.of([_costs(one) for one in analysis.summaries]),
        "runs": runs(results),
    }


def runs(results: Results) -> Table:
    """Return the table of all results: a row for each condition, a column for each seed."""
    return Table.of(
        [
            {"condition": label} | {str(seed): _shown(results.cells.get((label, seed))) for seed in results.seeds}
            for label in results.conditions
        ]
    )


def conditions(analysis: Analysis) -> Table:
    """Return the table of conditions, with estimates over their runs."""
    return Table.of([_summary(one, analysis.results.metric) for one in analysis.summaries])


def _summary(one: Summary, metric: str) -> dict[str, str]:
    return {
        "condition": one.condition,
        "runs": str(one.done) if one.done == one.planned else f"{one.done} of {one.planned}",
        f"{metric}, mean": estimate(one.mean, ".3f"),
        f"{metric}, IQM": estimate(one.iqm, ".3f"),
        "area under curve": estimate(one.area, ".3f"),
        "tokens per answer": estimate(one.avg_tokens, ".1f"),
    }


def _costs(one: Summary) -> dict[str, str]:
    """Return a row of costs: the median until a run reaches the threshold, and the mean of a whole run."""
    return {
        "condition": one.condition,
        "reached": "-" if one.reached is None else f"{one.reached} of {one.done}",
        **{cost: amount(one.to_threshold.get(cost, math.nan)) for cost in ("steps", *SPENT)},
        **{f"{cost}, whole run": amount(one.total[cost]) for cost in SPENT},
    }


def _tested(one: Comparison) -> dict[str, str]:
    return {
        "comparison": title(one),
        one.metric: estimate(one.difference, "+.3f"),
        "seeds": str(len(one.seeds)),
        "p": p_value(one.p).removeprefix("= ") + ("" if one.exact else " (sampled)"),
        "Holm": p_value(one.holm).removeprefix("= "),
        "effect g": "-" if math.isnan(one.effect) else f"{one.effect:+.2f}",
        "verdict": conclusion(one),
    }


def _described(one: Comparison, efficiency: bool) -> dict[str, str]:
    """Return a row of effect sizes that are not tested.

    Args:
        one: the comparison.
        efficiency: add a column for the AES, with a value if the lengths of the answers differ.
    """
    score = {"AES": estimate(one.aes, "+.3f") if one.lengths_differ else "-"} if efficiency else {}
    return {
        "comparison": title(one),
        "P(improvement)": estimate(one.improvement, ".2f"),
        "area under curve": estimate(one.area, "+.3f"),
        "tokens per answer": estimate(one.avg_tokens, "+.1f"),
        **score,
    }


def _shown(cell: Cell | None) -> str:
    """Return the accuracy of a run, or else its status."""
    if cell is None:
        return "-"
    return cell.status if cell.accuracy is None else f"{cell.accuracy:.3f}"


def contents(analysis: Analysis, commands: Sequence[str]) -> dict[str, Any]:
    """Return the values of the template of the report, for HTML and Markdown."""
    return {
        "title": analysis.results.name,
        "measured": analysis.results.measured,
        "headline": headline(analysis),
        "baseline": BASELINE,
        "lost": [lost_cell(cell) for cell in analysis.results.lost],
        "note": note(analysis),
        "commands": commands,
        **tables(analysis),
    }


def markdown(analysis: Analysis, commands: Sequence[str]) -> str:
    """Return the content of report.md."""
    families = {"sentences": analysis.primary, "others": analysis.secondary}
    texts = {name: [sentence(one) for one in family] for name, family in families.items()}
    return fill("campaign.md", **texts, **contents(analysis, commands))


def latex(analysis: Analysis) -> str:
    """Return the tables of conditions, differences and runs for a paper."""
    found = tables(analysis)
    name, last = analysis.results.name, f"last {analysis.results.measured}, by seed"
    return latex_tables(
        {
            f"{name}: conditions": found["conditions"],
            f"{name}: differences. {note(analysis)}": found["differences"],
            f"{name}: {last}": found["runs"],
        }
    )


def as_json(analysis: Analysis) -> dict[str, Any]:
    """Return the analysis as JSON data; numbers that are not finite are null."""
    results = analysis.results
    facts = {
        "name": results.name,
        "baseline": results.baseline,
        "seeds": results.seeds,
        "threshold": results.threshold,
        "declaration": results.declared and results.declared.facts(),
        "headline": headline(analysis),
        "steps_note": results.steps_note,
        "conditions": analysis.summaries,
        "comparisons": [
            {**asdict(one), "significant": one.significant, "verdict": conclusion(one)} for one in analysis.every
        ],
        "without_result": [
            {"condition": cell.condition, "seed": cell.seed, "status": cell.status, "reason": cell.reason}
            for cell in results.lost
        ],
    }
    return to_jsonable_python(facts, inf_nan_mode="null")


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


def amount(value: float) -> str:
    """Format a cost: `1.2 M`, `340`, `never` for infinity, `-` for NaN."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "never"
    if value >= 1e4:
        return f"{value / 1e6:.3g} M" if value >= 1e6 else f"{value / 1e3:.3g} k"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
