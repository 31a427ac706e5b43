"""Read run directories and campaigns as tables of results."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, product
from math import isfinite
from os.path import commonprefix
from pathlib import Path
from typing import Any

from retrain.campaign.plan.declaration import declaration
from retrain.campaign.plan.outcome import Outcome
from retrain.campaign.plan.plan_file import PLAN, Plan, read_outcome, read_plan
from retrain.campaign.verdict.results import Cell, Results, at_shared_steps, results_of
from retrain.campaign.verdict.run_facts import configuration, settings
from retrain.errors import ConfigError, StorageError
from retrain.report.run_summary import no_run
from retrain.run.findings import weights_changed
from retrain.storage.run_files import read_rows, understood
from retrain.system.records import read_json

_SPENT_KEYS = ("rollout/completions", "tokens/sampled", "time/step_s")
"""Metrics of a step that sum up to the costs, in the order of SPENT."""
_SHARES = re.compile(r"(?:greedy_)?accuracy|(?:avg|pass)@\d+")
"""Numbers of an evaluation that are shares of its problems."""
_SEED = re.compile(r"[-_. ]*(seed|s)?[-_]?\d*$")
"""Seed suffix of a run's name: `-s3`, `_seed3`, `-3`."""


def read_campaign(directory: Path, task: str = "", outcome: Outcome | None = None) -> Results:
    """Read the results of a campaign from its directory.

    Args:
        directory: directory of the campaign.
        task: task to read, in a campaign with tasks. "": each pair of condition and task counts as a condition.
        outcome: what to measure; None: the first outcome of the campaign.
    Raises:
        ConfigError: the path is not a campaign.
        StorageError: its plan cannot be read.
    """
    plan = read_plan(directory)
    name = directory.resolve().name
    outcome = outcome or plan.all_outcomes[0]
    seeds = list(dict.fromkeys(job.seed for job in plan.cells))
    cells: list[Cell] = []
    for each in [task] if task else plan.tasks or ("",):
        of_task = [
            replace(
                read_cell(
                    directory / job.path, job.method if task else job.condition, job.seed, job.max_steps, outcome
                ),
                start=seeds.index(job.seed) % plan.warm_starts,
            )
            for job in plan.cells
            if job.task == each
        ]
        cells += at_shared_steps(of_task)
    if plan.tasks and not task:
        return results_of(name, cells, alpha=plan.alpha, outcome=outcome)
    facts = plan.model_dump(include={"baseline", "alpha", "ladder", "controls", "control_of"}) | {"task": task}
    name = f"{name}: {task}" if task else name
    facts["looks"] = tuple(tuple(seeds[:size]) for size in plan.look_sizes)
    facts["late"] = _late(plan)
    results = results_of(name, cells, outcome=outcome, declared=declaration(plan), **facts)
    warmed = bool(configuration(results).get("warmup", {}).get("steps"))
    return replace(results, one_start=warmed and results.starts == 1)


def _late(plan: Plan) -> str:
    """Return sentences about looks, seeds and conditions that were changed when results could be known."""
    declared = plan.looks_declared
    sentences: list[str] = []
    if declared and declared["after"]:
        started = f"after {declared['after']} of {declared['runs']} runs had started"
        sentences.append(f"The looks were declared or changed late, {started}.")
    if plan.seeds_reported:
        change = "added" if len(plan.seed_list) > plan.seeds_reported else "changed"
        sentences.append(f"Seeds were {change} after a look, the report of {plan.seeds_reported} seeds.")
    if plan.removed:
        count = "a smaller family of comparisons is corrected"
        sentences.append(f"Removed after runs of theirs had started, so that {count}: {', '.join(plan.removed)}.")
    return " ".join(sentences)


def read_campaign_tables(directory: Path, outcome: Outcome | None = None) -> list[Results]:
    """Read the tables of one outcome, or of all, and of all tasks of a campaign, task by task within an outcome."""
    plan = read_plan(directory)
    outcomes = (outcome,) if outcome else plan.all_outcomes
    return [read_campaign(directory, task, outcome) for outcome in outcomes for task in plan.tasks or ("",)]


