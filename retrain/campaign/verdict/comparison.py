"""`retrain compare`: compare runs, campaigns, or files of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from retrain.campaign.verdict import campaign_page, card_page, sentences
from retrain.campaign.verdict.across_tasks import card_of
from retrain.campaign.verdict.analysis import Analysis, analyze
from retrain.campaign.verdict.any_runs import compare_command, read_files, read_runs
from retrain.errors import ConfigError, ConfigProblem
from retrain.report.exported_figures import Drawing


@dataclass(frozen=True)
class Compared:
    """A comparison in every output format.

    Attributes:
        text: output for a terminal.
        facts: content for JSON; non-finite numbers are null.
        latex: returns the tables for a paper.
        page: returns the HTML document.
        figures: returns the figures by name.
    """

    text: str
    facts: dict[str, Any]
    latex: Callable[[], str]
    page: Callable[[], str]
    figures: Callable[[], dict[str, Drawing]]


def compare(paths: Sequence[Path], metric: str | None = None) -> Compared:
    """Compare runs and campaigns (directories), or results of other programs (files).

    Args:
        paths: directories or files; the first is the baseline.
        metric: column or key of the files; None: the only one there is, or `accuracy`.
    Raises:
        ConfigError: a path does not exist or has no run, directories and files are mixed, or a metric is chosen for
            runs.
        DataError: a file of results cannot be read.
    """
    if missing := [path for path in paths if not path.exists()]:
        places = [ConfigProblem(str(path), 0, 0, "RUNS", "does not exist", "check the path") for path in missing]
        raise ConfigError(places)
    files, commands = [path for path in paths if path.is_file()], [compare_command(paths, metric)]
    if not files and not metric:
        return _of_one(analyze(read_runs(paths)), commands)
    if len(files) < len(paths):
        other = next(path for path in paths if path not in files)
        fix = "compare results.csv, which `retrain report` writes for a campaign, with the files"
        problem = "not a file, but other paths are" if files else "the result of a run is its held-out accuracy"
        raise ConfigError([ConfigProblem(str(other), 0, 0, "RUNS" if files else "--metric", problem, fix)])
    tables = read_files(files, metric)
    if len(tables) == 1:
        return _of_one(analyze(next(iter(tables.values()))), commands)
    card = card_of("comparison", tables, {})
    latex, page = partial(card_page.latex, card), partial(card_page.render, card, commands)
    return Compared(card_page.text(card), card_page.as_json(card), latex, page, partial(card_page.exported, card))


def _of_one(analysis: Analysis, commands: Sequence[str]) -> Compared:
    latex, page = partial(sentences.latex, analysis), partial(campaign_page.render, analysis, commands)
    figures = partial(campaign_page.exported, analysis)
    return Compared(sentences.conditions_text(analysis), sentences.as_json(analysis), latex, page, figures)
