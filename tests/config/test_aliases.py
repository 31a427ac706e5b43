"""What answers a word of another trainer can be written here."""

import re

import pytest

from retrain.config.mistakes import advice_by_key, translated
from retrain.errors import ConfigError

ASSIGNMENT = re.compile(r'\[([\w.]+)\] (\w+) = (\[[^]]*\]|"[^"]*"|[\w.-]+)')
ANSWERS = {found for word in advice_by_key() for found in ASSIGNMENT.findall(translated(word, 2))}
SAMPLES = {"schedule": '"cosine"', "path": '"builtin:tiny"', "name": '"x"', "dir": '"runs"', "mask_truncated": "true"}
"""Sensible values of keys for which 2 is none."""


@pytest.mark.parametrize(("table", "key", "value"), sorted(ANSWERS))
def test_what_is_said_can_be_written(loaded, table, key, value):
    text = f"[{table}]\n{key} = {SAMPLES.get(key, value)}\n"
    mistakes = ""
    try:
        loaded(text if table == "training" else f"{text}[training]\ngroup_size = 2\n")
    except ConfigError as error:
        mistakes = str(error)
    assert table == "jsonl" or not re.search("unknown|no [a-z]+ named|not a valid value", mistakes), mistakes
