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


def test_moments_in_blocks_are_not_spread_over_ranks(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[optimizer]\nname = "adamw8bit"\n[distributed]\nshard = "full"\n')
    with pytest.raises(ConfigError, match=r'run\.toml:4:.*cannot be sharded; use shard = "none"'):
        load(file)
    file.write_text(file.read_text() + "[model]\nlora = { r = 2 }\n")
    load(file)  # adapters are whole on every rank


def test_weights_of_four_bits_are_frozen_and_whole_on_every_rank(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[model]\nquantization = "nf4"\n')
    with pytest.raises(ConfigError, match=r"run\.toml:2:.*4-bit weights cannot be trained; add \[model.lora\]"):
        load(file)
    file.write_text(file.read_text() + 'lora = { r = 2 }\n[distributed]\nshard = "full"\n')
    with pytest.raises(ConfigError, match=r'run\.toml:5:.*blocks of 64 weights.*cannot be sharded; use shard = "none"'):
        load(file)
