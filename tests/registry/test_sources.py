"""Which modules a resumed run compares: the user's, found without importing what is installed."""

import importlib
import sys

import pytest

from retrain import registry
from retrain.registry.sources import source_hashes


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """`plugin(imports)`: a reward in `mine_of_sources`, beside its helper and a library on another path."""
    library = tmp_path / "other" / "site-packages" / "a_library"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("raise TypeError('imported')\n")
    (library / "part.py").write_text("")
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text("raise TypeError('imported')\n")
    (tmp_path / "broken_package" / "part.py").write_text("")
    (tmp_path / "its_helper.py").write_text("import json\nimport torch.nn.functional\n")
    monkeypatch.syspath_prepend(str(library.parent))
    monkeypatch.syspath_prepend(str(tmp_path))

    def go(imports):
        lines = "".join(f"    import {name}\n" for name in imports)
        (tmp_path / "mine_of_sources.py").write_text(f"def mine(completion):\n    return 0.0\n\ndef later():\n{lines}")
        importlib.invalidate_caches()
        return source_hashes([registry.find("reward", "mine_of_sources.mine")]).keys()

    yield go
    monkeypatch.delitem(sys.modules, "mine_of_sources", raising=False)


def test_helpers_are_compared_and_libraries_are_not(plugin):
    found = plugin(["its_helper", "json", "numpy.linalg", "a_library", "a_library.part", "nowhere.at_all"])
    assert found == {"mine_of_sources", "its_helper"}


def test_a_package_that_cannot_be_imported_is_compared_by_its_first_file(plugin):
    assert plugin(["broken_package", "broken_package.part"]) == {"mine_of_sources", "broken_package"}
