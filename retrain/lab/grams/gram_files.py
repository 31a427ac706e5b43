"""Input and output of the extraction: solutions from files and tasks, the file of grams, and a coverage report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from retrain.algorithms.planning.gram_pattern import GramPattern, normalize
from retrain.errors import DataError
from retrain.lab.grams.gram_extraction import Extraction, Recipe
from retrain.registry import find
from retrain.report.charts import number, ticks
from retrain.report.page import fill
from retrain.system.files import write_text, writing
from retrain.system.records import OBJECT, BadRow, checked, rows_of
from retrain.version import __version__

COLUMNS = ("solution", "text", "completion")
"""Columns that may hold the solution, in order of preference, if none is named."""
_PASSED = 1.0
"""Default minimum reward of a successful solution, for rows with rewards."""
_MAX_DRAWS = 20
"""Largest number of problems tried per requested solution of a task."""
_SHOWN = 25
"""Number of grams in the chart."""


@dataclass(frozen=True)
class SolutionFormat:
    """Columns and threshold that identify successful solutions in rows.

    Attributes:
        column: column of the solution; None uses the first of COLUMNS that a row has.
        reward_column: column of the reward; rows without it count as successful unless `min_reward` is set.
        min_reward: minimum reward of a successful solution; None is 1.
    """

    column: str | None = None
    reward_column: str = "reward"
    min_reward: float | None = None


@dataclass(frozen=True)
class Files:
    """Files with solutions: .jsonl, .jsonl.gz, .parquet, or run directories."""

    paths: Sequence[Path]

    def __str__(self) -> str:
        return ", ".join(map(str, self.paths))

    @property
    def names(self) -> list[str]:
        """Names of the files without their directories."""
        return [path.name for path in self.paths]

    def rows(self) -> Iterator[tuple[str, Any]]:
        """Yield (place, row) of all rows in the order of the files; DataError if a file cannot be read."""
        return (row for file in self.paths for path in _expand(file) for row in rows_of(path))


@dataclass(frozen=True)
class HubSplit:
    """A split of a data set on the hub, or in a directory with the same layout."""

    name: str
    split: str = "train"
    config: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.name}/{self.split}"

    @property
    def names(self) -> list[str]:
        """Data set, split and revision as one text, in a list."""
        return [f"{self}@{self.revision}" if self.revision else str(self)]

    def rows(self) -> Iterator[tuple[str, Any]]:
        """Return (place, row) of all rows; DataError if the data set cannot be loaded."""
        from retrain.data.rows import hub_split

        data = hub_split(self.name, self.split, self.config, self.revision)
        return ((f"{self}:{number}", row) for number, row in enumerate(data, start=1))


def solutions_in(rows: Iterable[tuple[str, Any]], reading: SolutionFormat, name: str) -> list[str]:
    """Return the successful solutions among rows.

    Args:
        rows: pairs of a place and a row.
        reading: columns and threshold.
        name: name of the source, for errors.
    Raises:
        DataError: a row is invalid, or none is a successful solution.
    """
    count = 0
    solutions: list[str] = []
    for count, (line, row) in enumerate(rows, start=1):  # noqa: B007 - the last count is in the message
        if (text := _solution(line, row, reading)) is not None:
            solutions.append(text)
    if not solutions:
        raise DataError(f"none of {count} rows in {name} is a successful solution")
    return solutions


def task_solutions(name: str, count: int, seed: int) -> list[str]:
    """Return `count` worked solutions of a task with the correct answer, according to the reward "exact".

    Args:
        name: name of the task.
        count: number of solutions.
        seed: seed of the task's problems.
    Raises:
        DataError: too few of the tried problems have such a solution.
    """
    task, exact = find("task", name).bind().build({"seed": seed}), find("reward", "exact").bind()
    solutions: list[str] = []
    # A demonstrator may be wrong most of the time; the limit ends a task of which no solution is right.
    for index in range(_MAX_DRAWS * count):
        problem = task.problem(index)
        if problem.solution and exact(problem.solution, problem.answer) == _PASSED:
            solutions.append(problem.solution)
            if len(solutions) == count:
                return solutions
    raise DataError(
        f"task {name}: {len(solutions)} correct solutions in {_MAX_DRAWS * count} problems instead of {count}; "
        "lower --count, or use files"
    )


def coverage(grams: Sequence[str], solutions: Iterable[str]) -> dict[str, float]:
    """Return the shares of words and of solutions that the grams cover, with the matching of training.

    Args:
        grams: the strategic grams.
        solutions: texts of solutions.
    Returns:
        {"words": share of words inside a gram, "solutions": share of solutions that contain a gram}.
    """
    # The pattern of training, so that the share is that of the tokens a run will mark as planning.
    pattern = GramPattern(grams)
    words = 0
    covered = 0
    holding = 0
    total = 0
    for solution in solutions:
        text = normalize(solution)
        spans = [(start, end) for start, end, _ in pattern.find(text)]
        places = [word.start() for word in re.finditer(r"\S+", text)]
        inside = sum(any(start <= position < end for start, end in spans) for position in places)
        words += len(places)
        covered += inside
        total += 1
        holding += bool(spans)
    return {"words": covered / max(words, 1), "solutions": holding / max(total, 1)}


def document(
    extraction: Extraction, recipe: Recipe, covered: dict[str, float], sources: Sequence[str]
) -> dict[str, Any]:
    """Return the contents of the file for `[planning] strategic_grams_path`, with their provenance, as JSON values.

    Args:
        extraction: the extracted grams.
        recipe: settings of the extraction.
        covered: see `coverage`.
        sources: names of the sources of solutions.
    """
    return {
        "strategic_grams": list(extraction.grams),
        "metadata": {
            "made_by": f"retrain {__version__}",
            "sources": list(sources),
            "solutions": extraction.solutions,
            "recipe": asdict(recipe),
            "counts": extraction.counts,
            "coverage": covered,
            "document_frequency": {gram: extraction.frequencies[gram] for gram in extraction.grams},
            "clusters": [asdict(cluster) for cluster in extraction.clusters if cluster.selected],
            "execution_grams": list(extraction.execution),
        },
    }


def write(path: Path, text: str) -> None:
    """Write a text file; StorageError if that fails."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)


