"""The lab is what a third-party package could be: nothing imports it, and entry points register what it adds."""

import tomllib
from importlib.metadata import entry_points

from docs.measure import ROOT, modules
from retrain.registry import components

_GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]


def test_nothing_outside_the_lab_imports_it():
    outside = [module for module in modules() if not f"{module.name}.".startswith("retrain.lab.")]
    assert [module.name for module in outside if any("retrain.lab" in one for one in module.imported_modules())] == []


def test_the_installed_package_has_the_entry_points_of_the_source():
    """Otherwise the installation is older than pyproject.toml: `pip install --no-deps --editable .`"""
    for group, points in _GROUPS.items():
        installed = {point.name: point.value for point in entry_points(group=group)}
        assert points.items() <= installed.items(), group


def test_every_component_of_the_lab_is_an_entry_point():
    own = [one for one in components() if one.target.__module__.startswith("retrain.lab.")]
    assert own
    for one in own:
        place = f"{one.target.__module__}:{one.target.__qualname__}"
        assert _GROUPS[f"retrain.{one.kind}"][one.name] == place
