"""The small runs of `tests/small_runs.py` and the commands of `tests/cli` as fixtures."""

from tests.cli.conftest import cli, folder
from tests.small_runs import stopped, toml, train

__all__ = ["cli", "folder", "stopped", "toml", "train"]
