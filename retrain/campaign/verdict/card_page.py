"""Report card of a campaign with tasks: conclusions, a row for every task, and results over all tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from retrain.campaign.plan.plan_file import read_plan
from retrain.campaign.plan.testbed_version import version
from retrain.campaign.verdict import campaign_page, figures
from retrain.campaign.verdict.across_tasks import LEVELS, PremiseCheck, ReportCard, report_card
from retrain.campaign.verdict.analysis import Comparison
from retrain.campaign.verdict.results import campaign_commands, read_campaign, write_tables
from retrain.campaign.verdict.sentences import amount, conclusion, estimate, lost_cell, p_value
from retrain.report.charts import Axes, area, polyline, svg
from retrain.report.exported_figures import FOLDER, Drawing, stacked, write_figures
from retrain.report.latex import tables
from retrain.report.page import Table, fill, plural
from retrain.system.files import write_text, writing

_NAMED = 5
"""Largest number of runs without a result that are listed."""
_NOTE = (
    "Differences are in final {measured}, paired by seed. p is the p-value of the sign-flip permutation test. "
    "{tests}"
    "95% CIs of differences are paired t intervals, uncorrected; those over all tasks are bootstrap intervals, with "
    "{resampled}. IQM is the interquartile mean over the runs of all tasks. Rollouts and tokens "
    "are medians until nine tenths of the baseline's improvement on that task."
)


def write(directory: Path) -> tuple[str, tuple[Path, ...]]:
    """Write the report of a campaign with or without tasks.

    Returns:
        (the verdict as text, the written files).
    Raises:
        ConfigError: there is no campaign at this path.
        StorageError: the campaign cannot be read, or the report cannot be written.
    """
    if not read_plan(directory).tasks:
        report = campaign_page.write_report(directory)
        return report.text, report.files
    card, table = report_card(directory), read_campaign(directory)
    contents = _contents(card, campaign_commands(directory, table))
    html, markdown, tex = (directory / f"report.{kind}" for kind in ("html", "md", "tex"))
    with writing(directory):
        tables = [
            (task, campaign_page.linked(t, campaign_page.run_pages(t, directory))) for task, t in card.tables.items()
        ]
        write_text(html, fill("card.html", **contents, **_drawings(card), linked=tables))
        write_text(markdown, fill("card.md", **contents))
        write_text(tex, latex(card))
        drawings = write_figures(directory / FOLDER, exported(card))
        return "\n".join(contents["words"]), (html, markdown, tex, *write_tables(table, directory), *drawings)


def render(card: ReportCard, commands: Sequence[str]) -> str:
    """Render the card as an HTML document, without links to run reports."""
    linked = [(task, campaign_page.linked(table, {})) for task, table in card.tables.items()]
    return fill("card.html", **_contents(card, commands), **_drawings(card), linked=linked)


def text(card: ReportCard) -> str:
    """Format results by task and the conclusions as text for a terminal."""
    return "\n".join([*_accuracies(card).aligned(), "", *words(card)])


def exported(card: ReportCard) -> dict[str, Drawing]:
    """Return every figure of the card by its name: differences by task, the profile, and learning curves."""
    drawn, found = _drawings(card), dict[str, Drawing]()
    for condition, table in _contents(card, ())["rows"]:
        rows = [(task, drawn["forests"][task, condition], value) for task, value, *_ in table.rows]
        heads = ("", f"difference in {card.first.metric}")
        found[f"differences {condition}"] = Drawing(stacked(rows, drawn["axis"], heads))
    found["performance profile"] = Drawing(drawn["profile"], drawn["keys"])
    return found | {f"learning curves {task}": Drawing(chart, drawn["keys"]) for task, chart in drawn["curves"]}


def latex(card: ReportCard) -> str:
    """Return the tables of differences, of all tasks together and of results, for a paper."""
    contents = _contents(card, ())
    rows = {
        f"{card.name}: {one} against {card.first.baseline}. {contents['note']}": found
        for one, found in contents["rows"]
    }
    more = {
        f"{card.name}: all tasks together": contents["across"],
        f"{card.name}: results by task": contents["accuracies"],
    }
    return tables(rows | more)


def as_json(card: ReportCard) -> dict[str, Any]:
    """Return the comparisons of a card as JSON data; numbers that are not finite are null."""
    found = [{"task": task, **_facts(one)} for (task, _), one in card.comparisons.items()]
    pooled = [_facts(one) for one in card.pooled.values()] if len(card.tables) > 1 else []
    facts: dict[str, Any] = {"name": card.name, "metric": card.first.metric, "baseline": card.first.baseline}
    facts["declaration"] = card.declared and card.declared.facts()
    facts |= {"seeds": card.first.seeds, "words": words(card), "comparisons": found, "pooled": pooled}
    facts["tests"] = _tests(card).rstrip()
    return to_jsonable_python(facts, inf_nan_mode="null")


def _facts(one: Comparison) -> dict[str, Any]:
    return {**asdict(one), "significant": one.significant, "verdict": conclusion(one)}


def words(card: ReportCard) -> list[str]:
    """Return sentences on a late declaration, where each condition helps or harms, premises, steps and lost runs."""
    others = [one for one in card.first.conditions if one != card.first.baseline]
    late = [card.declared.sentence] if card.declared and card.declared.late else []
    lines = [*late, *dict.fromkeys(line for one in others for line in _words(card, one))]
    broken = [(task, check) for task, checks in card.checks.items() for check in checks if not check.holds]
    for task, check in broken:
        known = "was not measured" if math.isnan(check.value) else "does not hold"
        lines.append(f"The premise of {task} {known}: {_check(check)}.")
    lines += [f"{task}: {table.steps_note}" for task, table in card.tables.items() if table.steps_note]
    lines += [f"No result: {task}, {lost_cell(cell)}." for task, cell in card.lost[:_NAMED]]
    more = len(card.lost) - _NAMED
    return [*lines, f"{plural(more, 'more run')} without a result."] if more > 0 else lines


def _words(card: ReportCard, condition: str) -> list[str]:
    every = {task: one for (task, label), one in card.comparisons.items() if label == condition}
    rows = {task: one for task, one in every.items() if one.family != "primary"}
    declared = [_declared(card, task, one) for task, one in every.items() if one.family == "primary"]
    clear = [(task, one) for task, one in rows.items() if one.significant]
    near = [(task, one) for task, one in rows.items() if one.untested]
    kinds = (("helps", clear, True), ("harms", clear, False), ("may help", near, True), ("may harm", near, False))
    parts = [
        f"{verb} {_listed(claims)}"
        for verb, found, up in kinds
        if (claims := [_claim(card, task, one) for task, one in found if (one.difference.value > 0) is up])
    ]
    if same := [task for task, one in rows.items() if one.same]:
        parts.append(f"makes no difference on {_listed(same)}, where its runs equal those of {card.first.baseline}")
    if unpaired := [task for task, one in rows.items() if not one.seeds]:
        parts.append(f"cannot be compared on {_listed(unpaired)}, where no seed has a result of both")
    described = len(declared) + len(clear) + len(near) + len(same) + len(unpaired)
    seeds, rest = max((len(one.seeds) for one in rows.values()), default=0), len(every) - described
    where = "on every task" if not described else f"on {rest} other task{'s' * (rest != 1)}"
    if rest:
        parts.append(f"is inconclusive with {plural(seeds, 'seed')} {where}")
    pooled = [_pooled(card.pooled[condition])] if len(card.tables) > 1 else []
    lines = [*declared, *pooled]
    if parts:
        lines.append(f"{condition} against {card.first.baseline}: {'; '.join(parts)}.")
    least = max((one.enough for one in rows.values()), default=0)
    if seeds < least:
        lines.append(
            f"With {plural(seeds, 'seed')} no result can be significant on "
            f"{plural(len(rows), 'other task' if declared else 'task')}; use at least {least}."
        )
    across = card.across[condition]
    if not math.isnan(across.gain.value):
        gain = estimate(across.gain, "+.3f", f" {card.first.metric}")
        improvement = estimate(across.improvement, ".2f")
        paired, tasks = sum(bool(one.seeds) for one in every.values()), len(card.tables)
        where = f" over {'all' if paired == tasks else f'{paired} of {tasks}'} tasks" if tasks > 1 else ""
        lines.append(f"Interquartile mean{where}: {gain}; P(improvement) {improvement}.")
    return lines


def _declared(card: ReportCard, task: str, one: Comparison) -> str:
    """Return the sentence about the declared comparison, with the time of the declaration."""
    found, declared = _found(one, f"p {p_value(one.p)}"), f" {card.declared.sentence}" if card.declared else ""
    return f"As declared, {one.condition} against {one.against} on {task}: {found}.{declared}"


def _pooled(one: Comparison) -> str:
    """Return the sentence about the pooled test of the mean over tasks."""
    if not one.seeds:
        return (
            f"{one.condition} against {one.against} in the mean over tasks: no seed has results of both on every task."
        )
    tested = f"p {p_value(one.p)}" + (f", Holm {p_value(one.holm).removeprefix('= ')}" if one.size > 1 else "")
    could = f" Detectable with 80% power: ±{one.detectable:.3f}." if math.isfinite(one.detectable) else ""
    return f"{one.condition} against {one.against} in the mean over tasks: {_found(one, tested)}.{could}"


def _found(one: Comparison, tested: str) -> str:
    """Return difference, p-value, number of seeds and conclusion; only the conclusion if no seed has both results."""
    if not one.seeds:
        return conclusion(one)
    difference, seeds = estimate(one.difference, "+.3f", f" {one.metric}"), plural(len(one.seeds), "seed")
    return f"{difference}, {tested}, {seeds}: {conclusion(one)}"


def _claim(card: ReportCard, task: str, one: Comparison) -> str:
    numbers = f"{estimate(one.difference, '+.3f')}, Holm {p_value(one.holm).removeprefix('= ')}"
    where = f", where {about}" if (about := _about(card, task)) else ""
    return f"on {task}{where} ({numbers})"


def _about(card: ReportCard, task: str) -> str:
    """Return the premise: the first sentence of the task's docstring, up to a colon."""
    about = card.premises[task]["about"] if task in card.premises else ""
    text = about.partition(":")[0].partition(". ")[0].rstrip(".")
    return text[:1].lower() + text[1:]


