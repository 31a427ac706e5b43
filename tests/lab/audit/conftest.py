"""The small runs of `tests/small_runs.py` as fixtures, one of them for all tests here."""

import pytest

from retrain.config.load import load
from retrain.run.session import Resume, run
from tests.small_runs import TOML, toml, train

__all__ = ["toml", "train", "trained"]


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run of two steps, which an audit only reads."""
    folder = tmp_path_factory.mktemp("audited")
    (folder / "run.toml").write_text(TOML)
    overrides = [f'logging.dir="{folder}"', "logging.name=run", "training.max_steps=2"]
    return run(load(folder / "run.toml", overrides), Resume(), lambda event, details: None)
