"""Report of a campaign: the verdict, then the evidence. One HTML file without scripts or requests."""

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
from retrain.campaign.verdict.sentences import estimate
from retrain.errors import RetrainError
from retrain.report import run_page
from retrain.report.charts import number
from retrain.report.exported_figures import FOLDER, Drawing, stacked, write_figures
from retrain.report.page import Table, fill, plural
from retrain.report.samples import conversation
from retrain.report.shown_settings import settings
from retrain.system.files import write_text, writing

_TOKENS = 400
"""Largest number of tokens of a completion in the credit map."""


@dataclass(frozen=True)
class Report:
    """The written report.

    Attributes:
        analysis: the numbers.
        text: the verdict, for a terminal.
        files: report.html, report.md, report.tex, results.csv, results.parquet (if pyarrow is installed), figures.
    """

    analysis: Analysis
    text: str
    files: tuple[Path, ...]


def write_report(directory: Path) -> Report:
    """Write the report of a finished or running campaign into its directory.

    Raises:
        ConfigError: there is no campaign at this path.
        StorageError: the campaign cannot be read, or the report cannot be written.
    """
    results = reading.read_campaign(directory)
    analysis = analyze(results)
    commands = reading.campaign_commands(directory, results)
    html, text, tex = (directory / f"report.{kind}" for kind in ("html", "md", "tex"))
    with writing(directory):
        write_text(html, render(analysis, commands, run_pages(results, directory)))
        write_text(text, verdict.markdown(analysis, commands))
        write_text(tex, verdict.latex(analysis))
        drawings = write_figures(directory / FOLDER, exported(analysis))
        files = (html, text, tex, *reading.write_tables(results, directory), *drawings)
        return Report(analysis, verdict.text(analysis), files)


def exported(analysis: Analysis) -> dict[str, Drawing]:
    """Return every figure of a verdict by its name: differences, learning curves, and results over cost."""
    results, span = analysis.results, figures.forest_span(analysis.every)
    rows = [
        (f"{one.condition} - {one.against}", figures.forest_row(one, span), estimate(one.difference, "+.3f"))
        for one in dict.fromkeys((*analysis.primary, *analysis.secondary))
    ]
    heads, keys = ("", f"difference in {results.metric}"), figures.keys(results)
    found = {"differences": Drawing(stacked(rows, figures.forest_axis(span), heads) if rows else "")}
    found |= {f"learning curves {title}": Drawing(chart, keys) for title, _, chart in figures.curves(results)}
    return found | {f"result and {title}": Drawing(chart, keys) for title, chart in figures.costs(results)}


def run_pages(results: Results, directory: Path) -> dict[tuple[str, int], str]:
    """Write missing and outdated run reports, and return the path of each by (condition, seed).

    Paths are relative to `directory`.
    """
    pages = {place: _page(cell) for place, cell in results.cells.items()}
    return {place: str(page.relative_to(directory)) for place, page in pages.items() if page}


def linked(results: Results, pages: Mapping[tuple[str, int], str]) -> dict[str, Any]:
    """Build the data of the macro `runs`: each run's result with a link to its report."""
    return {
        "table": verdict.runs(results),
        "lost": {cell.status for cell in results.lost},
        "links": [["", *(pages.get((one, seed)) for seed in results.seeds)] for one in results.conditions],
    }


def _page(cell: Cell) -> Path | None:
    """Return the report of a run, rewritten if older than its metrics; None for a run without steps."""
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
    """Render the report as an HTML document. Equal input gives equal text.

    Args:
        analysis: the numbers.
        commands: commands that reproduce the numbers.
        links: report of each run by (condition, seed).
    """
    results, credit = analysis.results, credit_map(analysis.results)
    contents = verdict.contents(analysis, commands)
    environment, changes = reading.environments(results).items(), reading.differences(results)
    labels = next(iter(changes.values()), {})
    return fill(
        "campaign.html",
        scope=f"{plural(len(results.conditions), 'condition')}, {plural(len(results.seeds), 'seed')}; "
        f"the result of a run is its last {results.measured}; baseline {results.baseline}",
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
    """Split every sentence into alternating plain and bold parts, with its kind."""
    found: list[dict[str, Any]] = []
    for one in comparisons:
        first, semicolon, rest = verdict.conclusion(one).partition(";")
        parts = ["", verdict.title(one), f": {verdict.numbers(one)}", first, f"{semicolon}{rest}."]
        found.append({"kind": figures.kind(one), "parts": parts})
    return found


def _forests(analysis: Analysis, cells: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Draw the forest plots on one axis: a title for each family, and rows of a drawing and texts."""
    span = figures.forest_span(analysis.every)
    rows = iter([(figures.forest_row(one, span), texts) for one, texts in zip(analysis.every, cells, strict=True)])
    titles = {
        "Declared comparison": analysis.declared,
        "Each condition against the one that it extends": analysis.ladder,
        "Each condition against the baseline": analysis.baseline,
    }
    forests = [(title, [next(rows) for _ in family]) for title, family in titles.items()]
    return {"forests": [forest for forest in forests if forest[1]], "axis": figures.forest_axis(span)}


def _completion(found: CreditMap, index: int) -> dict[str, Any]:
    """Return the data of a completion with each condition's advantages per token."""
    row, length = found.rows[index], len(found.rows[index]["tokens"])
    scales = {
        label: max((abs(value) for row in rows for value in row), default=0.0)
        for label, rows in found.advantages.items()
    }
    correctness = "" if row.get("correct") is None else ", right" if row["correct"] else ", wrong"
    return {
        "head": f"reward {float(row['reward']):.3g}{correctness}",
        "prompt": str(row["prompt"])[-300:],
        "tokens": row["tokens"],
        "planning": row.get("planning"),
        "observed": conversation(row).observed,
        "badges": conversation(row).badges,
        "rest": f" ... {length - _TOKENS} more" if length > _TOKENS else "",
        "lines": [
            (label, scale, number(float(f"{scale:.2g}")), found.advantages[label][index][:_TOKENS])
            for label, scale in scales.items()
        ],
    }


def _counted(values: dict[str, int]) -> str:
    """Format the value that all runs share, or each value with its number of runs."""
    if len(values) == 1:
        return next(iter(values))
    return "; ".join(f"{value} ({plural(count, 'run')})" for value, count in values.items())
