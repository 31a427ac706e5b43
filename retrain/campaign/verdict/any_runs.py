"""Any runs as a table of results: runs that differ by nothing but their seed are one condition."""

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
from retrain.campaign.verdict.results import Cell, Results, read_campaign, read_cell, settings, table
from retrain.errors import StorageError
from retrain.report.run_summary import no_run
from retrain.storage.run_files import understood
from retrain.system.records import read_json

_SEED = re.compile(r"[-_. ]*(seed|s)?[-_]?\d*$")
"""What the names of runs of one condition end with: `-s3`, `_seed3`, `-3`."""


def read_runs(paths: Sequence[Path]) -> Results:
    """The table of these runs; a campaign's directory stands for its runs. The first condition is the baseline.

    Two runs with equal configuration and seed are two conditions, named after the runs. So are conditions of
    several campaigns under one label: "c3: grpo" is grpo of the campaign in the directory c3.

    Raises:
        ConfigError: there is no run at a path.
    """
    campaigns = {path: read_campaign(path) for path in paths if (path / PLAN).is_file()}
    uses = Counter(label for found in campaigns.values() for label in found.conditions)
    taken = {label for label, times in uses.items() if times == 1}
    cells: list[Cell] = []
    for path, found in campaigns.items():
        for label in found.conditions:
            own = label if uses[label] == 1 else _free(f"{path.resolve().name}: {label}", taken)
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


def compare_command(paths: Sequence[Path]) -> str:
    """What gives the comparison again."""
    return f"retrain compare {shlex.join(map(str, paths))}"


def _run(path: Path) -> tuple[str, Cell]:
    """(what decides the run besides its seed, its cell)."""
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
    """The runs of one configuration under one label: what their names begin with."""
    names = [cell.condition for cell in group]
    if len({cell.seed for cell in group}) < len(group):
        return [replace(cell, condition=_free(cell.condition, taken)) for cell in group]
    if all(cell.path.resolve().parent.parent.name == "cells" for cell in group):
        names = [cell.path.resolve().parent.name for cell in group]
    label = names[0] if len(set(names)) == 1 else _SEED.sub("", commonprefix(names))  # noqa: RUF071 - of names, not paths
    label = _free(label or names[0], taken)
    return [replace(cell, condition=label) for cell in group]


def _free(label: str, taken: set[str]) -> str:
    """The label, numbered if another condition has it."""
    number, found = 2, label
    while found in taken:
        number, found = number + 1, f"{label} ({number})"
    taken.add(found)
    return found
