"""The example trains, and uses nothing of the package but its public names."""

import ast
import runpy

import pytest

import retrain
from docs.measure import ROOT

FILE = ROOT / "examples" / "one_file_grpo.py"


@pytest.mark.slow
def test_it_learns_to_repeat_the_digit(capsys):
    rewards = runpy.run_path(str(FILE))["main"](steps=20)
    assert rewards[0] < 0.05
    assert min(rewards[-5:]) > 0.3
    assert "step  10  mean reward" in capsys.readouterr().out


def test_it_is_short_and_imports_public_names_alone():
    source = FILE.read_text()
    assert len(source.splitlines()) <= 200
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom | ast.Import)]
    named = {alias.name for node in imports if getattr(node, "module", None) == "retrain" for alias in node.names}
    modules = {getattr(node, "module", None) or node.names[0].name for node in imports}
    assert modules == {"__future__", "random", "torch", "retrain"}
    assert all(hasattr(retrain, name) for name in named)