def _listed(parts: Sequence[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]


def _check(check: PremiseCheck) -> str:
    name = check.figure.removeprefix("task/").replace("_", " ") + (f" of start {check.start}" if check.start else "")
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
        cost: " / ".join(amount(found.get(cost, math.nan)) for found in (own, base)) for cost in ("rollouts", "tokens")
    }
    return {
        "task": task,
        one.metric: estimate(one.difference, "+.3f"),
        "verdict": conclusion(one).partition(";")[0].partition(",")[0],
        "detectable": f"±{one.detectable:.3f}" if math.isfinite(one.detectable) else "-",
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
            f"{card.first.metric}, IQM": estimate(found.iqm, ".3f"),
            "against the baseline": estimate(found.gain, "+.3f"),
            "P(improvement)": estimate(found.improvement, ".2f"),
        }
        for one, found in card.across.items()
    ]
    return {
        "title": card.name,
        "metric": card.first.metric,
        "measured": card.first.measured,
        "scope": f"{plural(len(card.tables), 'task')}, {plural(len(card.first.conditions), 'condition')}, "
        f"{plural(len(card.first.seeds), 'seed')}; baseline {card.first.baseline}{_version(card)}",
        "words": words(card) or ["There is one condition, so there is nothing to compare."],
        "rows": [(one, Table.of([_row(card, task, one) for task in card.tables])) for one in others],
        "across": Table.of(across),
        "accuracies": _accuracies(card),
        "checks": Table.of([_premise(card, task) for task in card.tables if any(card.checks.values())]),
        "note": _NOTE.format(tests=_tests(card), measured=card.first.measured, resampled=_resampled(card))
        + card.first.limits,
        "commands": commands,
    }


