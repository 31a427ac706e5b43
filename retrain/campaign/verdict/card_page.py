"""The report card of a campaign with tasks: in words first, then a row for every task, and all tasks together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrain.campaign.plan.plan_file import read_plan
from retrain.campaign.verdict import campaign_page, figures
from retrain.campaign.verdict.across_tasks import LEVELS, PremiseCheck, ReportCard, report_card
from retrain.campaign.verdict.analysis import Comparison
from retrain.campaign.verdict.results import campaign_commands, read_campaign, write_tables
from retrain.campaign.verdict.sentences import amount, conclusion, estimate, lost_cell, p_value
from retrain.report.charts import Axes, area, polyline, svg
from retrain.report.page import Table, fill, plural
from retrain.system.files import write_text, writing

_NAMED = 5
"""Runs without a result that the words name."""
_NOTE = (
    "Differences are in final held-out accuracy, paired by seed. p is the exact permutation test by sign flips, and "
    "Holm corrects it for all rows of the table: the chance of any false claim is at most {alpha:.0%}. Intervals of "
    "differences are 95% paired t intervals, uncorrected; those over all tasks are from a bootstrap of the runs "
    "within their tasks. IQM is the interquartile mean over the runs of all tasks. Rollouts and tokens are medians to "
    "nine tenths of the baseline's way on that task."
)


def write(directory: Path) -> tuple[str, tuple[Path, ...]]:
    """Write the report of a campaign, with tasks or without; returns the verdict for a terminal, and the files.

    Raises:
        ConfigError: there is no campaign at this path. StorageError: it cannot be read, or not be written.
    """
    if not read_plan(directory).tasks:
        report = campaign_page.write_report(directory)
        return report.text, report.files
    card, table = report_card(directory), read_campaign(directory)
    contents = _contents(card, campaign_commands(directory, table))
    html, markdown = directory / "report.html", directory / "report.md"
    with writing(directory):
        tables = [
            (task, campaign_page.linked(t, campaign_page.run_pages(t, directory))) for task, t in card.tables.items()
        ]
        write_text(html, fill("card.html", **contents, **_drawings(card), linked=tables))
        write_text(markdown, fill("card.md", **contents))
        return "\n".join(contents["words"]), (html, markdown, *write_tables(table, directory))


def words(card: ReportCard) -> list[str]:
    """What each condition helps and harms, with numbers; then premises in doubt, and runs without a result."""
    others = [one for one in card.first.conditions if one != card.first.baseline]
    lines = list(dict.fromkeys(line for one in others for line in _words(card, one)))
    broken = [(task, check) for task, checks in card.checks.items() for check in checks if not check.holds]
    for task, check in broken:
        known = "was not measured" if math.isnan(check.value) else "does not hold"
        lines.append(f"The premise of {task} {known}: {_check(check)}.")
    lines += [f"No result: {task}, {lost_cell(cell)}." for task, cell in card.lost[:_NAMED]]
    more = len(card.lost) - _NAMED
    return [*lines, f"{plural(more, 'more run')} without a result."] if more > 0 else lines


def _words(card: ReportCard, condition: str) -> list[str]:
    rows = {task: one for (task, label), one in card.comparisons.items() if label == condition}
    clear = [(task, one) for task, one in rows.items() if one.significant]
    near = [(task, one) for task, one in rows.items() if one.untested]
    kinds = (("helps", clear, True), ("harms", clear, False), ("may help", near, True), ("may harm", near, False))
    parts = [
        f"{verb} {_listed(claims)}"
        for verb, found, up in kinds
        if (claims := [_claim(card, task, one) for task, one in found if (one.difference.value > 0) is up])
    ]
    if same := [task for task, one in rows.items() if one.same]:
        parts.append(f"changes nothing on {_listed(same)}, where its runs are those of {card.first.baseline}")
    told = len(clear) + len(near) + len(same)
    seeds, rest = max((len(one.seeds) for one in rows.values()), default=0), len(rows) - told
    where = "on any task" if not told else f"on {rest} other task{'s' * (rest != 1)}"
    if rest:
        parts.append(f"makes no difference that {plural(seeds, 'seed')} could tell {where}")
    lines = [f"{condition} against {card.first.baseline}: {'; '.join(parts)}."]
    least = max((one.enough for one in rows.values()), default=0)
    if seeds < least:
        lines.append(
            f"No outcome of {plural(seeds, 'seed')} could be significant on {len(rows)} tasks; {least} are the least."
        )
    across = card.across[condition]
    if not math.isnan(across.gain.value):
        gain, improvement = estimate(across.gain, "+.3f"), estimate(across.improvement, ".2f")
        lines.append(
            f"Over all tasks: {gain} accuracy (interquartile mean); a run beats the baseline's with {improvement}."
        )
    return lines


def _claim(card: ReportCard, task: str, one: Comparison) -> str:
    numbers = f"{estimate(one.difference, '+.3f')}, Holm {p_value(one.holm).removeprefix('= ')}"
    return f"on {task}, where {_about(card, task)} ({numbers})"


def _about(card: ReportCard, task: str) -> str:
    """The premise: the first sentence of the task's docstring, up to a colon."""
    about = card.plan.premises[task]["about"] if task in card.plan.premises else ""
    text = about.partition(":")[0].partition(". ")[0].rstrip(".")
    return text[:1].lower() + text[1:]


