"""Tasks from local files: JSON lines and parquet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import ClassVar

from retrain.data.rows import BAD_ROWS, RowTask
from retrain.registry import task
from retrain.system.files import sha256
from retrain.system.records import Rows, jsonl_rows, parquet_rows

_WHEN = {**BAD_ROWS, "heldout_fraction": ("heldout_path", (None,))}


@dataclass
class FileTask(RowTask):
    """Problems from the rows of a file; all bad rows are reported together.

    Args:
        seed: of the order of every epoch.
        path: of the file with the training problems.
        heldout_path: of a file with the held-out problems; a training row with one of its prompts is bad.
        heldout_fraction: share of `path` to hold out where there is no `heldout_path`.
        shuffle: a new order for every epoch; False keeps the order of the file.
    """

    kind: ClassVar[str]
    rows: ClassVar[Callable[[str], Rows]]
    """The rows of a file with their places."""
    _: KW_ONLY
    path: str
    heldout_path: str | None = None

    def __post_init__(self) -> None:
        rows, heldout = type(self).rows, self.heldout_path
        self.divide(rows(self.path), self.path, None if heldout is None else (rows(heldout), heldout))
        other = self.heldout_fraction if heldout is None else sha256(Path(heldout))
        self.sign(self.kind, [sha256(Path(self.path)), other])


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