def _tests(card: ReportCard) -> str:
    """Return sentences about the tests and families of the card and their levels, with a space at the end.

    Returns "" without a comparison.
    """
    methods = [one for one in card.pooled if one not in card.controls]
    level, families = (
        f"{100 * card.alpha:g}%",
        [*_families(card, methods, ""), *_families(card, card.controls, " of controls")],
    )
    if len(families) < 2:
        return f"The probability of a false claim is at most {level} for {families[0]}. " if families else ""
    numbered = "; ".join(f"({place}) {family}" for place, family in enumerate(families, 1))
    return (
        f"There are {len(families)} separate tests or families, each with a probability of a false claim of at most "
        f"{level}: {numbered}. Together they make a false claim with a probability of at most "
        f"{100 * min(1.0, len(families) * card.alpha):g}%. "
    )


def _families(card: ReportCard, conditions: Sequence[str], which: str) -> list[str]:
    """Return descriptions of the tests and families of these conditions, which are the methods or the controls."""
    found = list[str]()
    if len(card.tables) > 1 and conditions:
        count, corrected = len(conditions), ", with Holm's correction" if len(conditions) > 1 else ""
        what = "comparison" if count == 1 else plural(count, "comparison")
        found.append(f"the {what}{which} in the mean over tasks{corrected}")
    by_family = [one.family for (_, label), one in card.comparisons.items() if label in conditions]
    if "primary" in by_family:
        found.append("the declared comparison")
    if rest := by_family.count("tasks"):
        other = "other " if "primary" in by_family else ""
        found.append(f"the {plural(rest, f'{other}comparison')}{which} on single tasks, with Holm's correction")
    return found


