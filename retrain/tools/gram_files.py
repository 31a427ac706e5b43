"""Strategic grams from files and tasks: what is read, what is written, and how much of the text is covered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from retrain import __version__
from retrain.algorithms.planning.gram_pattern import GramPattern, normalize
from retrain.data.rows import BadRow
from retrain.errors import DataError, StorageError
from retrain.registry import find
from retrain.report.charts import number, ticks
from retrain.storage.records import rows_of
from retrain.tools.gram_extraction import Extraction, Recipe

COLUMNS = ("solution", "text", "completion")
"""Where a solution is looked for, in order, unless a column is named."""
_PASSED = 1.0
"""Least reward of a successful solution where rows have rewards and none is named."""
_MAX_DRAWS = 20
"""Problems of a task that are looked at for each successful solution that is wanted."""
_SHOWN = 25


@dataclass(frozen=True)
class Reading:
    """How successful solutions are found in rows.

    Attributes:
        column: with the solution; None takes the first of COLUMNS that a row has.
        reward_column: with the reward; rows without it count as successful unless `min_reward` is set.
        min_reward: least reward of a successful solution; None is 1.
    """

    column: str | None = None
    reward_column: str = "reward"
    min_reward: float | None = None


def gather(
    files: Sequence[Path], reading: Reading, task: str | None, count: int, seed: int
) -> tuple[list[str], list[str]]:
    """Solutions and where they are from: `count` of a task, or those of the files without one."""
    if task:
        return task_solutions(task, count, seed), [f"task {task}"]
    return read_solutions(files, reading), [path.name for path in files]


def read_solutions(files: Sequence[Path], reading: Reading) -> list[str]:
    """Successful solutions in the order of the files: .jsonl, .jsonl.gz, .parquet, or a run's directory.

    Raises:
        DataError: a row that cannot be used, with its place, or no successful solution at all.
    """
    rows = [(place, row) for file in files for path in _expand(file) for place, row in rows_of(path)]
    solutions = [text for place, row in rows if (text := _solution(place, row, reading)) is not None]
    if not solutions:
        raise DataError(f"none of {len(rows)} rows in {', '.join(map(str, files))} is a successful solution")
    return solutions


def task_solutions(name: str, count: int, seed: int) -> list[str]:
    """`count` worked solutions of a task that reach the right answer, by the reward "exact"."""
    task, exact = find("task", name).bind().build({"seed": seed}), find("reward", "exact").bind()
    found: list[str] = []
    for index in range(_MAX_DRAWS * count):
        problem = task.problem(index)
        if problem.solution and exact(problem.solution, problem.answer) == _PASSED:
            found.append(problem.solution)
            if len(found) == count:
                return found
    raise DataError(
        f"task {name}: {len(found)} right solutions in {_MAX_DRAWS * count} problems, {count} are wanted; "
        "lower --count, or give files"
    )


def coverage(grams: Sequence[str], solutions: Iterable[str]) -> dict[str, float]:
    """Shares of the solutions' words and of the solutions that the grams cover, as training would match them."""
    pattern, words, covered, holding, total = GramPattern(grams), 0, 0, 0, 0
    for solution in solutions:
        text = normalize(solution)
        spans = [(start, end) for start, end, _ in pattern.find(text)]
        places = list(_word_places(text))
        inside = sum(any(start <= place < end for start, end in spans) for place in places)
        words, covered, total, holding = words + len(places), covered + inside, total + 1, holding + bool(spans)
    return {"words": covered / max(words, 1), "solutions": holding / max(total, 1)}


def document(found: Extraction, recipe: Recipe, covered: dict[str, float], sources: Sequence[str]) -> dict[str, Any]:
    """What `[planning] strategic_grams_path` reads, with where it comes from."""
    return {
        "strategic_grams": list(found.grams),
        "metadata": {
            "made_by": f"retrain {__version__}",
            "sources": list(sources),
            "solutions": found.solutions,
            "recipe": asdict(recipe),
            "counts": found.counts,
            "coverage": covered,
            "document_frequency": {gram: found.frequencies[gram] for gram in found.grams},
            "clusters": [asdict(cluster) for cluster in found.clusters if cluster.selected],
            "execution_grams": list(found.execution),
        },
    }


def write(path: Path, text: str) -> None:
    """Write a text file; StorageError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror}); name a file elsewhere") from None


def report(found: Extraction, covered: dict[str, float]) -> str:
    """The coverage report as text."""
    steps = " -> ".join(f"{count:,} {name}" for name, count in found.counts.items())
    chosen, kept = [cluster for cluster in found.clusters if cluster.selected], set(found.grams)
    lines = [
        f"{found.solutions:,} solutions; n-grams: {steps}",
        f"{len(chosen)} of {len(found.clusters)} clusters; the grams cover {covered['words']:.1%} of the words and "
        f"occur in {covered['solutions']:.1%} of the solutions",
        "",
        "solutions  cluster",
    ]
    for cluster in chosen:
        inside = kept.intersection(cluster.grams) or {cluster.center}
        grams = sorted(inside, key=lambda gram: (-found.frequencies[gram], gram))
        named = ", ".join(f"{gram} ({found.frequencies[gram]:,})" for gram in grams[:5])
        lines.append(f"{cluster.frequency:>9,}  {named}{f' and {len(grams) - 5} more' if len(grams) > 5 else ''}")
    return "\n".join(lines)


def _expand(file: Path) -> list[Path]:
    """A run's directory stands for the rollouts that it stored."""
    if not file.is_dir():
        return [file]
    stored = sorted((file / "rollouts").glob("*.jsonl.gz"))
    if not stored:
        raise DataError(f"{file}: a directory without rollouts/*.jsonl.gz; give a run's directory or a file")
    return stored


