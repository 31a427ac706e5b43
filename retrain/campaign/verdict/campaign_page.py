"""The report of a campaign: the verdict first, then what it rests on. One HTML file without scripts or requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from retrain.campaign.verdict import figures
from retrain.campaign.verdict import results as reading
from retrain.campaign.verdict import sentences as verdict
from retrain.campaign.verdict.analysis import Analysis, Comparison, analyze
from retrain.campaign.verdict.credit_map import CreditMap, credit_map
from retrain.campaign.verdict.results import Cell, Results
from retrain.errors import RetrainError
from retrain.report import run_page
from retrain.report.charts import number
from retrain.report.page import Table, fill, plural
from retrain.report.samples import conversation
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
    results = reading.read_campaign(directory)
    analysis = analyze(results)
    commands = reading.campaign_commands(directory, results)
    html, text = directory / "report.html", directory / "report.md"
    with writing(directory):
        write_text(html, render(analysis, commands, run_pages(results, directory)))
        write_text(text, verdict.markdown(analysis, commands))
        return Report(analysis, verdict.text(analysis), (html, text, *reading.write_tables(results, directory)))


def run_pages(results: Results, directory: Path) -> dict[tuple[str, int], str]:
    """From (condition, seed) to the report of that run, as a path from `directory`; it is written if need be."""
    pages = {place: _page(cell) for place, cell in results.cells.items()}
    return {place: str(page.relative_to(directory)) for place, page in pages.items() if page}


def linked(results: Results, pages: Mapping[tuple[str, int], str]) -> dict[str, Any]:
    """What the macro `runs` shows: the result of every run, which leads to its report."""
    return {
        "table": verdict.runs(results),
        "lost": {cell.status for cell in results.lost},
        "links": [["", *(pages.get((one, seed)) for seed in results.seeds)] for one in results.conditions],
    }


def _page(cell: Cell) -> Path | None:
    """The report of a run, written if there is none that is as new as its metrics; None without steps to show."""
    page, metrics = cell.path / "report.html", cell.path / "metrics.jsonl"
    with suppress(RetrainError, OSError):
        newest = metrics.stat().st_mtime
        if not page.exists() or page.stat().st_mtime < newest:
            run_page.write_report(cell.path)
        return page
    return None


def render(
    analysis: Analysis, commands: Sequence[str], links: Mapping[tuple[str, int], str] = MappingProxyType({})
) -> str:
    """The report as an HTML document; equal files give equal text.

    Args:
        commands: what gives the numbers again.
        links: from (condition, seed) to the report of that run.
    """
    results, credit = analysis.results, credit_map(analysis.results)
    contents = verdict.contents(analysis, commands)
    environment, changes = reading.environments(results).items(), reading.differences(results)
    labels = next(iter(changes.values()), {})
    return fill(
        "campaign.html",
        scope=f"{plural(len(results.conditions), 'condition')}, {plural(len(results.seeds), 'seed')}; "
        f"the result of a run is its last held-out accuracy; baseline {results.baseline}",
        primary=_verdicts(analysis.primary),
        others=_verdicts(analysis.secondary),
        linked=linked(results, links),
        **_forests(analysis, contents["differences"].rows),
        threshold=results.threshold,
        keys=figures.keys(results),
        curves=figures.curves(results),
        spent=figures.costs(results),
        credit=credit,
        completions=[_completion(credit, index) for index in range(len(credit.rows))] if credit else [],
        changes=Table(["key", *labels], [[key, *values.values()] for key, values in changes.items()]),
        configuration=settings(reading.configuration(results)),
        environment=Table(("", ""), [(key, _counted(values)) for key, values in environment]),
        **contents,
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
    span = figures.forest_span(analysis.every)
    rows = iter([(figures.forest_row(one, span), texts) for one, texts in zip(analysis.every, cells, strict=True)])
    titles = {
        "The comparison that was declared before": analysis.declared,
        "Each condition against the one that it adds to": analysis.ladder,
        "Each condition against the baseline": analysis.baseline,
    }
    forests = [(title, [next(rows) for _ in family]) for title, family in titles.items()]
    return {"forests": [forest for forest in forests if forest[1]], "axis": figures.forest_axis(span)}


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
        "heard": conversation(row).heard,
        "badges": conversation(row).badges,
        "rest": f" ... {length - _TOKENS} more" if length > _TOKENS else "",
        "lines": [
            (label, scale, number(float(f"{scale:.2g}")), found.advantages[label][index][:_TOKENS])
            for label, scale in scales.items()
        ],
    }


def _counted(values: dict[str, int]) -> str:
    """The value that all runs share, or each with its number of runs."""
    if len(values) == 1:
        return next(iter(values))
    return "; ".join(f"{value} ({plural(count, 'run')})" for value, count in values.items())
