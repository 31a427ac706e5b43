"""Group any runs into conditions: runs that differ only in their seed belong to one condition."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from os.path import commonprefix
from pathlib import Path

from retrain.campaign.plan.plan_file import PLAN
from retrain.campaign.verdict.result_files import read_result_files
from retrain.campaign.verdict.results import Cell, Results, read_campaign, read_cell, settings, table
from retrain.errors import StorageError
from retrain.report.run_summary import no_run
from retrain.storage.run_files import understood
from retrain.system.records import read_json

_SEED = re.compile(r"[-_. ]*(seed|s)?[-_]?\d*$")
"""Seed suffix of a run's name: `-s3`, `_seed3`, `-3`."""


def read_runs(paths: Sequence[Path]) -> Results:
    """Return the table of these runs. The first condition is the baseline.

    Two runs with equal configuration and seed are two conditions, named after the runs. If several campaigns have a
    condition of the same label, they are several conditions: "c3: grpo" is grpo of the campaign in the directory c3.

    Args:
        paths: run directories, and directories of campaigns, which stand for all runs of the campaign.
    Raises:
        ConfigError: there is no run at a path.
    """
    campaigns = {path: read_campaign(path) for path in paths if (path / PLAN).is_file()}
    uses = Counter(label for found in campaigns.values() for label in found.conditions)
    taken = {label for label, times in uses.items() if times == 1}
    cells: list[Cell] = []
    for path, found in campaigns.items():
        for label in found.conditions:
            own = label if uses[label] == 1 else _unique(f"{path.resolve().name}: {label}", taken)
            cells += [replace(cell, condition=own) for cell in found.of(label)]
    groups: dict[str, list[Cell]] = {}
    for path in dict.fromkeys(paths):
        if path not in campaigns:
            key, cell = _run(path)
            groups.setdefault(key, []).append(cell)
    for group in groups.values():
        cells += _labelled(group, taken)
    order = {path: index for index, path in reversed([*enumerate(paths)])}
    cells.sort(key=lambda cell: min(order[path] for path in (cell.path, *cell.path.parents) if path in order))
    return table("comparison", cells)


def read_files(files: Sequence[Path], metric: str | None = None) -> dict[str, Results]:
    """Return the table of every task in files of other programs. The first method of the first file is the baseline.

    Every table has all methods and seeds; runs that are in no file have the status "missing".

    Args:
        files: files that `read_result_files` can read.
        metric: a column or key; None: the only one there is, or `accuracy`.
    Raises:
        ConfigError, DataError: as for `read_result_files`.
    """
    found = read_result_files(files, metric)
    runs = list(dict.fromkeys((cell.condition, cell.seed) for cells in found.cells.values() for cell in cells))
    methods = list(dict.fromkeys(method for method, _ in runs))
    runs.sort(key=lambda run: methods.index(run[0]))
    tables: dict[str, Results] = {}
    for task in found.tasks:
        cells = {(cell.condition, cell.seed): cell for cell in found.cells[task]}
        every = [cells.get(run) or Cell(*run, files[0], "missing", "it is in no file") for run in runs]
        name = f"comparison: {task}" if task else "comparison"
        more = {"metric": found.metric, "with_result": "have a result", "steps_note": found.notes[task]}
        tables[task] = table(name, every, **more)
    return tables


def compare_command(paths: Sequence[Path], metric: str | None = None) -> str:
    """Return the command that reproduces the comparison."""
    chosen = ["--metric", metric] if metric else []
    return f"retrain compare {shlex.join([*map(str, paths), *chosen])}"


def _run(path: Path) -> tuple[str, Cell]:
    """Return (settings without the seed, cell) of a run."""
    try:
        config = read_json(path / "config.resolved.json")
        key = json.dumps(settings(path), sort_keys=True, default=str)
    except StorageError as error:
        return str(path), Cell(path.resolve().name, 0, path, "unreadable", str(error))
    if not config:
        raise no_run(path)
    with understood(path):
        return key, read_cell(path, path.resolve().name, int(config["training"]["seed"]))


def _labelled(group: Sequence[Cell], taken: set[str]) -> list[Cell]:
    """Label the runs of one configuration with the common prefix of their names."""
    names = [cell.condition for cell in group]
    if len({cell.seed for cell in group}) < len(group):
        return [replace(cell, condition=_unique(cell.condition, taken)) for cell in group]
    if all(cell.path.resolve().parent.parent.name == "cells" for cell in group):
        names = [cell.path.resolve().parent.name for cell in group]
    label = names[0] if len(set(names)) == 1 else _SEED.sub("", commonprefix(names))  # noqa: RUF071 - of names, not paths
    label = _unique(label or names[0], taken)
    return [replace(cell, condition=label) for cell in group]


def _unique(label: str, taken: set[str]) -> str:
    """Return the label, with a number if it is taken, and add the result to `taken`."""
    number, found = 2, label
    while found in taken:
        number, found = number + 1, f"{label} ({number})"
    taken.add(found)
    return found
