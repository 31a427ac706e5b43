"""Report of a comparison: the verdict, then the evidence. One HTML file without scripts or requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from retrain.campaign.verdict import figures, run_facts, sentences
from retrain.campaign.verdict.analysis import NOTHING, Analysis, Comparison, analyze, average, mean_estimate
from retrain.campaign.verdict.credit_map import CreditMap, credit_map
from retrain.campaign.verdict.judging import area, length
from retrain.campaign.verdict.results import SPENT, Cell, Results
from retrain.campaign.verdict.run_reader import read_campaign, read_campaign_tables
from retrain.campaign.verdict.sentences import amount, estimate
from retrain.campaign.verdict.verdict_kinds import KINDS
from retrain.report import latex
from retrain.report.charts import number
from retrain.report.exported_figures import FOLDER, Drawing, stacked, write_figures
from retrain.report.page import Table, fill, plural
from retrain.report.samples import conversation
from retrain.report.shown_settings import settings
from retrain.system.files import plain_files, write_text, writing

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
        StorageError: the campaign cannot be read, an entry of it is a link, or the report cannot be written.
    """
    tables = read_campaign_tables(directory)
    analysis = analyze(tables)
    added = run_facts.added_facts(directory, tables)
    # results.csv has a row for each run; the tables of tasks have the conditions of one task each.
    every = tables
    if tables[0].task:  # then a row of results.csv is a run of one task
        every = [read_campaign(directory, outcome=outcome) for outcome in analysis.outcomes]
    commands = run_facts.campaign_commands(directory, every[0])
    html, text, tex = (directory / f"report.{kind}" for kind in ("html", "md", "tex"))
    # A link among the files would let the report overwrite a file elsewhere.
    plain_files(directory, deep=False)
    with writing(directory):
        pages = {table.task: run_pages(table, directory) for table in analysis.main}
        contents = _contents(analysis, commands, added)
        write_text(html, fill("campaign.html", **contents, **_evidence(analysis, pages)))
        write_text(text, fill("campaign.md", **contents))
        write_text(tex, paper(analysis))
        drawings = write_figures(directory / FOLDER, exported(analysis))
        files = (html, text, tex, *run_facts.write_tables(every, directory), *drawings)
    shown = "\n".join([sentences.text(analysis), *(f"  {line}" for facts in added for line in facts.remarks)])
    return Report(analysis, shown, files)


def render(analysis: Analysis, commands: Sequence[str]) -> str:
    """Render the report as an HTML document, without links to run reports. Equal input gives equal text."""
    return fill("campaign.html", **_contents(analysis, commands, ()), **_evidence(analysis, {}))


def paper(analysis: Analysis) -> str:
    """Return the tables of conditions, differences and runs for a paper, as LaTeX."""
    name, last = analysis.first.name, f"{analysis.first.outcome.label}, by seed"
    tables = {f"{name}: {title or 'conditions'}": table for title, table in conditions(analysis)}
    notes = [sentences.note(analysis), *(f"{line.rstrip('.')}." for line in sentences.remarks(analysis))]
    tables[f"{name}: differences. {' '.join(notes)}"] = differences(analysis)
    return latex.tables(tables | {f"{table.name}: {last}": runs(table) for table in analysis.main})


def text(analysis: Analysis) -> str:
    """Format the table of conditions and the verdict for a terminal."""
    tables = [line for _, table in conditions(analysis) for line in [*table.aligned(), ""]]
    return "\n".join([*tables, sentences.text(analysis)])


def exported(analysis: Analysis) -> dict[str, Drawing]:
    """Return every figure by its name: differences, learning curves, and results over other outcomes and costs."""
    drawings = dict[str, Drawing]()
    for outcome in analysis.outcomes:
        every = analysis.of(outcome)
        span, name = figures.forest_span(every), "" if outcome == analysis.first.outcome else f" {outcome.metric}"
        rows = [
            (sentences.title(test), figures.forest_row(test, span), estimate(test.difference, "+.3f")) for test in every
        ]
        heads = ("", f"difference in {outcome.metric}")
        drawings[f"differences{name}"] = Drawing(stacked(rows, figures.forest_axis(span), heads) if rows else "")
    keys = figures.keys(analysis.first)
    for table in analysis.main:
        where = f" {table.task}" if table.task else ""
        drawings |= {f"learning curves{where} {title}": Drawing(chart, keys) for title, _, chart in _curves(table)}
    return drawings | {f"result and {title}": Drawing(chart, keys) for title, chart in _scatters(analysis)}


def _scatters(analysis: Analysis) -> list[tuple[str, str]]:
    """Return the first outcome over the others and over costs; none for several tasks."""
    # Costs and results of different tasks have no common axis.
    return figures.scatters(analysis.first, analysis.tables[1:]) if len(analysis.main) == 1 else []


