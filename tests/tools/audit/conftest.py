"""The small runs of `tests/small_runs.py` as fixtures."""

from tests.small_runs import cache, toml, train

__all__ = ["cache", "toml", "train"]
