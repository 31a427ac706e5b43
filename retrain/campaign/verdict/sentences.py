"""The result of a campaign in sentences: text for a terminal; with tables, as Markdown and JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from retrain.campaign.verdict import statistics
from retrain.campaign.verdict.analysis import Analysis, Comparison, Estimate, Summary
from retrain.campaign.verdict.results import SPENT, Cell
from retrain.report.page import Table, fill, plural


def headline(analysis: Analysis) -> str:
    """How many differences are clear, and how many runs there are."""
    results, found = analysis.results, analysis.primary
    runs = [cell for label in results.conditions for cell in results.of(label)]
    done, clear = sum(cell.done for cell in runs), sum(one.significant for one in found)
    start = f"{done} of {len(runs)} runs finished" if done < len(runs) else f"All {done} runs finished"
    if not found:
        return f"{start}. There is one condition, so there is nothing to compare."
    if analysis.ladder:
        return f"{start}. {clear} of {len(found)} changes made a clear difference."
    return f"{start}. {clear} of {len(found)} conditions differ{'s' * (clear == 1)} clearly from the baseline."


def sentences(analysis: Analysis) -> list[str]:
    """One for each comparison of the ladder if there is one, else for each condition against the baseline."""
    return [sentence(one) for one in analysis.primary]


def second(analysis: Analysis) -> list[str]:
    """Sentences of the other family, without those in `sentences`: a ladder often starts at the baseline."""
    said = {(one.condition, one.against) for one in analysis.primary}
    return [sentence(one) for one in analysis.secondary if (one.condition, one.against) not in said]


def sentence(one: Comparison) -> str:
    """`gtpo on top of maxrl: +0.012 accuracy [-0.004, +0.028], p = .19 (Holm .57), 8 seeds: cannot tell; ...`."""
    if not one.seeds:
        return f"{title(one)}: cannot tell; no seed finished in both."
    return f"{title(one)}: {numbers(one)}: {conclusion(one)}."


def title(one: Comparison) -> str:
    """`gtpo on top of maxrl` where the label adds a stage to the other's chain, else `maxrl against grpo`."""
    added = one.condition.removeprefix(one.against)
    if added != one.condition and (added[:1] == "+" or (added[:1] == "_" and "+" in one.against)):
        return f"{added[1:]} on top of {one.against}"
    return f"{one.condition} against {one.against}"


def numbers(one: Comparison) -> str:
    """Difference, interval, p, corrected p and seeds."""
    seeds = plural(len(one.seeds), "seed")
    if one.left_out:
        lone = ", ".join(map(str, one.left_out))
        seeds += f" (seed{'s' * (len(one.left_out) != 1)} {lone} without a pair)"
    test = f"p {p_value(one.p)} (Holm {p_value(one.holm).removeprefix('= ')})"
    return f"{signed(one.difference.value)} accuracy{interval(one.difference)}, {test}, {seeds}"


def conclusion(one: Comparison) -> str:
    """Better, worse, or cannot tell with the number of seeds that would be enough."""
    if one.significant:
        return "better" if one.difference.value > 0 else "worse"
    if len(one.seeds) < one.enough:
        few = f"cannot tell; no outcome of {len(one.seeds)} seeds could, {one.enough} are the least"
        return few if one.needed is None else f"{few} and about {max(one.needed, one.enough):,} would"
    if one.needed is None:
        return "cannot tell; there is no difference that more seeds would tell"
    return f"cannot tell; about {one.needed:,} seeds would"


def text(analysis: Analysis) -> str:
    """The verdict for a terminal: headline, sentences, and every run without a result."""
    lines = [headline(analysis), *(f"  {line}" for line in sentences(analysis))]
    if others := second(analysis):
        lines += [BASELINE, *(f"  {line}" for line in others)]
    lost = analysis.results.without_result()
    return "\n".join([*lines, *(f"  no result: {lost_cell(cell)}" for cell in lost)])


