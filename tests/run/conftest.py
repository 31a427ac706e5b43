"""The small runs of `tests/small_runs.py` as fixtures."""

from tests.small_runs import resumed, stopped, toml, train

__all__ = ["resumed", "stopped", "toml", "train"]
