"""The sizes that keep the house livable. `pytest tests/test_budgets.py` prints the table.

Lines are those that are neither docstring, comment nor blank. A feature that needs to break a budget changes it here,
in a commit that says why.
"""

import os
import subprocess
import sys
from collections import Counter

import pytest

from docs.measure import ROOT, lines_of_rooms, modules

BUDGETS = {
    "package": 23_191,
    "what retrain train imports": 11_140,
    "with all that a run may name": 14_369,
    "campaign": 2_817,
    "tools": 2_014,
    "report": 598,
}
ROOM, MODULE, FUNCTION = 16, 400, 50
"""Modules of a room; lines of a module, docstrings and comments included; code lines of a function."""
COMMENTS = {"training": 2.5, "engines": 2.5, "storage": 3.0}
"""Comments per 100 code lines, at least."""

TRAIN = """
import importlib, sys
from typer.testing import CliRunner
from docs.measure import modules
from retrain.cli.main import app

def imported():
    print("imported:", *(name for name in sys.modules if name.split(".")[0] == "retrain"))

small = [
    "training.max_steps=1", "training.batch_size=2", "training.group_size=2", "training.max_tokens=8",
    "warmup.steps=1", "warmup.batch_size=1", "warmup.problems=64", "eval.problems=1", "reward_pool.workers=0",
]
sets = [word for key in small for word in ("--set", key)]
done = CliRunner().invoke(app, ["train", sys.argv[1], "--plain", *sets])
assert done.exit_code == 0, done.output
imported()
from retrain.registry import KINDS, components

for kind in KINDS:
    if kind != "executor":
        components(kind)
for module in modules():
    if module.room == "engines":
        importlib.import_module(module.name)
imported()
"""


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    """What there is of each budget; the quickstart, really trained in small, says what training imports."""
    folder = tmp_path_factory.mktemp("train")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RETRAIN_CACHE": str(folder / "cache")}
    command = [sys.executable, "-c", TRAIN, str(ROOT / "configs" / "quickstart.toml")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    train, all_of_a_run = ([*line.split()[1:]] for line in done.stdout.splitlines() if line.startswith("imported:"))
    lines = {module.name: len(module.code) for module in modules()}
    rooms = lines_of_rooms()
    return {
        "package": sum(lines.values()),
        "what retrain train imports": sum(lines[name] for name in train),
        "with all that a run may name": sum(lines[name] for name in all_of_a_run),
        **{room: rooms[room] for room in ("campaign", "tools", "report")},
    }


def test_code_stays_within_its_budgets(sizes, capsys):
    with capsys.disabled():
        print("\n" + "\n".join(f"{name:<30}{sizes[name]:>8,} of {most:>7,}" for name, most in BUDGETS.items()))
    assert {name: size for name, size in sizes.items() if size > BUDGETS[name]} == {}


def test_a_room_has_few_modules():
    rooms = Counter(module.file.parent.relative_to(ROOT).as_posix() for module in modules())
    assert {room: count for room, count in rooms.items() if count > ROOM} == {}


def test_a_module_is_read_in_one_sitting():
    lengths = {module.name: len(module.file.read_text().splitlines()) for module in modules()}
    assert {name: length for name, length in lengths.items() if length > MODULE} == {}


def test_a_function_fits_on_a_screen():
    found = {(module.name, name): length for module in modules() for name, length in module.functions()}
    assert {place: length for place, length in found.items() if length > FUNCTION} == {}


def test_a_name_says_which_module_is_meant():
    names = Counter(module.file.stem for module in modules() if module.file.stem != "__init__")
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("room", COMMENTS)
def test_comments_say_why_where_code_cannot(room):
    here = [module for module in modules() if module.room == room]
    density = 100 * sum(module.comments for module in here) / sum(len(module.code) for module in here)
    assert density >= COMMENTS[room], f"{density:.2f} comments per 100 code lines"