def _resampled(card: ReportCard) -> str:
    if card.first.starts > 1:
        return "whole warm starts resampled, the same in all tasks"
    return "runs resampled within their tasks"


def _version(card: ReportCard) -> str:
    """Return the version of the testbed that the tasks belong to; "" for other tasks."""
    known = {task: str(card.premises.get(task, {}).get("sha256", "")) for task in card.tables}
    return f"; {found}" if (found := version(known)) else ""


def _accuracies(card: ReportCard) -> Table:
    """Return the means over runs: a row for each task, and a column for each condition."""
    return Table.of(
        [
            {"task": task} | {one: estimate(card.summaries[task, one].mean, ".3f") for one in card.first.conditions}
            for task in card.tables
        ]
    )


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
    """Draw the performance profile: the share of runs above every value, averaged over tasks, with pointwise 95% CIs.

    Returns "" if a value is outside [0, 1].
    """
    if any(not 0 <= value <= 1 for table in card.tables.values() for cell in table.runs for _, value in cell.curve):
        return ""
    axes, shapes = Axes((0.0, 1.0), (0.0, 1.0), True, card.first.metric), list[str]()
    for label, found in card.across.items():
        if found.profile.ndim == 2 and not math.isnan(found.profile[0, 0]):
            share, low, high = ([*zip(LEVELS.tolist(), row.tolist(), strict=True)] for row in found.profile)
            color = f"c{figures.index(card.first, label)}"
            band = "" if math.isnan(low[0][1]) else area(axes, high, low, f"area {color}")
            shapes.append(band + polyline(axes, share, f"curve {color}"))
    return svg(axes.draw() + "".join(shapes)) if shapes else ""
