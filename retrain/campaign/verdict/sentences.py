"""The result of a campaign in sentences: text for a terminal; with tables, as Markdown and JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pydantic_core import to_jsonable_python

from retrain.campaign.verdict import statistics
from retrain.campaign.verdict.analysis import Analysis, Comparison, Estimate, Summary
from retrain.campaign.verdict.results import SPENT, Cell, Results
from retrain.report.page import Table, fill, plural


def headline(analysis: Analysis) -> str:
    """How many differences are clear, and how many runs there are."""
    results, found = analysis.results, analysis.primary
    runs, lost, clear = len(results.runs), len(results.lost), sum(one.significant for one in found)
    start = f"{runs - lost} of {runs} runs finished" if lost else f"All {runs} runs finished"
    if not found:
        return f"{start}. There is one condition, so there is nothing to compare."
    more = sum(one.untested for one in found)
    few = f" {more} more {'has' if more == 1 else 'have'} an interval without 0, and too few seeds." if more else ""
    if analysis.ladder:
        return f"{start}. {clear} of {len(found)} changes made a clear difference.{few}"
    return f"{start}. {clear} of {len(found)} conditions differ{'s' * (clear == 1)} clearly from the baseline.{few}"


def sentence(one: Comparison) -> str:
    """`gtpo on top of maxrl: +0.012 accuracy [-0.004, +0.028], p = .19 (Holm .57), 8 seeds: cannot tell; ...`."""
    return f"{title(one)}: {numbers(one)}{conclusion(one)}."


def title(one: Comparison) -> str:
    """`gtpo on top of maxrl` where the label adds a stage to the other's chain, else `maxrl against grpo`."""
    added = one.condition.removeprefix(one.against)
    if added != one.condition and (added[:1] == "+" or (added[:1] == "_" and "+" in one.against)):
        return f"{added[1:]} on top of {one.against}"
    return f"{one.condition} against {one.against}"


def numbers(one: Comparison) -> str:
    """Difference, interval, p, corrected p and seeds, with a colon at the end; empty without a pair of runs."""
    if not one.seeds:
        return ""
    seeds = plural(len(one.seeds), "seed")
    if one.left_out:
        lone = ", ".join(map(str, one.left_out))
        seeds += f" (seed{'s' * (len(one.left_out) != 1)} {lone} without a pair)"
    how = "tested alone, as declared" if one.family == "primary" else f"Holm {p_value(one.holm).removeprefix('= ')}"
    test = f"p {p_value(one.p)} ({how})"
    return f"{estimate(one.difference, '+.3f', ' accuracy')}, {test}, {seeds}: "


def conclusion(one: Comparison) -> str:
    """Better, worse, or what is missing: the number of seeds that would be enough."""
    if one.significant:
        return "better" if one.difference.value > 0 else "worse"
    if not one.seeds:
        return "cannot tell; no seed finished in both"
    if one.same:
        return "changed nothing; the runs of both are the same"
    if one.untested:
        way = "higher" if one.difference.value > 0 else "lower"
        every = " in every seed" if one.p <= statistics.smallest_p(len(one.seeds)) else ""
        family = f"{plural(one.size, 'comparison')}: {max(one.needed or 0, one.enough):,} needed"
        return f"{way}{every}, and its own interval excludes 0; too few seeds for {family}"
    if len(one.seeds) < one.enough:
        few = f"cannot tell; no outcome of {plural(len(one.seeds), 'seed')} could, {one.enough} are the least"
        return few if one.needed is None else f"{few} and about {max(one.needed, one.enough):,} would"
    if one.needed is None:
        return "cannot tell; there is no difference that more seeds would tell"
    return f"cannot tell; about {one.needed:,} seeds would"


def text(analysis: Analysis) -> str:
    """The verdict for a terminal: headline, sentences, and every run without a result."""
    lines = [headline(analysis), *(f"  {sentence(one)}" for one in analysis.primary)]
    if analysis.secondary:
        lines += [BASELINE, *(f"  {sentence(one)}" for one in analysis.secondary)]
    return "\n".join([*lines, *(f"  no result: {lost_cell(cell)}" for cell in analysis.results.lost)])


def conditions_text(analysis: Analysis) -> str:
    """`text`, after a table of the conditions."""
    columns, rows = conditions(analysis)
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (columns, *rows)
    ]
    return "\n".join([*lines, "", text(analysis)])


def lost_cell(cell: Cell) -> str:
    """`maxrl seed 3 failed: loss became NaN (exit 4)`."""
    return f"{cell.condition} seed {cell.seed} {cell.status}: {cell.reason}"


BASELINE = "Against the baseline, tested separately:"
"""Above the sentences about `Analysis.secondary`."""


def note(analysis: Analysis) -> str:
    """How to read the numbers, and which threshold and tests were used."""
    threshold, both = analysis.results.threshold, (*analysis.primary, *analysis.secondary)
    how = "exact" if all(one.exact for one in both) else f"exact up to {statistics.EXACT_SEEDS} seeds, sampled beyond"
    family = (
        "The ladder and the baseline are two families, corrected separately"
        if analysis.secondary
        else "Holm corrects it for all comparisons"
    ) + ", but for the declared one, which is tested alone" * bool(analysis.declared)
    reach = "" if threshold is None else f" The threshold is an accuracy of {threshold:.3f}."
    return (
        f"Differences are paired by seed. p is the two-sided permutation test by sign flips ({how}). {family}: the "
        f"chance of any false claim about one is at most {analysis.results.alpha:.0%}. Intervals of differences are "
        "95% paired t intervals, uncorrected; those of conditions are bootstrap intervals over runs. Recommended "
        f"numbers of seeds are for a power of 80% at the observed effect.{reach}"
    )


