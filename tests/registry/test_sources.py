"""Which modules a resumed run compares: the user's, found without importing what is installed."""

import importlib
import sys

import pytest

from retrain import registry
from retrain.errors import ComponentError
from retrain.registry import Component
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


def test_a_file_that_changed_after_its_import_is_refused_until_it_is_reloaded(plugin, tmp_path):
    """As in a notebook: Python keeps the module, and the hash of the new file would certify code that does not run."""
    plugin(["its_helper"])
    module = importlib.import_module("mine_of_sources")
    (tmp_path / "its_helper.py").write_text("import math\n")  # imported by nobody yet, so that it may change
    (tmp_path / "mine_of_sources.py").write_text("def mine(completion):\n    return 1.0\n")
    with pytest.raises(ComponentError, match=r"sources\.py has changed since this process imported it") as caught:
        registry.find("reward", "mine_of_sources.mine")
    assert "importlib.reload(mine_of_sources)" in caught.value.fix
    with pytest.raises(ComponentError, match="has changed"):
        source_hashes([Component("reward", "mine", module.mine, "mine")])
    importlib.reload(module)
    component = registry.find("reward", "mine_of_sources.mine")
    assert component.target("x") == 1.0
    assert source_hashes([component]).keys() == {"mine_of_sources"}
