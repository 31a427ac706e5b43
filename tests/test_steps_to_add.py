"""How many files it takes to add something: in a copy of the package, it is added and used.

docs/architecture.md has the table.
"""

import os
import re
import shutil
import subprocess
import sys
import textwrap

import pytest

from docs.measure import ROOT

pytestmark = pytest.mark.repository

LOSS = '''
"""A loss."""

from retrain.registry import loss


@loss("plain")
def plain(logprobs, advantages):
    """Minus the weighted log-likelihood."""
    return -logprobs * advantages
'''
RULE = '''

def even_batch(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """The batch can be halved."""
    if config.training.batch_size % 2:
        yield Finding(("training", "batch_size"), "it is odd", "use an even number")
'''
ROW = """
opponent = _Kind(
    "opponent", _traits.Traits, "Who plays against the policy: `fn(step)` -> strength.", ("task", "opponent")
)
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

    def __call__(self, *arguments, code=0):
        environment = os.environ | {"PYTHONPATH": str(self.folder)}
        command = [sys.executable, "-m", "retrain", *arguments]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return done.stdout + (done.stderr if code else "")


def test_a_component_is_one_new_file_and_a_row(package):
    package.write("algorithms/losses/plain.py", LOSS)
    row = '        "plain": "retrain.algorithms.losses.plain:plain",\n'
    package.change("registry/built_in.py", '    "loss": {\n', f'    "loss": {{\n{row}')
    assert "plain" in package("plugins", "loss")
    assert len(package.touched) == 2


def test_the_example_of_the_contributors_guide_runs(package):
    guide = (ROOT / "CONTRIBUTING.md").read_text().split("## Adding an advantage")[1]
    code, test, toml = (textwrap.dedent(one) for one in re.findall(r"    ```\w+\n(.*?)    ```", guide, re.DOTALL)[:3])
    package.write("algorithms/median.py", code)
    (package.folder / "run.toml").write_text(toml)
    [row] = re.findall(r'`("median": "[^`]*)`', guide)
    package.change("registry/built_in.py", '    "advantage": {\n', f'    "advantage": {{\n        {row}\n')
    assert "median" in package("plugins", "advantage")
    package("validate", "run.toml")
    (package.folder / "test_median.py").write_text(test)
    environment = os.environ | {"PYTHONPATH": str(package.folder)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_median.py"]
    done = subprocess.run(command, cwd=package.folder, env=environment, capture_output=True, text=True)
    assert "1 passed" in done.stdout, done.stdout


def test_a_rule_is_a_function_and_its_name_in_the_list_of_its_section(package):
    package.write("config/rules/section_rules.py", RULE)
    package.change("config/rules/__init__.py", "(sections.minibatches,", "(sections.even_batch, sections.minibatches,")
    (package.folder / "odd.toml").write_text("[training]\nbatch_size = 3\n")
    found = package("validate", "odd.toml", code=2)
    assert "odd.toml:2" in found
    assert "use an even number" in found
    assert len(package.touched) == 2


def test_a_kind_is_one_row_and_its_first_component_another(package):
    package.write("registry/kinds.py", ROW)
    package.write("data/opponent.py", OF_THAT_KIND)
    row = '    "opponent": {"rising": "retrain.data.opponent:rising"},\n'
    package.change("registry/built_in.py", '    "tracker": {\n', row + '    "tracker": {\n')
    assert "rising" in package("plugins", "opponent")
    assert len(package.touched) == 3


def test_a_command_is_a_function_and_a_row(package):
    package.write("cli/hello_command.py", COMMAND)
    row = '    "hello": ("retrain.cli.hello_command:hello", "Greet somebody."),\n'
    package.change("cli/main.py", '    "init": (', row + '    "init": (')
    assert "Greet somebody." in package("--help")
    assert package("hello", "world") == "hello world\n"
    assert len(package.touched) == 2
