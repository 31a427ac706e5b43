"""The tables of docs/evidence.md, from the results of the five standard conditions that are stored beside this file.

python benchmarks/evidence/ablations.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from retrain.campaign.plan.outcome import Outcome
from retrain.campaign.verdict.analysis import Comparison, compare
from retrain.campaign.verdict.result_files import tables_of_rows
from retrain.campaign.verdict.result_rows import ResultRow, rows_of_files
from retrain.campaign.verdict.results import Results
from retrain.campaign.verdict.sentences import p_value, short

HERE = Path(__file__).parent
ABLATIONS = {"SmolLM2": "smollm2.csv"}
"""What the conditions were trained on, and the name of the file of results."""
ACCURACY = Outcome(margin=0.02)
SHOWN = {"accuracy": ".3f", "area": ".3f", "avg_tokens": ".1f"}
"""Columns of which the tables show means over the seeds, with their format."""


def families(results: Results) -> dict[str, list[Comparison]]:
    """Compare each condition with the one that it extends, and with the first: two families, each corrected alone."""
    grpo, maxrl, gtpo, *ends = results.conditions
    ladder = [(maxrl, grpo), (gtpo, maxrl), *((end, gtpo) for end in ends)]
    baseline = [(one, grpo) for one in results.conditions[1:]]
    return {
        name: compare([(results, *pair) for pair in pairs], name)
        for name, pairs in (("ladder", ladder), ("baseline", baseline))
    }


def number(value: float, form: str = "+.3f") -> str:
    """Return a number without the zero before its point."""
    return format(value, form).replace("0.", ".", 1) if abs(value) < 1 else format(value, form)


def sentence(one: Comparison) -> str:
    """Return a comparison in one cell of a table."""
    value, low, high = map(number, one.difference)
    deciding = {"equal": one.judged.equality, "not worse": one.judged.not_worse}
    p = p_value(deciding.get(one.kind, one.judged.corrected)).removeprefix("= ")
    detects = f"; detectable {number(one.detectable, '.3f')}" if one.kind == "open" and one.detectable else ""
    return f"{value} [{low}, {high}], p {p}: {short(one).partition(';')[0]}{detects}"


def means(rows: list[ResultRow], condition: str) -> Iterator[str]:
    """Yield the mean of each shown column over the runs of a condition, at their last step."""
    own = [row for row in rows if row.method == condition]
    last = max(row.step or 0 for row in own)
    for column, form in SHOWN.items():
        if column in own[0].figures:
            yield number(fmean(float(row.figures[column]) for row in own if (row.step or 0) == last), form)


def table(name: str) -> list[str]:
    """Return the table of an ablation as lines of Markdown."""
    rows = rows_of_files([HERE / ABLATIONS[name]])
    (results,) = tables_of_rows(rows, ACCURACY)
    shown = [column.removeprefix("avg_") for column in SHOWN if column in rows[0].figures]
    heads = ["condition", *shown, "against the condition that it extends", "against grpo"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    found = {kind: {one.condition: sentence(one) for one in every} for kind, every in families(results).items()}
    for condition in results.conditions:
        cells = [condition, *means(rows, condition), *(every.get(condition, "") for every in found.values())]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    for name in ABLATIONS:
        print(f"\n## {name}\n")
        print("\n".join(table(name)))
