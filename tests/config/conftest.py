"""A run's file of this text, loaded in a directory of its own."""

import pytest

from retrain.config.load import load


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    """Loads run.toml of this text in the current directory, which is empty."""
    monkeypatch.chdir(tmp_path)

    def go(text, *overrides):
        (tmp_path / "run.toml").write_text(text)
        return load("run.toml", overrides)

    return go
