"""The user's code: files of the working directory that belong to no installed distribution."""

import json
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from retrain.errors import ForeignCodeError
from retrain.registry.foreign_code import refused
from retrain.registry.lookup import find, load_object

INFO = "Metadata-Version: 2.1\nName: neighbour\nVersion: 1.0\n"


@pytest.fixture(params=["editable", "a folder on PYTHONPATH"])
def installed(request, tmp_path, monkeypatch):
    """The folder of a project with a package, its tests and plug-ins, installed into an environment."""
    project, site = tmp_path / "work" / "project", tmp_path / "site"
    editable = request.param == "editable"
    location = site if editable else project
    for package in ("neighbour", "neighbour_tests"):
        (project / package).mkdir(parents=True)
        (project / package / "__init__.py").write_text("def call(x):\n    return x\n")
    (project / "plugins").mkdir()
    (project / "plugins" / "mine_here.py").write_text("def call(x):\n    return x\n")
    info = location / "neighbour-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(INFO)
    names = "neighbour/__init__.py,,\nneighbour_tests/__init__.py,,\n"
    (info / "RECORD").write_text("neighbour.pth,,\n" if editable else names)
    if editable:
        (info / "direct_url.json").write_text(json.dumps({"dir_info": {"editable": True}, "url": project.as_uri()}))
    monkeypatch.syspath_prepend(location)
    monkeypatch.syspath_prepend(project)
    yield project
    for name in [name for name in sys.modules if name.startswith(("neighbour", "project", "mine_"))]:
        del sys.modules[name]


def loads(path, tmp_path):
    with suppress(ForeignCodeError), refused(tmp_path / "run"):
        load_object(path)
        return True
    return False


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("where", [".", "..", "../elsewhere"])
def test_a_module_of_an_installed_distribution_is_not_the_users(installed, tmp_path, monkeypatch, where):
    (folder := installed / where).mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    Path("mine_too.py").write_text(
        "from functools import partial\ndef call(x):\n    return x\nbound = partial(call, 1)\n"
    )
    assert not loads("neighbour.call", tmp_path)
    assert not loads("neighbour_tests.call", tmp_path), "the whole folder of an editable installation belongs to it"
    if where != ".":  # within the project this file is part of it
        assert loads("mine_too.call", tmp_path)
        assert loads("mine_too.bound", tmp_path)


def test_the_plugins_of_the_working_directory_are_the_users_in_a_project_too(installed, tmp_path, monkeypatch):
    monkeypatch.chdir(installed)
    assert loads("mine_here.call", tmp_path)


def test_a_function_that_a_file_of_the_user_imports_from_a_package_is_not_the_users(cwd):
    Path("mine_borrowed.py").write_text("from os import system\nfrom shutil import rmtree\nfrom pathlib import Path\n")
    for name in ("system", "rmtree", "Path"):
        assert not loads(f"mine_borrowed.{name}", cwd)
    del sys.modules["mine_borrowed"]


@pytest.mark.parametrize(
    "path", ["antigravity.geohash", "this.s", "venv.__main__.main", "idlelib.idle.main", "yaml.load"]
)
def test_installed_code_is_refused_before_it_is_imported(cwd, path):
    module = path.rpartition(".")[0]
    before = module in sys.modules
    with refused(cwd / "run"), pytest.raises(ForeignCodeError, match="neither a component nor a file"):
        load_object(path, (), "reward")
    assert (module in sys.modules) == before


def test_a_component_of_this_package_is_known_without_an_installation(cwd, monkeypatch):
    """As with the checkout on PYTHONPATH, where no distribution names the package."""
    monkeypatch.setattr("retrain.registry.foreign_code.packages_distributions", dict)
    component = find("advantage", "grpo").target
    with refused(cwd / "run"):
        assert load_object(f"{component.__module__}.{component.__name__}", (), "advantage") is component
