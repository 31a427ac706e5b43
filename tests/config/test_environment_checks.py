"""What `[environment]` names must be there: paths of tools and of other libraries' classes, and the interpreter."""

import sys

import pytest

from retrain.config.load import load
from retrain.errors import ConfigError, UserCodeError
from retrain.run.before.data_checks import check_data
from retrain.system.bubblewrap import missing

HEAD = '[task]\nname = "sums"\n[environment]\nname = "{}"\n'
MINE = """
from retrain.environments.tools import python


def area(width: int):
    return width

def only(width, /):
    return width

def unknown(width: "Nowhere"):
    return width

class Breaks:
    def __init__(self):
        raise ValueError("no such door")

    def __call__(self, answer):
        yield None

three = 3
"""


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_tools.py").write_text(MINE)

    def go(name, text="", *overrides):
        (tmp_path / "run.toml").write_text(HEAD.format(name) + text)
        return load("run.toml", [f'plugins.search_paths=["{tmp_path}"]', *overrides])

    return go


@pytest.mark.parametrize(
    ("name", "table", "key", "problem", "fix"),
    [
        ("tools", 'functions = ["no_such_package.f"]', "[tools] functions", "no module named", "search_paths"),
        ("tools", 'functions = ["my_own_tools.aera"]', "[tools] functions", "has no 'aera'", '"area"'),
        ("tools", 'functions = ["my_own_tools.only"]', "[tools] functions", "cannot be given by name", "wrap"),
        ("tools", 'functions = ["my_own_tools.area"]\nparser = "hermez"', "[tools] parser", "hermez", '"hermes"'),
        ("openenv", 'env_class = "my_own_tools.area"\naction = "a.b"', "[openenv] action", "no module", "search_paths"),
    ],
)
def test_a_path_that_names_nothing_usable(loaded, name, table, key, problem, fix):
    with pytest.raises(ConfigError, match=r"run\.toml:") as caught:
        loaded(name, f"[{name}]\n{table}\n")
    (found,) = caught.value.problems
    assert found.line == 6 + table.count("\n")
    assert found.key.startswith(key)
    assert problem in found.problem
    assert fix in found.fix


def test_every_path_and_every_entry_is_looked_at(loaded):
    with pytest.raises(ConfigError, match=r"run\.toml:") as caught:
        loaded("tools", '[tools]\nfunctions = ["my_own_tools.area", "my_own_tools:area", "nowhere.f"]\n')
    assert [one.key for one in caught.value.problems] == ["[tools] functions[1]", "[tools] functions[2]"]
    assert "two tools" in caught.value.problems[0].problem
    entry = '[[environments]]\nlabel = "{}"\nname = "tools"\ntask = "sums"\nparams = {{ functions = ["{}"] }}\n'
    mix = entry.format("a", "nowhere.f") + entry.format("b", "my_own_tools.area") + entry.format("c", "nowhere.g")
    with pytest.raises(ConfigError, match=r"run\.toml:") as caught:
        loaded("tools", mix)
    assert [one.line for one in caught.value.problems if "no module" in one.problem] == [9, 19]


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


def test_a_program_that_is_no_python(loaded):
    result = loaded("calculator", 'python = "/bin/true"\n')
    with pytest.raises(ConfigError, match=r"run\.toml:") as caught:
        check_data(result)
    (found,) = caught.value.problems
    assert (found.line, found.key) == (5, "[environment] python")
    assert "exit code 0" in found.problem
    assert "use a Python" in found.fix


def test_a_class_that_cannot_be_built(loaded):
    with pytest.raises(UserCodeError, match="no such door") as caught:
        loaded("my_own_tools.Breaks")
    assert any("my_own_tools.py" in note for note in caught.value.__notes__)