def read_cell(
    path: Path, condition: str, seed: int, max_steps: int | None = None, outcome: Outcome | None = None
) -> Cell:
    """Read the cell of a run directory; a run with damaged files has the status "unreadable".

    The status comes from the campaign's outcome.json, or without one from the run's status.json.

    Args:
        path: run directory.
        condition: label of the condition.
        seed: seed of the run.
        max_steps: planned number of steps; None: that of the run's configuration.
        outcome: what to measure; None: held-out accuracy.
    """
    cell = Cell(condition, seed, path, "unreadable")
    try:
        with understood(path):
            return _read(cell, max_steps, outcome or Outcome())
    except StorageError as error:
        return replace(cell, reason=str(error))


def _read(cell: Cell, max_steps: int | None, outcome: Outcome) -> Cell:
    path = cell.path
    ended = read_outcome(path)
    config = read_json(path / "config.resolved.json")
    # Every file is read before the first conclusion, so that a damaged one makes the run unreadable and not failed.
    facts = read_json(path / "status.json")
    read_json(path / "environment.json")  # for its error, if the file is damaged
    metrics = read_rows(path / "metrics.jsonl")
    evals = read_rows(path / "eval.jsonl")
    if max_steps is None:
        max_steps = int(config["training"]["max_steps"]) if metrics else 0
    if facts.get("stopped"):  # [training] stop_when
        max_steps = len(metrics)
    key = outcome.key
    # Evaluations come first: they are held-out, and a metric of the steps may have the same name.
    of_steps = not any(key in row for row in evals) and any(key in row for row in metrics)
    status, reason = _status(ended, facts)
    # A run that ended well may still lack the number that is compared; it must not shrink the sample in silence.
    if status == "done" and (why := _no_result(metrics, evals, max_steps, key, of_steps)):
        status, reason = "failed", why
    spent = [accumulate([float(row.get(name, 0.0)) for row in metrics], initial=0.0) for name in _SPENT_KEYS]
    findings = {finding["name"]: finding["text"] for finding in facts.get("findings", ())}
    idle = metrics and not any(map(weights_changed, metrics))
    return replace(
        cell,
        status=status,
        reason=reason,
        curve=tuple(
            (row["step"], float(row[key])) for row in (metrics if of_steps else evals) if row.get(key) is not None
        ),
        mean=outcome.summary == "mean",
        avg_tokens=evals[-1].get("avg_tokens") if evals else None,
        problems=int(evals[-1].get("problems") or 0) if evals and _SHARES.fullmatch(key) else 0,
        spent=tuple(zip(*spent, strict=True)),
        host=str(ended.get("host") or ""),
        attempts=ended.get("attempts"),
        ended=bool(ended),
        no_update=findings.get("no_update", "no step changed the weights") if idle else "",
        findings=tuple(findings),
    )


def _no_result(
    metrics: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]], steps: int, key: str, of_steps: bool
) -> str:
    """Return why a finished run has no result, or "".

    Its last step was not recorded or evaluated, the metric is missing, or one of its numbers is not finite.
    """
    if not evals and not of_steps:
        return "it was never evaluated"
    # An earlier value is that of another, less trained model.
    if not of_steps and evals[-1]["step"] < steps:
        return f"no result: last evaluation after {evals[-1]['step']} of {steps} steps"
    if not metrics or metrics[-1]["step"] + 1 < steps:
        return f"no result: metrics.jsonl holds {len(metrics)} of {steps} steps"
    measured = (("metrics.jsonl", metrics, (key,)),) if of_steps else (("eval.jsonl", evals, (key, "avg_tokens")),)
    for file, rows, keys in (*measured, ("metrics.jsonl", metrics, _SPENT_KEYS)):
        for at, name in product(rows, keys):
            if name in at and (at[name] is None or not isfinite(at[name])):
                return f"{file}: {name} of step {at.get('step')} is {at[name]}"
    rows = metrics if of_steps else evals
    return "" if any(row.get(key) is not None for row in rows) else f"neither eval.jsonl nor metrics.jsonl has {key!r}"