def run_pages(results: Results, directory: Path) -> dict[tuple[str, int], str]:
    """Return the path of each run's report, relative to `directory`, by (condition, seed).

    A worker writes it when the run ends. Writing it here would read every rollout of every run.
    """
    pages = {run: cell.path / "report.html" for run, cell in results.cells.items()}
    return {run: str(page.relative_to(directory)) for run, page in pages.items() if page.exists()}


def _contents(analysis: Analysis, commands: Sequence[str], added: Sequence[run_facts.AddedFacts]) -> dict[str, Any]:
    """Return the values of the templates that HTML and Markdown share."""
    first = analysis.first
    count = plural(len(analysis.main), "task") + ", " if first.task else ""
    scope = f"{count}{plural(len(first.conditions), 'condition')}, {plural(len(first.seeds), 'seed')}; "
    scope += f"the result of a run is its {'' if first.outcome.summary == 'mean' else 'last '}{first.outcome.label}"
    return {
        "title": first.name.partition(": ")[0],
        "scope": "; ".join([scope, f"baseline {first.baseline}", *(facts.scope for facts in added if facts.scope)]),
        "headline": sentences.headline(analysis),
        "sentences": [sentences.sentence(comparison) for comparison in analysis.shown],
        "remarks": [*sentences.notes(analysis), *(line for facts in added for line in facts.remarks)],
        "note": sentences.note(analysis),
        "differences": differences(analysis),
        "described": described(analysis),
        "conditions": conditions(analysis),
        "costs": Table.of([spent(first, condition) for condition in first.conditions] if _scatters(analysis) else []),
        "threshold": first.threshold,
        "measured": first.outcome.label,
        "added": [(facts.title, facts.table) for facts in added if facts.table.rows],
        "runs": [(table.task, runs(table)) for table in analysis.main],
        "commands": commands,
    }


def _evidence(analysis: Analysis, pages: Mapping[str, Mapping[tuple[str, int], str]]) -> dict[str, Any]:
    """Return the values that only the HTML template uses: drawings, links, credit, configuration."""
    first, credit = analysis.first, credit_map(analysis.first)
    changes, environment = run_facts.what_differs(first), run_facts.environments(first).items()
    labels = next(iter(changes.values()), {})
    curves = [
        (table.task or title, caption, chart) for table in analysis.main for title, caption, chart in _curves(table)
    ]
    return {
        "verdicts": [_verdicts(analysis, metric.metric) for metric in analysis.outcomes],
        "marks": figures.verdict_marks(),
        "linked": [(table.task, linked(table, pages.get(table.task, {}))) for table in analysis.main],
        "keys": figures.keys(first),
        "curves": curves,
        "scatters": _scatters(analysis),
        "credit": credit,
        "completions": [_completion(credit, index) for index in range(len(credit.rows))] if credit else [],
        "changes": Table(["key", *labels], [[key, *values.values()] for key, values in changes.items()]),
        "configuration": settings(run_facts.configuration(first)),
        "environment": Table(("", ""), [(key, _frequent(values)) for key, values in environment]),
    }


def _curves(table: Results) -> list[tuple[str, str, str]]:
    # With tasks only the first chart, of all conditions: a chart for each condition and task would be dozens.
    return figures.curves(table)[: 1 if table.task else None]


def linked(results: Results, pages: Mapping[tuple[str, int], str]) -> dict[str, Any]:
    """Build the data of the macro `runs`: each run's result with a link to its report."""
    return {
        "table": runs(results),
        "lost": {cell.status for cell in results.lost},
        "links": [["", *(pages.get((label, seed)) for seed in results.seeds)] for label in results.conditions],
    }


def _verdicts(analysis: Analysis, metric: str) -> dict[str, Any]:
    """Return the lines of one outcome, family by family, and their axis."""
    shown = [comparison for comparison in analysis.shown if comparison.outcome.metric == metric]
    span = figures.forest_span(shown)
    outcome = next(tested for tested in analysis.outcomes if tested.metric == metric)
    margin = f"; the band is the margin of {outcome.margin:g}" if outcome.margin else ""
    families = [
        (sentences.TITLES[family], [_line(comparison, span) for comparison in family_of])
        for family, family_of in ((name, list(group)) for name, group in groupby(shown, lambda test: test.family))
    ]
    return {"title": f"{metric}: {outcome.direction}{margin}", "families": families, "axis": figures.forest_axis(span)}


def _line(comparison: Comparison, span: tuple[float, float]) -> dict[str, str]:
    return {
        "style": KINDS[comparison.kind].css,
        "title": sentences.title(comparison),
        "drawing": figures.forest_row(comparison, span),
        "difference": estimate(comparison.difference, "+.3f") if comparison.seeds else "no seed in both",
        "verdict": sentences.short(comparison),
        "why": sentences.why(comparison) if comparison.seeds else "",
        "seeds": sentences.seeds(comparison),
    }


