"""An optional library that is not installed is named with the extra that brings it."""

import importlib

import pytest

from retrain.errors import MissingExtraError
from retrain.registry import find


@pytest.mark.parametrize(
    ("kind", "name", "params", "extra"),
    [
        ("task", "parquet", {"path": "data.parquet"}, "parquet"),
        ("task", "hub", {"name": "data"}, "hub"),
        ("task", "gym", {"name": "gcd"}, "gym"),
        ("reward", "gym", {}, "gym"),
    ],
)
def test_the_extra_is_named(monkeypatch, kind, name, params, extra):
    bound = find(kind, name).bind(params)

    def missing(module):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MissingExtraError, match=rf"pip install .*\[{extra}\]"):
        bound.build({"seed": 0})