def _status(ended: Mapping[str, Any], stored: Mapping[str, Any]) -> tuple[str, str]:
    """Return (status, reason) of a run from its outcome.json and its status.json."""
    state = ended.get("status") or stored.get("outcome")
    if state in ("done", "finished"):
        return "done", ""
    if state is None:
        return "missing", "it was never started"
    # outcome.json outranks status.json: a campaign may have given the run up.
    if state in ("running", "preempted", "interrupted") and not ended.get("status"):
        return "unfinished", "it has not finished"
    code = ended.get("exit_code") or stored.get("exit_code")
    reason = str(ended.get("reason") or stored.get("error") or f"its status is {state}")
    return "failed", reason if code is None else f"{reason} (exit {code})"


def read_runs(paths: Sequence[Path], outcome: Outcome) -> Results:
    """Return the table of these runs. The first condition is the baseline.

    Runs that differ only in their seed are one condition. If several campaigns have a condition of the same label, they
    are several conditions: "c3: grpo" is grpo of the campaign in the directory c3.

    Args:
        paths: run directories, and directories of campaigns, which stand for all runs of the campaign.
        outcome: what to measure.
    Raises:
        ConfigError: there is no run at a path, or two runs have the same configuration and seed.
    """
    campaigns = {path: read_campaign(path, outcome=outcome) for path in paths if (path / PLAN).is_file()}
    # Two campaigns may call different settings `grpo`; merged they would be one condition of mixed runs.
    uses = Counter(label for results in campaigns.values() for label in results.conditions)
    taken = {label for label, times in uses.items() if times == 1}
    cells: list[Cell] = []
    for path, results in campaigns.items():
        for label in results.conditions:
            unique_label = label if uses[label] == 1 else _unique(f"{path.resolve().name}: {label}", taken)
            cells += [replace(cell, condition=unique_label) for cell in results.of(label)]
    groups: dict[str, list[Cell]] = {}
    for path in dict.fromkeys(paths):
        if path not in campaigns:
            key, cell = _run(path, outcome)
            groups.setdefault(key, []).append(cell)
    for group in groups.values():
        cells += _labelled(group, taken)
    # Of a path that is given twice the first place counts, hence the reversed order.
    order = {path: index for index, path in reversed([*enumerate(paths)])}
    cells.sort(key=lambda cell: min(order[path] for path in (cell.path, *cell.path.parents) if path in order))
    several_tasks = any(read_plan(path).tasks for path in campaigns)
    results = results_of("comparison", cells if several_tasks else at_shared_steps(cells), outcome=outcome)
    if with_looks := [str(path) for path in campaigns if read_plan(path).look_sizes]:
        results = replace(
            results, late=f"The looks of {', '.join(with_looks)} are not applied here: see its own report."
        )
    return results


def _run(path: Path, outcome: Outcome) -> tuple[str, Cell]:
    """Return (settings without the seed, cell) of a run."""
    try:
        config = read_json(path / "config.resolved.json")
        key = json.dumps(settings(path), sort_keys=True, default=str)
    except StorageError as error:
        return str(path), Cell(path.resolve().name, 0, path, "unreadable", str(error))
    if not config:
        raise no_run(path)
    with understood(path):
        return key, read_cell(path, path.resolve().name, int(config["training"]["seed"]), outcome=outcome)


def _labelled(group: Sequence[Cell], taken: set[str]) -> list[Cell]:
    """Label the runs of one configuration with the common prefix of their names."""
    names = [cell.condition for cell in group]
    first: dict[int, Path] = {}
    for cell in group:
        if (other := first.setdefault(cell.seed, cell.path)) != cell.path:
            problem = f"has the configuration and seed of {other}, so both are one run of the comparison"
            raise ConfigError.at(cell.path, "RUNS", problem, "give one of them")
    # Runs inside of a campaign are called s0, s1, ...; the name of the condition is that of the folder above.
    if all(cell.path.resolve().parent.parent.name == "cells" for cell in group):
        names = [cell.path.resolve().parent.name for cell in group]
    label = names[0] if len(set(names)) == 1 else _SEED.sub("", commonprefix(names))  # noqa: RUF071 - of names, not paths
    label = _unique(label or names[0], taken)
    return [replace(cell, condition=label) for cell in group]


def _unique(label: str, taken: set[str]) -> str:
    """Return the label, with a number if it is taken, and add the result to `taken`."""
    number, candidate = 2, label
    while candidate in taken:
        number, candidate = number + 1, f"{label} ({number})"
    taken.add(candidate)
    return candidate
