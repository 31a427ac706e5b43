"""The small runs of `tests/small_runs.py` and the commands of `tests/cli` as fixtures."""

from tests.cli.conftest import cli, folder, session_cache
from tests.small_runs import cache, stopped, toml, train

__all__ = ["cache", "cli", "folder", "session_cache", "stopped", "toml", "train"]
