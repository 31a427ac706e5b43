"""A tracker: one line per step and metric, in a CSV file of the run directory."""

import csv
from collections.abc import Mapping
from pathlib import Path

from retrain import tracker


@tracker("csv")
class Csv:
    """One line per step and metric, in the run directory."""

    def __init__(self, run_dir: Path, *, name: str = "metrics.csv") -> None:
        self.file = (run_dir / name).open("a", newline="", encoding="utf-8")
        self.lines = csv.writer(self.file)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step's row, or `eval/...` after so many steps."""
        self.lines.writerows((step, name, value) for name, value in metrics.items())

    def close(self) -> None:
        """Write what waits."""
        self.file.close()
