"""A run's file of this text, loaded in a directory of its own."""

import pytest

from retrain.config.load import load


@pytest.fixture
def loaded(cwd):
    """Loads run.toml of this text in the current directory, which is empty."""

    def go(text, *overrides):
        (cwd / "run.toml").write_text(text)
        return load("run.toml", overrides)

    return go