def _listed(parts: Sequence[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]


def _check(check: PremiseCheck) -> str:
    name = check.figure.removeprefix("task/").replace("_", " ")
    return f"{name}{'' if math.isnan(check.value) else f' {check.value:.3f}'} ({check.low:g} to {check.high:g})"


def _premise(card: ReportCard, task: str) -> dict[str, str]:
    checks = card.checks[task]
    verdict = "fails"
    if all(one.holds or math.isnan(one.value) for one in checks):
        verdict = "holds" if checks and all(one.holds for one in checks) else "-"
    measured = "; ".join(map(_check, checks)) or "-"
    return {"task": task, "premise": _about(card, task) or "-", "measured (bounds)": measured, "verdict": verdict}


def _row(card: ReportCard, task: str, condition: str) -> dict[str, str]:
    one, own = card.comparisons[task, condition], card.summaries[task, condition].to_threshold
    base = card.summaries[task, card.first.baseline].to_threshold
    both = {
        what: " / ".join(amount(found.get(what, math.nan)) for found in (own, base)) for what in ("rollouts", "tokens")
    }
    return {
        "task": task,
        "accuracy": estimate(one.difference, "+.3f"),
        "verdict": conclusion(one).partition(";")[0].partition(",")[0],
        "seeds": str(len(one.seeds)),
        "p": p_value(one.p).removeprefix("= "),
        "Holm": p_value(one.holm).removeprefix("= "),
        "P(improvement)": estimate(one.improvement, ".2f"),
        **both,
    }


def _contents(card: ReportCard, commands: Sequence[str]) -> dict[str, Any]:
    others = [one for one in card.first.conditions if one != card.first.baseline]
    across = [
        {
            "condition": one,
            "accuracy, IQM": estimate(found.iqm, ".3f"),
            "against the baseline": estimate(found.gain, "+.3f"),
            "P(improvement)": estimate(found.improvement, ".2f"),
        }
        for one, found in card.across.items()
    ]
    accuracies = [
        {"task": task} | {one: estimate(card.summaries[task, one].mean, ".3f") for one in card.first.conditions}
        for task in card.tables
    ]
    return {
        "title": card.name,
        "scope": f"{plural(len(card.tables), 'task')}, {plural(len(card.first.conditions), 'condition')}, "
        f"{plural(len(card.first.seeds), 'seed')}; baseline {card.first.baseline}",
        "words": words(card) or ["There is one condition, so there is nothing to compare."],
        "rows": [(one, Table.of([_row(card, task, one) for task in card.tables])) for one in others],
        "across": Table.of(across),
        "accuracies": Table.of(accuracies),
        "checks": Table.of([_premise(card, task) for task in card.tables]),
        "note": _NOTE.format(alpha=card.plan.alpha),
        "commands": commands,
    }


def _drawings(card: ReportCard) -> dict[str, Any]:
    span = figures.forest_span(list(card.comparisons.values()))
    return {
        "forests": {place: figures.forest_row(one, span) for place, one in card.comparisons.items()},
        "kinds": {place: figures.kind(one) for place, one in card.comparisons.items()},
        "axis": figures.forest_axis(span),
        "profile": _profile(card),
        "keys": figures.keys(card.first),
        "curves": [(task, curves[0][2]) for task, table in card.tables.items() if (curves := figures.curves(table))],
    }


def _profile(card: ReportCard) -> str:
    """Share of runs above every accuracy, in the mean over tasks, with pointwise 95% intervals."""
    axes, shapes = Axes((0.0, 1.0), (0.0, 1.0), True, "accuracy"), list[str]()
    for label, found in card.across.items():
        if found.profile.ndim == 2 and not math.isnan(found.profile[0, 0]):
            share, low, high = ([*zip(LEVELS.tolist(), row.tolist(), strict=True)] for row in found.profile)
            color = f"c{figures.index(card.first, label)}"
            band = "" if math.isnan(low[0][1]) else area(axes, high, low, f"area {color}")
            shapes.append(band + polyline(axes, share, f"curve {color}"))
    return svg(axes.draw() + "".join(shapes)) if shapes else ""
