"""How many files it takes to add something: in a copy of the package, it is added and used.

docs/architecture.md has the table.
"""

import os
import shutil
import subprocess
import sys

import pytest

from docs.measure import ROOT

TRACKER = '''
"""A tracker that prints."""

from retrain.protocols import Tracker
from retrain.registry import tracker


@tracker("printed")
class Printed(Tracker):
    """Prints every row."""

    def log(self, step, metrics):
        print(step, metrics)
'''
ROW = """
opponent = _Kind("opponent", "Who plays against the policy: `fn(step)` -> strength.", ("task", "opponent"))
"""
OF_THAT_KIND = '''
"""Harder with every step."""

from retrain.registry import opponent


@opponent("rising")
def rising(step):
    """The step itself."""
    return step
'''
COMMAND = '''
"""A command."""


def hello(name: str) -> None:
    """Greet somebody."""
    print(f"hello {name}")
'''


@pytest.fixture
def package(tmp_path):
    """A copy of the package: `package(*arguments)` runs its command, `package.touched()` counts what was changed."""
    shutil.copytree(ROOT / "retrain", tmp_path / "retrain", ignore=shutil.ignore_patterns("__pycache__"))
    return Copy(tmp_path)


class Copy:
    def __init__(self, folder):
        self.folder, self.touched = folder, set()

    def write(self, name, text):
        """A new file, or more text at the end of an old one."""
        self.touched.add(name)
        with (self.folder / "retrain" / name).open("a") as file:
            file.write(text)

    def change(self, name, old, new):
        self.touched.add(name)
        file = self.folder / "retrain" / name
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))

    def __call__(self, *arguments):
        environment = os.environ | {"PYTHONPATH": str(self.folder)}
        command = [sys.executable, "-m", "retrain", *arguments]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout


def test_a_tracker_is_one_new_file(package):
    package.write("tracking/printed.py", TRACKER)
    assert "printed" in package("plugins", "tracker")
    assert len(package.touched) == 1


def test_a_kind_is_one_row_and_its_first_component(package):
    package.write("registry/kinds.py", ROW)
    package.write("data/opponent.py", OF_THAT_KIND)
    assert "rising" in package("plugins", "opponent")
    assert len(package.touched) == 2


def test_a_command_is_a_function_and_a_row(package):
    package.write("cli/hello_command.py", COMMAND)
    row = '    "hello": ("retrain.cli.hello_command:hello", "Greet somebody."),\n'
    package.change("cli/main.py", '    "init": (', row + '    "init": (')
    assert "Greet somebody." in package("--help")
    assert package("hello", "world") == "hello world\n"
    assert len(package.touched) == 2
