"""Structural limits of the package. `pytest tests/test_budgets.py` prints what `retrain train` imports.

Code lines are the lines that are neither docstring, comment nor blank.
"""

import os
import subprocess
import sys
from collections import Counter

import pytest

from docs.measure import ROOT, modules

pytestmark = pytest.mark.repository

TRAIN_IMPORTS = 11_500
"""Code lines of the modules that `retrain train` imports for the quickstart."""
PACKAGE, MODULE, FUNCTION = 16, 400, 50
"""Modules of a package; code lines of a module; code lines of a function."""

TRAIN = """
import sys
from typer.testing import CliRunner
from retrain.cli.main import app

small = [
    "training.max_steps=1", "training.batch_size=2", "training.group_size=2", "training.max_tokens=8",
    "warmup.steps=1", "warmup.batch_size=1", "warmup.problems=64", "eval.problems=1", "reward_pool.workers=0",
]
sets = [word for key in small for word in ("--set", key)]
done = CliRunner().invoke(app, ["train", sys.argv[1], "--plain", *sets])
assert done.exit_code == 0, done.output
print("imported:", *(name for name in sys.modules if name.split(".")[0] == "retrain"))
"""


def test_what_training_imports_stays_small(tmp_path, capsys):
    """Train the quickstart in small in a new process and count the code lines of what it imported."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RETRAIN_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", TRAIN, str(ROOT / "configs" / "quickstart.toml")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    [imported] = (line.split()[1:] for line in done.stdout.splitlines() if line.startswith("imported:"))
    lines = {module.name: len(module.code) for module in modules()}
    size = sum(lines[name] for name in imported)
    with capsys.disabled():
        print(f"\nwhat retrain train imports: {size:,} of {TRAIN_IMPORTS:,} code lines")
    assert size <= TRAIN_IMPORTS


def test_a_package_has_few_modules():
    counts = Counter(module.file.parent.relative_to(ROOT).as_posix() for module in modules())
    assert {package: count for package, count in counts.items() if count > PACKAGE} == {}


def test_a_module_is_read_in_one_sitting():
    lengths = {module.name: len(module.code) for module in modules()}
    assert {name: length for name, length in lengths.items() if length > MODULE} == {}


def test_a_function_fits_on_a_screen():
    found = {(module.name, name): length for module in modules() for name, length in module.functions()}
    assert {place: length for place, length in found.items() if length > FUNCTION} == {}


def test_module_names_are_unique():
    names = Counter(module.file.stem for module in modules() if module.file.stem != "__init__")
    assert [name for name, count in names.items() if count > 1] == []


def test_class_and_type_alias_names_are_unique():
    names = Counter(name for module in modules() for name in module.type_names())
    assert [name for name, count in names.items() if count > 1] == []


def test_no_import_cycle():
    """Also within a package; imports inside functions and under `TYPE_CHECKING` count.

    `retrain` itself is left out: it is the public surface, whose names are loaded on first use.
    """
    graph = {module.name: module.imported_modules() - {"retrain"} for module in modules() if module.name != "retrain"}
    before = None
    while before != graph:  # drop what imports nothing that is left, and what nothing that is left imports
        before = graph
        imported = set().union(*graph.values())
        graph = {
            name: found & graph.keys() for name, found in graph.items() if found & graph.keys() and name in imported
        }
    assert graph == {}
