"""The report of a campaign: the verdict first, then what it rests on. One HTML file without scripts or requests.

Labels, reasons and model text come from outside: all of it is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from retrain.campaign.verdict import figures, provenance
from retrain.campaign.verdict import sentences as verdict
from retrain.campaign.verdict.analysis import Analysis, Comparison, analyze
from retrain.campaign.verdict.credit_map import CreditMap, credit_map
from retrain.campaign.verdict.results import Results, read_campaign, write_tables
from retrain.report import run_page as run_report
from retrain.storage.run_directory import read_json

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
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
    """Write the report of a campaign into its directory, from its files alone; unfinished ones get one as well.

    Raises:
        ConfigError: there is no campaign at this path.
    """
    results = read_campaign(directory)
    analysis = analyze(results)
    commands = provenance.campaign_commands(directory, read_json(directory / "plan.json"), results)
    html, text = directory / "report.html", directory / "report.md"
    html.write_text(render(analysis, commands, _source(directory)), encoding="utf-8")
    text.write_text(verdict.markdown(analysis, commands), encoding="utf-8")
    return Report(analysis, verdict.text(analysis), (html, text, *write_tables(results, directory)))


def render(analysis: Analysis, commands: Sequence[str], source: str = "") -> str:
    """The report as an HTML document; equal files give equal text.

    Args:
        commands: what gives the numbers again.
        source: the campaign's TOML.
    """
    results = analysis.results
    name = escape(results.name)
    style = "".join(Path(file).with_suffix(".css").read_text() for file in (run_report.__file__, __file__))
    body = [
        f'<h1>{name}</h1><p class="soft">{_scope(results)}</p>',
        f'<p class="summary">{escape(verdict.headline(analysis))}</p>',
        _verdict(analysis),
        _lost(results),
        _forest(analysis),
        _conditions(analysis),
        _curves(results),
        _cost(analysis),
        _runs(results),
        _credit(credit_map(results)),
        _changes(results),
        _environment(results),
        _commands(commands, source),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _source(directory: Path) -> str:
    file = directory / "campaign.toml"
    return file.read_text() if file.is_file() else ""


def _scope(results: Results) -> str:
    labels, seeds = len(results.conditions), len(results.seeds)
    return escape(
        f"{labels} condition{'s' * (labels != 1)}, {seeds} seed{'s' * (seeds != 1)}; "
        f"the result of a run is its last held-out accuracy; baseline {results.baseline}"
    )


def _verdict(analysis: Analysis) -> str:
    second = verdict.second(analysis)
    others = [one for one in analysis.secondary if verdict.sentence(one) in second]
    below = f'<p class="soft">{verdict.BASELINE}</p>{_sentences(others)}' if others else ""
    return f'{_sentences(analysis.primary)}{below}<p class="soft">{escape(verdict.note(analysis))}</p>'


def _sentences(comparisons: Iterable[Comparison]) -> str:
    items = "".join(f'<li class="{_kind(one)}">{_emphasized(one)}</li>' for one in comparisons)
    return f'<ul class="verdict">{items}</ul>'


def _emphasized(one: Comparison) -> str:
    """The sentence with its subject and conclusion in bold."""
    if not one.seeds:
        return escape(verdict.sentence(one))
    parts = (verdict.title(one), verdict.numbers(one), verdict.conclusion(one))
    subject, numbers, conclusion = (escape(part) for part in parts)
    first, semicolon, rest = conclusion.partition(";")
    return f"<b>{subject}</b>: {numbers}: <b>{first}</b>{semicolon}{rest}."


def _kind(one: Comparison) -> str:
    if not one.told:
        return "untold"
    return "better" if one.difference.value > 0 else "worse"


def _lost(results: Results) -> str:
    lost = "".join(f"<li>{escape(verdict.lost_cell(cell))}</li>" for cell in results.without_result())
    return f'<h3 class="lost">Without a result</h3><ul>{lost}</ul>' if lost else ""


def _forest(analysis: Analysis) -> str:
    families = [("Each condition against the one that it adds to", analysis.ladder)]
    families = [pair for pair in (*families, ("Each condition against the baseline", analysis.baseline)) if pair[1]]
    if not families:
        return ""
    both = [one for _, family in families for one in family]
    span = figures.forest_span(both)
    first, *names = verdict.COMPARISON_COLUMNS[:-1]
    head = f"<th>{first}</th><th></th>{''.join(f'<th>{escape(name)}</th>' for name in names)}"
    rows = "".join(
        f'<tr class="group"><td colspan="{len(names) + 2}">{title}</td></tr>'
        + "".join(_forest_row(one, drawing) for one, drawing in zip(family, figures.forest(family, span), strict=True))
        for title, family in families
    )
    axis = f'<tr class="group"><td></td><td>{figures.forest_axis(span)}</td>{"<td></td>" * len(names)}</tr>'
    described = _table(verdict.DESCRIBED_COLUMNS, [verdict.described_row(one) for one in both])
    return (
        '<h2>Differences</h2><p class="soft">In final held-out accuracy. Filled: told apart from no difference, after '
        "Holm's correction. Hollow: not. Lines are 95% intervals.</p>"
        f'<div class="scroll"><table class="forests"><tr>{head}</tr>{rows}{axis}</table></div>'
        f"<details open><summary>Differences that are described and not tested</summary>{described}</details>"
    )


def _forest_row(one: Comparison, drawing: str) -> str:
    title, *cells = map(escape, verdict.comparison_row(one)[:-1])
    return f"<tr><td>{title}</td><td>{drawing}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _conditions(analysis: Analysis) -> str:
    summaries, threshold = analysis.summaries, analysis.results.threshold
    caption = "Of a whole run in the mean; evaluation is not in it."
    if threshold is not None:
        caption = (
            f"To an accuracy of {threshold:.3f} in the median over runs, where a run that never gets there counts as "
            "later than all others, and of a whole run in the mean; evaluation is not in it."
        )
    costs = _table(verdict.REACH_COLUMNS, [verdict.reach_row(one) for one in summaries])
    return (
        '<h2>Conditions</h2><p class="soft">Means over runs with 95% bootstrap intervals.</p>'
        f"{_table(verdict.SUMMARY_COLUMNS, [verdict.summary_row(one) for one in summaries])}"
        f'<h3>Cost</h3><p class="soft">{caption}</p>{costs}'
    )


def _curves(results: Results) -> str:
    overview, single = figures.curves(results)
    if not overview:
        return ""
    drawn = [_figure("All conditions", "mean over runs", overview, figures.legend(results))]
    for label, chart in single.items():
        drawn.append(_figure(label, _curve_caption(results, label), chart))
    return (
        '<h2>Learning curves</h2><p class="soft">Held-out accuracy. Strong: the mean of finished runs, with its 95% '
        "interval; faint: single runs; dashed: the mean of the baseline.</p>"
        f'<div class="charts">{"".join(drawn)}</div>'
    )


def _curve_caption(results: Results, label: str) -> str:
    count = len(results.done(label))
    return f"{count} run{'s' * (count != 1)}" + (", the baseline" if label == results.baseline else "")


def _cost(analysis: Analysis) -> str:
    charts = [figures.cost(analysis, 1, "tokens sampled"), figures.cost(analysis, 2, "seconds in steps")]
    titles = ("Tokens", "Time")
    drawn = [
        _figure(title, "final held-out accuracy; large marks are means with 95% intervals", chart)
        for title, chart in zip(titles, charts, strict=True)
        if chart
    ]
    if not drawn:
        return ""
    legend = figures.legend(analysis.results)
    return f'<h2>Cost and accuracy</h2>{legend}<div class="charts">{"".join(drawn)}</div>'


def _figure(title: str, caption: str, chart: str, below: str = "") -> str:
    return f"<figure><figcaption><b>{escape(title)}</b>{escape(caption)}</figcaption>{chart}{below}</figure>"


def _runs(results: Results) -> str:
    head = "".join(f"<th>{seed}</th>" for seed in results.seeds)
    rows: list[str] = []
    for label in results.conditions:
        cells = [results.cells.get((label, seed)) for seed in results.seeds]
        row = "".join(
            f"<td{'' if cell is None or cell.done else ' class=lost'}>{escape(verdict.shown(cell))}</td>"
            for cell in cells
        )
        rows.append(f"<tr><td>{escape(label)}</td>{row}</tr>")
    return (
        '<h2>Runs</h2><p class="soft">Final held-out accuracy by seed.</p><div class="scroll"><table class="names">'
        f"<tr><th>seed</th>{head}</tr>{''.join(rows)}</table></div>"
    )


def _credit(found: CreditMap | None) -> str:
    if found is None:
        return ""
    skipped = "".join(f"<li>{escape(label)}: {escape(reason)}</li>" for label, reason in found.skipped.items())
    note = f'<p class="soft">Not shown:</p><ul class="soft">{skipped}</ul>' if skipped else ""
    shown = "".join(_completion(found, index) for index in range(len(found.rows)))
    return (
        '<h2>Where the credit goes</h2><p class="soft">The same completions, credited by every condition\'s pipeline: '
        f"those of {escape(found.condition)}, seed {found.seed}, step {found.step}. "
        '<span class="up" style="--a:.5">&nbsp;made likelier&nbsp;</span> '
        '<span class="down" style="--a:.5">&nbsp;made less likely&nbsp;</span>; full color is the largest advantage '
        "that the condition gives to any token shown, which stands beside its name. Planning tokens are underlined. "
        f"A correction for the sampler's rounding is left out.</p>{shown}{note}"
    )


def _completion(found: CreditMap, index: int) -> str:
    row = found.rows[index]
    lines = "".join(
        f"<tr><th>{escape(label)}</th><td>&plusmn;{figures.scale_label(scale)}</td>"
        f'<td><div class="tokens">{_tokens(found, index, label, scale)}</div></td></tr>'
        for label in found.advantages
        for scale in [_scale(found, label)]
    )
    right = "" if row.get("correct") is None else ", right" if row["correct"] else ", wrong"
    prompt = escape(str(row["prompt"])[-300:])
    return (
        f'<div class="credit"><h3>reward {float(row["reward"]):.3g}{right}: <span class="prompt">{prompt}</span></h3>'
        f"<table>{lines}</table></div>"
    )


def _scale(found: CreditMap, label: str) -> float:
    return max((abs(value) for row in found.advantages[label] for value in row), default=0.0)


def _tokens(found: CreditMap, index: int, label: str, scale: float) -> str:
    row = found.rows[index]
    tokens = row["tokens"]
    cut = {"tokens": tokens[:_TOKENS], "advantages": found.advantages[label][index][:_TOKENS]}
    rest = f" ... {len(tokens) - _TOKENS} more" if len(tokens) > _TOKENS else ""
    line = run_report.colored({**row, **cut}, scale or 1.0).replace("↵\n", "↵")  # so that the conditions align
    return line + rest


def _changes(results: Results) -> str:
    changes = provenance.differences(results)
    if not changes:
        return ""
    labels = list(dict.fromkeys(label for values in changes.values() for label in values))
    rows = [[key, *(values.get(label, "-") for label in labels)] for key, values in changes.items()]
    return (
        '<h2>Configurations</h2><p class="soft">What differs between conditions; all else is equal.</p>'
        f"{_table(['key', *labels], rows, 'changes')}"
    )


def _environment(results: Results) -> str:
    rows = [[key, _counted(values)] for key, values in provenance.environments(results).items()]
    return f"<h2>Environment</h2>{_table(['', ''], rows, 'words')}" if rows else ""


def _counted(values: dict[str, int]) -> str:
    """The value that all runs share, or each with its number of runs."""
    if len(values) == 1:
        return next(iter(values))
    return "; ".join(f"{value} ({count} run{'s' * (count != 1)})" for value, count in values.items())


def _commands(commands: Sequence[str], source: str) -> str:
    toml = f"<details><summary>campaign.toml</summary><pre>{escape(source)}</pre></details>" if source else ""
    return f"<h2>To reproduce</h2><pre>{escape(chr(10).join(commands))}</pre>{toml}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], style: str = "names") -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="{style}"><tr>{cells}</tr>{body}</table></div>'