def conditions_text(analysis: Analysis) -> str:
    """`text`, after a table of the conditions."""
    rows = [summary_row(one) for one in analysis.summaries]
    widths = [max(map(len, column)) for column in zip(SUMMARY_COLUMNS, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (SUMMARY_COLUMNS, *rows)
    ]
    return "\n".join([*lines, "", text(analysis)])


def lost_cell(cell: Cell) -> str:
    """`maxrl seed 3 failed: loss became NaN (exit 4)`."""
    return f"{cell.condition} seed {cell.seed} {cell.status}: {cell.reason}"


SUMMARY_COLUMNS = ("condition", "runs", "accuracy, mean", "accuracy, IQM", "area under curve", "tokens per answer")
"""Head of the table of conditions."""


def summary_row(one: Summary) -> list[str]:
    """The cells of SUMMARY_COLUMNS."""
    return [
        one.condition,
        str(one.done) if one.done == one.planned else f"{one.done} of {one.planned}",
        *(estimate(value, ".3f") for value in (one.mean, one.iqm, one.area)),
        estimate(one.avg_tokens, ".1f"),
    ]


REACH_COLUMNS = ("condition", "reached", "steps", *SPENT, *(f"{what}, whole run" for what in SPENT))
"""Head of the table of costs: medians to the threshold, means of whole runs."""


def reach_row(one: Summary) -> list[str]:
    """The cells of REACH_COLUMNS."""
    reached = "-" if one.reached is None else f"{one.reached} of {one.done}"
    to = [amount(one.to_threshold.get(what, math.nan)) for what in ("steps", *SPENT)]
    return [one.condition, reached, *to, *(amount(one.total[what]) for what in SPENT)]


BASELINE = "Against the baseline, tested separately:"
"""Above the sentences of `second`."""

COMPARISON_COLUMNS = ("comparison", "accuracy", "seeds", "p", "Holm", "effect g", "verdict")
"""Head of the table of differences."""


def comparison_row(one: Comparison) -> list[str]:
    """The cells of COMPARISON_COLUMNS."""
    return [
        title(one),
        f"{signed(one.difference.value)}{interval(one.difference)}",
        str(len(one.seeds)),
        p_value(one.p).removeprefix("= ") + ("" if one.exact else " (sampled)"),
        p_value(one.holm).removeprefix("= "),
        "-" if math.isnan(one.effect) else f"{one.effect:+.2f}",
        conclusion(one) if one.seeds else "cannot tell",
    ]


DESCRIBED_COLUMNS = ("comparison", "P(improvement)", "area under curve", "tokens per answer")
"""Head of the table of differences that are not tested."""


def described_row(one: Comparison) -> list[str]:
    """The cells of DESCRIBED_COLUMNS."""
    area = f"{signed(one.area.value)}{interval(one.area)}"
    return [title(one), estimate(one.improvement, ".2f"), area, estimate(one.avg_tokens, "+.1f")]


def note(analysis: Analysis) -> str:
    """How to read the numbers, and which threshold and tests were used."""
    threshold, both = analysis.results.threshold, (*analysis.primary, *analysis.secondary)
    how = "exact" if all(one.exact for one in both) else f"exact up to {statistics.EXACT_SEEDS} seeds, sampled beyond"
    family = (
        "The ladder and the baseline are two families, corrected separately"
        if analysis.secondary
        else "Holm corrects it for all comparisons"
    )
    reach = "" if threshold is None else f" The threshold is an accuracy of {threshold:.3f}."
    return (
        f"Differences are paired by seed. p is the two-sided permutation test by sign flips ({how}). {family}: the "
        f"chance of any false claim about one is at most {analysis.results.alpha:.0%}. Intervals of differences are "
        "95% paired t intervals, uncorrected; those of conditions are bootstrap intervals over runs. Recommended "
        f"numbers of seeds are for a power of 80% at the observed effect.{reach}"
    )


def tables(analysis: Analysis) -> dict[str, Table]:
    """The tables of a report, in HTML and in Markdown: differences, described, conditions, costs, runs."""
    results, both = analysis.results, (*analysis.ladder, *analysis.baseline)
    seeds = [str(seed) for seed in results.seeds]
    runs = [
        [label, *(shown(results.cells.get((label, seed))) for seed in results.seeds)] for label in results.conditions
    ]
    return {
        "differences": Table(COMPARISON_COLUMNS, [comparison_row(one) for one in both]),
        "described": Table(DESCRIBED_COLUMNS, [described_row(one) for one in both]),
        "conditions": Table(SUMMARY_COLUMNS, [summary_row(one) for one in analysis.summaries]),
        "costs": Table(REACH_COLUMNS, [reach_row(one) for one in analysis.summaries]),
        "runs": Table(["condition", *seeds], runs),
    }


def markdown(analysis: Analysis, commands: Sequence[str]) -> str:
    """report.md."""
    return fill(
        "campaign.md",
        title=analysis.results.name,
        headline=headline(analysis),
        sentences=sentences(analysis),
        baseline=BASELINE,
        others=second(analysis),
        lost=[lost_cell(cell) for cell in analysis.results.without_result()],
        note=note(analysis),
        commands=commands,
        **tables(analysis),
    )


def as_json(analysis: Analysis) -> dict[str, Any]:
    """The analysis as JSON; numbers that are not finite are null."""
    results = analysis.results
    return {
        "name": results.name,
        "baseline": results.baseline,
        "seeds": list(results.seeds),
        "threshold": results.threshold,
        "headline": headline(analysis),
        "conditions": [_plain(one) for one in analysis.summaries],
        "comparisons": [
            _plain(one) | {"significant": one.significant, "verdict": conclusion(one) if one.seeds else "cannot tell"}
            for one in (*analysis.ladder, *analysis.baseline)
        ],
        "without_result": [
            {"condition": cell.condition, "seed": cell.seed, "status": cell.status, "reason": cell.reason}
            for cell in results.without_result()
        ],
    }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shown(cell: Cell | None) -> str:
    """A cell of the table of runs: its accuracy, or else its status."""
    if cell is None:
        return "-"
    return cell.status if cell.accuracy is None else f"{cell.accuracy:.3f}"


def p_value(p: float) -> str:
    """`= .19`, `= .0078`, `< .001`, `= 1`."""
    if p < 0.001:
        return "< .001"
    return f"= {p:.2f}".replace("0.", ".").replace("1.00", "1") if p >= 0.1 else f"= {p:.2g}".replace("0.", ".")


def signed(value: float) -> str:
    """`+0.012`; `-` if there is none."""
    return "-" if math.isnan(value) else f"{value:+.3f}"


def interval(value: Estimate) -> str:
    """` [-0.004, +0.028]`; empty if there is none."""
    return "" if math.isnan(value.low) else f" [{value.low:+.3f}, {value.high:+.3f}]"


def estimate(value: Estimate, form: str) -> str:
    """`0.512 [0.480, 0.541]`; without an interval `0.512`; without a value `-`."""
    if math.isnan(value.value):
        return "-"
    return f"{value.value:{form}}" + ("" if math.isnan(value.low) else f" [{value.low:{form}}, {value.high:{form}}]")


def amount(value: float) -> str:
    """`1.2 M`, `340`; `never` for what is infinite."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "never"
    for unit, size in (("M", 1e6), ("k", 1e4)):
        if value >= size:
            return f"{value / (1e6 if unit == 'M' else 1e3):.3g} {unit}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