def _solution(place: str, row: Any, reading: Reading) -> str | None:
    """The row's solution, or None if it is not successful."""
    if isinstance(row, BadRow) or not isinstance(row, dict):
        raise DataError(f"{place}: {row if isinstance(row, BadRow) else 'not an object with named fields'}")
    column = reading.column or next((name for name in COLUMNS if name in row), COLUMNS[0])
    has = ", ".join(map(str, row))
    if not isinstance(row.get(column), str):
        raise DataError(f'{place}: no text in column "{column}"; it has {has}; name one with --column')
    if reading.reward_column not in row:
        if reading.min_reward is None:
            return row[column]
        raise DataError(f'{place}: no column "{reading.reward_column}"; it has {has}; name one with --reward-column')
    reward = row[reading.reward_column]  # None: it could not be scored
    least = _PASSED if reading.min_reward is None else reading.min_reward
    return row[column] if isinstance(reward, (int, float)) and reward >= least else None


def _word_places(text: str) -> Iterator[int]:
    """Where each word of a text starts."""
    inside = False
    for place, character in enumerate(text):
        starts, inside = not inside and not character.isspace(), not character.isspace()
        if starts:
            yield place


_STYLE = """<style>text{font:12px system-ui,sans-serif;fill:#333}.title{font-size:14px;font-weight:600}
.small{font-size:11px;fill:#666}.in{fill:#2563a8}.out{fill:#c3cbd4}.line{stroke:#e3e6ea}</style>"""
_WIDTH, _LEFT, _TOP, _ROW, _BARS = 860, 250, 330, 17, 220


def plot(found: Extraction) -> str:
    """Document frequency of every cluster, and of the grams in most solutions, as an SVG file."""
    grams = sorted(found.grams, key=lambda gram: (-found.frequencies[gram], gram))[:_SHOWN]
    height = _TOP + 45 + _ROW * len(grams)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}">{_STYLE}<rect width="100%" height="100%" fill="#fff"/>'
        f"{_cluster_bars(found)}{_gram_bars(found, grams)}</svg>\n"
    )


def _cluster_bars(found: Extraction) -> str:
    """Bars from left to right, most frequent cluster first."""
    left, right, base = 60, _WIDTH - 20, 40 + _BARS
    top, step = max(cluster.frequency for cluster in found.clusters), (right - left) / len(found.clusters)
    chosen = sum(cluster.selected for cluster in found.clusters)
    parts = [
        f'<text class="title" x="{left}" y="22">Solutions that hold a gram of the cluster '
        f"(blue: the {chosen} of {len(found.clusters)} clusters that are kept)</text>"
    ]
    for tick in ticks(0, top):
        y = base - _BARS * tick / top
        parts.append(f'<line class="line" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="small" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    for rank, cluster in enumerate(found.clusters):
        high, wide = _BARS * cluster.frequency / top, min(max(0.85 * step, 0.5), 24)
        parts.append(
            f'<rect class="{"in" if cluster.selected else "out"}" x="{left + rank * step:.1f}" y="{base - high:.1f}" '
            f'width="{wide:.1f}" height="{high:.1f}"><title>{escape(cluster.center)}</title></rect>'
        )
    parts.append(f'<text class="small" x="{left}" y="{base + 16}">clusters, most frequent first</text>')
    return "".join(parts)


def _gram_bars(found: Extraction, grams: Sequence[str]) -> str:
    """Bars from top to bottom, one for each gram."""
    more = f"the {len(grams)} most frequent of {len(found.grams)}" if len(grams) < len(found.grams) else "all of them"
    parts = [f'<text class="title" x="60" y="{_TOP}">Solutions that hold the gram ({more})</text>']
    longest = _WIDTH - _LEFT - 120
    for row, gram in enumerate(grams):
        y, share = _TOP + 14 + row * _ROW, found.frequencies[gram] / found.solutions
        wide = longest * share
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 11}" text-anchor="end">{escape(gram)}</text>')
        parts.append(f'<rect class="in" x="{_LEFT}" y="{y}" width="{wide:.1f}" height="{_ROW - 4}"/>')
        label = f"{found.frequencies[gram]:,} ({share:.0%})"
        parts.append(f'<text class="small" x="{_LEFT + wide + 6:.1f}" y="{y + 11}">{label}</text>')
    return "".join(parts)
