"""Code of the model runs only where something contains it; code for another interpreter is not imported here."""

import sys

import pytest

from retrain.config.load import load
from retrain.errors import ConfigError, UserCodeError
from retrain.system.bubblewrap import missing

HEAD = '[task]\nname = "sums"\n[environment]\nname = "{}"\n'
MINE = """
from retrain.environments.tools import python


class Breaks:
    def __init__(self):
        raise ValueError("no such door")

    def __call__(self, answer):
        yield None
"""


@pytest.fixture
def loaded(cwd):
    (cwd / "my_own_tools.py").write_text(MINE)

    def go(name, text="", *overrides):
        (cwd / "run.toml").write_text(HEAD.format(name) + text)
        return load("run.toml", [f'plugins.search_paths=["{cwd}"]', *overrides])

    return go


@pytest.mark.parametrize(
    "path", ["retrain.environments.tools.python", "retrain.environments.tools:python", "my_own_tools.python"]
)
def test_code_of_the_model_is_not_run_where_nothing_contains_it(loaded, monkeypatch, path):
    tool = f'[tools]\nfunctions = ["{path}"]\n'

    def refused(*overrides):
        with pytest.raises(ConfigError, match="the tool python runs code of the model") as caught:
            loaded("tools", tool, *overrides)
        (found,) = caught.value.problems
        assert found.key == "[tools] functions[0]"
        return found.problem, found.fix

    assert refused("environment.workers=0")[1] == "set [environment] workers = 1"
    if not missing():
        loaded("tools", tool)
    monkeypatch.setenv("PATH", "/nowhere")
    problem, fix = refused()
    assert "bubblewrap (the program bwrap) is not installed" in problem
    assert fix.startswith("apt-get install bubblewrap")


def test_paths_for_another_interpreter_are_not_imported_here(loaded):
    assert loaded("tools", '[tools]\nfunctions = ["nowhere.f"]\n', f'environment.python="{sys.executable}"')


def test_a_class_that_cannot_be_built(loaded):
    with pytest.raises(UserCodeError, match="no such door") as caught:
        loaded("my_own_tools.Breaks")
    assert any("my_own_tools.py" in note for note in caught.value.__notes__)