def report(extraction: Extraction, covered: dict[str, float]) -> str:
    """Return the coverage report as text."""
    steps = " -> ".join(f"{count:,} {name}" for name, count in extraction.counts.items())
    chosen, kept = [cluster for cluster in extraction.clusters if cluster.selected], set(extraction.grams)
    lines = [
        f"{extraction.solutions:,} solutions; n-grams: {steps}",
        f"{len(chosen)} of {len(extraction.clusters)} clusters; the grams cover {covered['words']:.1%} of the words "
        f"and occur in {covered['solutions']:.1%} of the solutions",
        "",
        "solutions  cluster",
    ]
    for cluster in chosen:
        # A cluster of which no gram was kept is still named, by the gram nearest to its mean.
        inside = kept.intersection(cluster.grams) or {cluster.center}
        grams = _most_frequent(extraction, inside)
        named = ", ".join(f"{gram} ({extraction.frequencies[gram]:,})" for gram in grams[:5])
        lines.append(f"{cluster.frequency:>9,}  {named}{f' and {len(grams) - 5} more' if len(grams) > 5 else ''}")
    return "\n".join(lines)


def _expand(file: Path) -> list[Path]:
    """Return the files of rollouts in a run directory, or the file itself."""
    if not file.is_dir():
        return [file]
    # Sorted: the order of the solutions decides ties, and that of a directory differs between machines.
    stored = sorted((file / "rollouts").glob("*.jsonl.gz"))
    if not stored:
        raise DataError(f"{file}: this directory has no rollouts/*.jsonl.gz; name a run's directory or a file")
    return stored


def _solution(line: str, row: Any, reading: SolutionFormat) -> str | None:
    """Return the row's solution, or None if it was not successful."""
    try:
        row = checked(OBJECT, row)
    except BadRow as reason:
        raise DataError(f"{line}: {reason}") from None
    column = reading.column or next((name for name in COLUMNS if name in row), COLUMNS[0])
    has = ", ".join(map(str, row))
    if not isinstance(row.get(column), str):
        raise DataError(f'{line}: no text in column "{column}"; it has {has}; name one with --column')
    if reading.reward_column not in row:
        if reading.min_reward is None:
            return row[column]
        raise DataError(f'{line}: no column "{reading.reward_column}"; it has {has}; name one with --reward-column')
    reward = row[reading.reward_column]  # None if scoring failed
    least = _PASSED if reading.min_reward is None else reading.min_reward
    # A solution of unknown reward is no evidence of what successful solutions say.
    return row[column] if isinstance(reward, (int, float)) and reward >= least else None


def plot(extraction: Extraction) -> str:
    """Return an SVG chart of the document frequency of every cluster and of the most frequent grams."""
    most = max(cluster.frequency for cluster in extraction.clusters)
    shown = _most_frequent(extraction, extraction.grams)[:_SHOWN]
    return fill(
        Path(__file__).with_name("grams.svg"),
        clusters=extraction.clusters,
        most=most,
        ticks=[(tick, number(tick)) for tick in ticks(0, most)],
        grams=[
            (gram, extraction.frequencies[gram], extraction.frequencies[gram] / extraction.solutions) for gram in shown
        ],
        shown="all of them"
        if len(shown) == len(extraction.grams)
        else f"the {_SHOWN} most frequent of {len(extraction.grams)}",
    )


def _most_frequent(extraction: Extraction, grams: Iterable[str]) -> list[str]:
    return sorted(grams, key=lambda gram: (-extraction.frequencies[gram], gram))
