"""`retrain compare`: compare runs, campaigns, or a file of results."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from retrain.campaign.plan.outcome import Goal, Outcome, Summary
from retrain.campaign.plan.plan_file import PLAN, read_plan
from retrain.campaign.verdict.analysis import Analysis, analyze
from retrain.campaign.verdict.results import Results
from retrain.campaign.verdict.results_file import only_metric, read_results_file
from retrain.campaign.verdict.run_facts import measured_differently, what_differs
from retrain.campaign.verdict.run_reader import read_campaign_tables, read_runs
from retrain.campaign.verdict.runs_of_file import runs_of_file
from retrain.campaign.verdict.withholding import margin_problem
from retrain.errors import ConfigError, ConfigProblem
from retrain.report.page import Table


class Asked(NamedTuple):
    """Options of a comparison.

    Attributes:
        metric: metric to compare; None: that of the campaign, or the only one of the files.
        goal, margin, summary: see `Outcome`; None: those of the campaign, or the defaults.
        unpaired: True if runs of one seed are not a pair.
        allowed: settings that define the measurement and may differ.
    """

    metric: str | None = None
    goal: Goal | None = None
    margin: float | None = None
    summary: Summary | None = None
    unpaired: bool = False
    allowed: tuple[str, ...] = ()

    def outcome(self, **base: Any) -> Outcome:
        """Return the outcome with these options in the place of `base`; ConfigError for an invalid or missing one."""
        given = {"metric": self.metric, "goal": self.goal, "margin": self.margin, "summary": self.summary}
        values = base | {name: value for name, value in given.items() if value is not None}
        try:
            return Outcome.model_validate(values)
        except ValidationError as error:
            metric = values["metric"]
            mistake = error.errors()[0]
            if mistake["loc"]:
                raise ConfigError.at(metric, f"--{mistake['loc'][0]}", str(mistake["msg"]), "change it") from error
            fix = f"add --goal min if less {metric} is better, or --goal max"
            raise ConfigError.at(metric, "--metric", "its name does not say whether more is better", fix) from error


def check_output(file: Path, inputs: Sequence[Path]) -> None:
    """Raise ConfigError if the output would replace an input."""
    if any(file.resolve() == path.resolve() for path in inputs):
        raise ConfigError.at(file, "output", "is an input", "give another name")


def compare(paths: Sequence[Path], asked: Asked | None = None) -> Analysis:
    """Compare runs and campaigns (directories), or the runs in a file of results.

    Args:
        paths: directories, the first of which is the baseline, or one file.
        asked: options; None: the defaults.
    Raises:
        ConfigError: a path does not exist or has no run, a file is not alone, or runs were measured differently.
        DataError: a file of results cannot be read.
    """
    asked = asked or Asked()
    if missing := [path for path in paths if not path.exists()]:
        raise ConfigError(
            [ConfigProblem(str(path), 0, 0, "RUNS", "does not exist", "check the path") for path in missing]
        )
    files = [path for path in paths if path.is_file()]
    if files and len(paths) > 1:
        fix = "write the rows of all runs into one table, as docs/compare.md shows; results.csv of a campaign is one"
        raise ConfigError.at(files[0], "RUNS", "a file is compared alone", fix)
    if files:
        # The file is read before the metric is known: without --metric it is the only one that the rows have.
        rows = read_results_file(files[0])
        tables = runs_of_file(files[0], rows, asked.outcome(metric=asked.metric or only_metric(rows)))
    elif len(paths) == 1 and (paths[0] / PLAN).is_file():
        tables = _of_campaign(paths[0], asked)
    else:
        tables = [_of_runs(paths, asked)]
    # Checked after reading, because only the values tell their unit.
    if problem := next(filter(None, map(margin_problem, tables)), ""):
        raise ConfigError.at(paths[0], "--margin", problem, "give it in the unit of the metric")
    return analyze([replace(results, paired=not asked.unpaired) for results in tables])


def _of_campaign(path: Path, asked: Asked) -> list[Results]:
    """Return the results of a campaign, task by task, with its baseline, level, looks and declaration."""
    plan = read_plan(path)
    if asked.unpaired and plan.look_sizes:
        raise ConfigError.at(path, "--unpaired", "the looks stopped conditions by tests of pairs", "leave it out")
    if asked._replace(unpaired=False, allowed=()) == Asked():
        return read_campaign_tables(path)
    base = Outcome() if asked.metric else plan.all_outcomes[0]
    outcome = asked.outcome(**base.model_dump())
    tables = read_campaign_tables(path, outcome)
    # A claim was declared for the campaign's outcomes: another one is not tested alone.
    return tables if outcome in plan.all_outcomes else [replace(results, declared=None) for results in tables]


def _of_runs(paths: Sequence[Path], asked: Asked) -> Results:
    planned = [read_plan(path).all_outcomes[0] for path in paths if (path / PLAN).is_file()]
    outcome_of_plan = planned[0] if planned and not asked.metric else Outcome()
    results = read_runs(paths, asked.outcome(**outcome_of_plan.model_dump()))
    changes = what_differs(results)
    folder = str(results.runs[0].path.parent)
    problems: list[ConfigProblem] = []
    for key in measured_differently(changes, results):
        if key in asked.allowed:
            continue
        values = ", ".join(f"{condition} {value}" for condition, value in changes[key].items())
        fix = f"compare runs of one task and model, or give --allow-different {key}"
        problems.append(ConfigProblem(folder, 0, 0, key, f"the runs were measured differently: {values}", fix))
    if problems:
        raise ConfigError(problems)
    return results


def command(paths: Sequence[Path], asked: Asked) -> str:
    """Return the command that reproduces the comparison."""
    margin = None if asked.margin is None else f"{asked.margin:g}"
    named = {"metric": asked.metric, "goal": asked.goal, "margin": margin, "summary": asked.summary}
    options = [part for name, value in named.items() if value for part in (f"--{name}", value)]
    options += ["--unpaired"] * asked.unpaired
    options += [part for key in asked.allowed for part in ("--allow-different", key)]
    return f"retrain compare {shlex.join([*map(str, paths), *options])}"


def differing(results: Results) -> list[str]:
    """Return the table of settings that differ between the conditions, for a terminal; empty if none does."""
    changes = what_differs(results)
    # Every key has the same labels.
    labels = list(next(iter(changes.values()), {}))
    rows = [
        [key, *(json.loads(v) if v.startswith('"') else v for v in values.values())] for key, values in changes.items()
    ]
    return ["what differs", *(f"  {line}" for line in Table(["", *labels], rows).aligned()), ""] if rows else []
