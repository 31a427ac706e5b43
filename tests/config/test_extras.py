"""A package that is not installed is found before anything is loaded."""

import importlib.util

import pytest

from retrain.config.load import load
from retrain.errors import ConfigError


def test_a_missing_extra_is_a_mistake_with_a_place(tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "math_verify" else real(name, *a))
    file = tmp_path / "run.toml"
    file.write_text('[[rewards]]\nname = "boxed_math"\n')
    with pytest.raises(ConfigError, match=r"run\.toml:2:.*math_verify is not installed.*retrain-rl\[math\]"):
        load(file)
