"""The small runs of `tests/small_runs.py` as fixtures."""

from tests.small_runs import cache, stopped, toml, train

__all__ = ["cache", "stopped", "toml", "train"]