def differences(analysis: Analysis) -> Table:
    """Return the table of tested differences."""
    columns = "difference", "verdict", "seeds", "test", "p", "corrected p", "detectable", "effect g"
    return _columns(analysis, columns)


def described(analysis: Analysis) -> Table:
    """Return the table of effects that are not tested."""
    return _columns(analysis, ("area under curve", "tokens per answer", "AES"))


def _columns(analysis: Analysis, columns: Sequence[str]) -> Table:
    rows: list[list[str]] = []
    for comparison in analysis.shown:
        texts, metric = sentences.texts(comparison), comparison.outcome.metric
        first = texts["comparison"] + (f": {metric}" if metric != "accuracy" else "")
        rows.append([first, *(texts[name] for name in columns)])
    return Table(("comparison", *columns), rows)


def runs(results: Results) -> Table:
    """Return the table of all results: a row for each condition, a column for each seed."""
    rows = [
        [label, *(_shown(results.cells.get((label, seed))) for seed in results.seeds)] for label in results.conditions
    ]
    return Table(("condition", *map(str, results.seeds)), rows)


def _shown(cell: Cell | None) -> str:
    """Return the result of a run, or else its status."""
    if cell is None:
        return "-"
    return cell.status if cell.result is None else f"{cell.result:.3f}"


def conditions(analysis: Analysis) -> list[tuple[str, Table]]:
    """Return the tables of means over runs: conditions with all outcomes, or tasks by conditions for each outcome."""
    first = analysis.first
    # A campaign of one task in `tasks` names it in its table, as with several.
    if len(analysis.main) == 1 and not first.task:
        return [("", Table.of([_summary(analysis, condition) for condition in first.conditions]))]
    titled: list[tuple[str, Table]] = []
    for outcome in analysis.outcomes:
        tables = [table for table in analysis.tables if table.outcome == outcome]
        means = [{label: estimate(average(table, label), ".3f") for label in table.conditions} for table in tables]
        rows = [{"task": table.task} | row for table, row in zip(tables, means, strict=True)]
        titled.append((f"{outcome.label} by task", Table.of(rows)))
    return titled


def _summary(analysis: Analysis, condition: str) -> dict[str, str]:
    first, done = analysis.first, [cell for cell in analysis.first.runs if cell.done]
    count, planned = len(first.done(condition)), len(first.of(condition))
    summary = {table.outcome.metric: estimate(average(table, condition), ".3f") for table in analysis.tables}
    for name, measure, form in (("area under curve", area, ".3f"), ("tokens per answer", length, ".1f")):
        if any(measure(cell) is not None for cell in done):
            summary[name] = estimate(average(first, condition, measure), form)
    return {"condition": condition, "runs": str(count) if count == planned else f"{count} of {planned}", **summary}


def spent(table: Results, condition: str) -> dict[str, str]:
    """Return a row of costs: runs that reached the threshold, steps until then if all did, and a whole run."""
    cells = list(table.done(condition).values())
    steps = [step for cell in cells if (step := cell.reached(table.threshold, table.outcome.sign)) is not None]
    # A mean over the runs that reached the threshold would favor conditions of which only the quick runs do.
    every = len(steps) == len(cells)
    return {
        "condition": condition,
        "reached": "-" if table.threshold is None else f"{len(steps)} of {len(cells)}",
        "steps until then": amount(mean_estimate([*map(float, steps)]) if every else NOTHING),
        **{f"{cost}, whole run": amount(mean_estimate([c.total[i] for c in cells])) for i, cost in enumerate(SPENT)},
    }


def _completion(credit: CreditMap, index: int) -> dict[str, Any]:
    """Return the data of a completion with each condition's advantages per token."""
    row, length = credit.rows[index], len(credit.rows[index]["tokens"])
    scales = {
        label: max((abs(value) for row in rows for value in row), default=0.0)
        for label, rows in credit.advantages.items()
    }
    correctness = "" if row.get("correct") is None else ", right" if row["correct"] else ", wrong"
    return {
        "head": f"reward {float(row['reward']):.3g}{correctness}",
        # The question is at the end of a prompt; a system message may fill its beginning.
        "prompt": str(row["prompt"])[-300:],
        "tokens": row["tokens"],
        "planning": row.get("planning"),
        "observed": conversation(row).observed,
        "badges": conversation(row).badges,
        "rest": f" ... {length - _TOKENS} more" if length > _TOKENS else "",
        "lines": [
            (label, scale, number(float(f"{scale:.2g}")), credit.advantages[label][index][:_TOKENS])
            for label, scale in scales.items()
        ],
    }


def _frequent(values: dict[str, int]) -> str:
    """Format the value that all runs share, or each value with its number of runs."""
    if len(values) == 1:
        return next(iter(values))
    return "; ".join(f"{value} ({plural(count, 'run')})" for value, count in values.items())
