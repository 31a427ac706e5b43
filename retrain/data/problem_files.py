"""Tasks from local files: JSON lines and parquet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from retrain.data.rows import (
    BAD_ROWS,
    Fraction,
    OnBadRow,
    Reading,
    RowTask,
    digest_of,
    in_hash_order,
    prompt_hash,
    read_problems,
    split,
)
from retrain.registry import task
from retrain.system.files import sha256
from retrain.system.records import Rows, jsonl_rows, parquet_rows

_WHEN = {**BAD_ROWS, "heldout_fraction": ("heldout_path", (None,))}


class FileTask(RowTask):
    """Problems from the rows of a file; all bad rows are reported together.

    Args:
        seed: of the order of every epoch.
        path: of the file with the training problems.
        heldout_path: of a file with the held-out problems; a training row with one of its prompts is bad.
        heldout_fraction: share of `path` to hold out where there is no `heldout_path`.
        prompt_field, answer_field, solution_field, id_field, on_bad_row, max_bad_fraction: see `Reading`.
        shuffle: a new order for every epoch; False keeps the order of the file.
    """

    kind: ClassVar[str]
    rows: Callable[[str], Rows]
    """The rows of a file with their places; a static method."""

    def __init__(  # noqa: PLR0913 - its keyword-only parameters are its table
        self,
        seed: int,
        *,
        path: str,
        heldout_path: str | None = None,
        heldout_fraction: Fraction = 0.1,
        prompt_field: str = "prompt",
        answer_field: str = "answer",
        solution_field: str = "solution",
        id_field: str = "id",
        on_bad_row: OnBadRow = "error",
        max_bad_fraction: Fraction = 0.01,
        shuffle: bool = True,
    ) -> None:
        reading = Reading(prompt_field, answer_field, solution_field, id_field, on_bad_row, max_bad_fraction)
        if heldout_path is None:
            train, held = split(read_problems(self.rows(path), path, reading), heldout_fraction, path)
            contents = [sha256(Path(path)), heldout_fraction]
        else:
            held = in_hash_order(read_problems(self.rows(heldout_path), heldout_path, reading))
            train = read_problems(self.rows(path), path, reading, frozenset(map(prompt_hash, held)))
            contents = [sha256(Path(path)), sha256(Path(heldout_path))]
        super().__init__(seed, train, held, digest_of(self.kind, vars(reading), shuffle, contents), shuffle)


@task("jsonl", when=_WHEN)
class Jsonl(FileTask):
    """One JSON object per line, UTF-8, at most 1,000,000 bytes; blank lines are ignored."""

    kind = "jsonl"

    rows = staticmethod(jsonl_rows)


@task("parquet", extra=("pyarrow", "parquet"), when=_WHEN)
class Parquet(FileTask):
    """Rows of a parquet file (extra `parquet`); places count rows from 1."""

    kind = "parquet"

    rows = staticmethod(parquet_rows)
