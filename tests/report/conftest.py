"""The small runs of `tests/small_runs.py` as fixtures."""

from tests.small_runs import stopped, toml, train

__all__ = ["stopped", "toml", "train"]
