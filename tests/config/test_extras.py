"""A package that is not installed is found before anything is loaded."""

import importlib.util

import pytest

from retrain.config.load import load
from retrain.errors import ConfigError


@pytest.mark.parametrize(
    ("package", "extra", "text"),
    [
        ("math_verify", "math", '[[rewards]]\nname = "boxed_math"\n'),
        ("peft", "lora", "[model]\nlora = { r = 2 }\n"),
        ("bitsandbytes", "8bit", '[optimizer]\nname = "adamw8bit"\n'),
        ("sklearn", "grams", '[planning]\ndetector = "semantic"\n'),
        ("sentence_transformers", "grams", '[planning]\nembedder = "."\ndetector = "semantic"\n'),
        ("bitsandbytes", "8bit", '[model]\nquantization = "nf4"\nlora = { r = 2 }\n'),
    ],
)
def test_a_missing_extra_is_a_mistake_with_a_place(tmp_path, monkeypatch, package, extra, text):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == package else real(name, *a))
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"run\.toml:2:.*{package} is not installed.*\[{extra}\]"):
        load(file)
