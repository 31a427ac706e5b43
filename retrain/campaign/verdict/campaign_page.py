"""The report of a campaign: the verdict first, then what it rests on. One HTML file without scripts or requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.campaign.verdict import figures, provenance
from retrain.campaign.verdict import sentences as verdict
from retrain.campaign.verdict.analysis import Analysis, Comparison, analyze
from retrain.campaign.verdict.credit_map import CreditMap, credit_map
from retrain.campaign.verdict.results import Results, read_campaign, write_tables
from retrain.report.charts import number
from retrain.report.page import Table, fill, plural
from retrain.report.shown_settings import settings
from retrain.system.files import write_text, writing

_TOKENS = 400
"""Tokens of a completion that the credit map shows."""


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes:
        analysis: the numbers.
        text: the verdict, for a terminal.
        files: report.html, report.md, results.csv and, with pyarrow, results.parquet.
    """

    analysis: Analysis
    text: str
    files: tuple[Path, ...]


def write_report(directory: Path) -> Report:
    """Write the report of a campaign, finished or not, into its directory, from its files alone.

    Raises:
        ConfigError: there is no campaign at this path. StorageError: it cannot be read, or not be written.
    """
    results = read_campaign(directory)
    analysis = analyze(results)
    commands = provenance.campaign_commands(directory, results)
    html, text = directory / "report.html", directory / "report.md"
    with writing(directory):
        write_text(html, render(analysis, commands))
        write_text(text, verdict.markdown(analysis, commands))
        return Report(analysis, verdict.text(analysis), (html, text, *write_tables(results, directory)))


def render(analysis: Analysis, commands: Sequence[str]) -> str:
    """The report as an HTML document; equal files give equal text.

    Args:
        commands: what gives the numbers again.
    """
    results, credit = analysis.results, credit_map(analysis.results)
    tables = verdict.tables(analysis)
    environment = provenance.environments(results).items()
    return fill(
        "campaign.html",
        title=results.name,
        scope=f"{plural(len(results.conditions), 'condition')}, {plural(len(results.seeds), 'seed')}; "
        f"the result of a run is its last held-out accuracy; baseline {results.baseline}",
        headline=verdict.headline(analysis),
        primary=_verdicts(analysis.primary),
        others=_verdicts(analysis.secondary),
        baseline=verdict.BASELINE,
        note=verdict.note(analysis),
        lost=[verdict.lost_cell(cell) for cell in results.without_result()],
        statuses={cell.status for cell in results.without_result()},
        **_forests(analysis, tables["differences"].rows),
        threshold=results.threshold,
        keys=figures.keys(results),
        curves=_curves(results),
        spent=figures.costs(results),
        credit=credit,
        completions=[_completion(credit, index) for index in range(len(credit.rows))] if credit else [],
        changes=_changes(results),
        configuration=settings(provenance.configuration(results)),
        environment=Table(("", ""), [(key, _counted(values)) for key, values in environment]),
        commands=commands,
        **tables,
    )


def _verdicts(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Every sentence with its kind, in parts that are plain and bold in turn."""
    found: list[dict[str, Any]] = []
    for one in comparisons:
        first, semicolon, rest = verdict.conclusion(one).partition(";")
        parts = ["", verdict.title(one), f": {verdict.numbers(one)}", first, f"{semicolon}{rest}."]
        found.append({"kind": figures.kind(one), "parts": parts})
    return found


def _forests(analysis: Analysis, cells: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Families of comparisons, each a title and rows of a drawing and texts, over one axis."""
    families = {
        "Each condition against the one that it adds to": analysis.ladder,
        "Each condition against the baseline": analysis.baseline,
    }
    span = figures.forest_span([*analysis.ladder, *analysis.baseline])
    rows = iter(cells)
    drawn = {
        title: [(figures.forest_row(one, span), next(rows)) for one in family] for title, family in families.items()
    }
    return {"forests": [pair for pair in drawn.items() if pair[1]], "axis": figures.forest_axis(span)}


def _curves(results: Results) -> list[tuple[str, str, str]]:
    overview, single = figures.curves(results)
    if not overview:
        return []
    captions = {label: plural(len(results.done(label)), "run") for label in single}
    captions[results.baseline] = captions.get(results.baseline, "") + ", the baseline"
    return [
        ("All conditions", "mean over runs", overview),
        *((label, captions[label], chart) for label, chart in single.items()),
    ]


def _completion(found: CreditMap, index: int) -> dict[str, Any]:
    """A completion with the advantages that every condition gives to its tokens."""
    row, length = found.rows[index], len(found.rows[index]["tokens"])
    scales = {
        label: max((abs(value) for row in rows for value in row), default=0.0)
        for label, rows in found.advantages.items()
    }
    right = "" if row.get("correct") is None else ", right" if row["correct"] else ", wrong"
    return {
        "head": f"reward {float(row['reward']):.3g}{right}",
        "prompt": str(row["prompt"])[-300:],
        "tokens": row["tokens"],
        "planning": row.get("planning"),
        "rest": f" ... {length - _TOKENS} more" if length > _TOKENS else "",
        "lines": [
            (label, scale, number(float(f"{scale:.2g}")), found.advantages[label][index][:_TOKENS])
            for label, scale in scales.items()
        ],
    }


def _changes(results: Results) -> Table:
    changes = provenance.differences(results)
    labels = list(dict.fromkeys(label for values in changes.values() for label in values))
    rows = [[key, *(values.get(label, "-") for label in labels)] for key, values in changes.items()]
    return Table(["key", *labels], rows)


def _counted(values: dict[str, int]) -> str:
    """The value that all runs share, or each with its number of runs."""
    if len(values) == 1:
        return next(iter(values))
    return "; ".join(f"{value} ({plural(count, 'run')})" for value, count in values.items())