def tables(analysis: Analysis) -> dict[str, Table]:
    """The tables of a report, in HTML and in Markdown: differences, described, conditions, costs, runs."""
    results, both = analysis.results, analysis.every
    return {
        "differences": Table.of([_tested(one) for one in both]),
        "described": Table.of([_described(one) for one in both]),
        "conditions": conditions(analysis),
        "costs": Table.of([_costs(one) for one in analysis.summaries]),
        "runs": runs(results),
    }


def runs(results: Results) -> Table:
    """The result of every run: a row for each condition, a column for each seed."""
    return Table.of(
        [
            {"condition": label} | {str(seed): _shown(results.cells.get((label, seed))) for seed in results.seeds}
            for label in results.conditions
        ]
    )


def conditions(analysis: Analysis) -> Table:
    """The table of conditions."""
    return Table.of([_summary(one) for one in analysis.summaries])


def _summary(one: Summary) -> dict[str, str]:
    return {
        "condition": one.condition,
        "runs": str(one.done) if one.done == one.planned else f"{one.done} of {one.planned}",
        "accuracy, mean": estimate(one.mean, ".3f"),
        "accuracy, IQM": estimate(one.iqm, ".3f"),
        "area under curve": estimate(one.area, ".3f"),
        "tokens per answer": estimate(one.avg_tokens, ".1f"),
    }


def _costs(one: Summary) -> dict[str, str]:
    """Medians to the threshold, means of whole runs."""
    return {
        "condition": one.condition,
        "reached": "-" if one.reached is None else f"{one.reached} of {one.done}",
        **{what: amount(one.to_threshold.get(what, math.nan)) for what in ("steps", *SPENT)},
        **{f"{what}, whole run": amount(one.total[what]) for what in SPENT},
    }


def _tested(one: Comparison) -> dict[str, str]:
    return {
        "comparison": title(one),
        "accuracy": estimate(one.difference, "+.3f"),
        "seeds": str(len(one.seeds)),
        "p": p_value(one.p).removeprefix("= ") + ("" if one.exact else " (sampled)"),
        "Holm": p_value(one.holm).removeprefix("= "),
        "effect g": "-" if math.isnan(one.effect) else f"{one.effect:+.2f}",
        "verdict": conclusion(one),
    }


def _described(one: Comparison) -> dict[str, str]:
    return {
        "comparison": title(one),
        "P(improvement)": estimate(one.improvement, ".2f"),
        "area under curve": estimate(one.area, "+.3f"),
        "tokens per answer": estimate(one.avg_tokens, "+.1f"),
    }


def _shown(cell: Cell | None) -> str:
    """Accuracy of a run, or else its status."""
    if cell is None:
        return "-"
    return cell.status if cell.accuracy is None else f"{cell.accuracy:.3f}"


def contents(analysis: Analysis, commands: Sequence[str]) -> dict[str, Any]:
    """What the report shows in HTML and in Markdown."""
    return {
        "title": analysis.results.name,
        "headline": headline(analysis),
        "baseline": BASELINE,
        "lost": [lost_cell(cell) for cell in analysis.results.lost],
        "note": note(analysis),
        "commands": commands,
        **tables(analysis),
    }


def markdown(analysis: Analysis, commands: Sequence[str]) -> str:
    """report.md."""
    families = {"sentences": analysis.primary, "others": analysis.secondary}
    texts = {name: [sentence(one) for one in family] for name, family in families.items()}
    return fill("campaign.md", **texts, **contents(analysis, commands))


def as_json(analysis: Analysis) -> dict[str, Any]:
    """The analysis as JSON; numbers that are not finite are null."""
    results = analysis.results
    facts = {
        "name": results.name,
        "baseline": results.baseline,
        "seeds": results.seeds,
        "threshold": results.threshold,
        "headline": headline(analysis),
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
    """`= .19`, `= .0078`, `< .001`, `= 1`."""
    if p < 0.001:
        return "< .001"
    return f"= {p:.2f}".replace("0.", ".").replace("1.00", "1") if p >= 0.1 else f"= {p:.2g}".replace("0.", ".")


def estimate(value: Estimate, form: str, unit: str = "") -> str:
    """`0.512 [0.480, 0.541]`; without an interval `0.512`; without a value `-`."""
    if math.isnan(value.value):
        return "-"
    interval = "" if math.isnan(value.low) else f" [{value.low:{form}}, {value.high:{form}}]"
    return f"{value.value:{form}}{unit}{interval}"


def amount(value: float) -> str:
    """`1.2 M`, `340`; `never` for what is infinite."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "never"
    if value >= 1e4:
        return f"{value / 1e6:.3g} M" if value >= 1e6 else f"{value / 1e3:.3g} k"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
