"""Templates and recipes for a newcomer, and what Ctrl-C leaves."""

import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from retrain.cli.main import app
from retrain.cli.run_commands import _how_to_continue
from retrain.config.load import load

ROOT = Path(__file__).parents[2]


def run(*words):
    return CliRunner().invoke(app, list(words))


def test_every_recipe_is_listed_with_what_it_is():
    listed = run("init", "--list").stdout.splitlines()
    names = [line.split()[0] for line in listed]
    assert {"quickstart", "jsonl", "dapo", "gpu/dapo"} <= set(names)
    assert all(len(line.split()) > 3 for line in listed)


def test_a_recipe_becomes_a_file_that_is_valid_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("init", "mine.toml", "--template", "mix").exit_code == 0
    assert load("mine.toml").config.experts[0].path
    assert "retrain train mine.toml" in Path("mine.toml").read_text()
    wrong = run("init", "other.toml", "--template", "gpu/dappo")
    assert (wrong.exit_code, 'did you mean "gpu/dapo"?' in wrong.output) == (2, True)


def test_a_built_wheel_holds_every_recipe_and_its_data(tmp_path):
    from hatchling.builders.wheel import WheelBuilder

    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path))
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if "/templates/recipes/" in name}
        recipes = {name.partition("/recipes/")[2] for name in shipped}
        assert {file.relative_to(ROOT / "configs").as_posix() for file in (ROOT / "configs").rglob("*.toml")} <= recipes
        assert any(name.startswith("data/") for name in recipes)
        for name in shipped:
            if name.endswith(".toml"):
                tomllib.loads(archive.read(name).decode())


def test_an_interrupted_run_says_where_it_is_and_how_it_continues(tmp_path):
    said = _how_to_continue(tmp_path, Path("a.toml"), (), ())
    assert "it has no checkpoint yet; start over with: retrain train a.toml --fresh" in said
    for step in (5, 10):
        (tmp_path / "checkpoints" / f"step-{step:06}").mkdir(parents=True)
    overrides = ["training.seed=1", 'jsonl.system_prompt="Be brief."']
    said = _how_to_continue(tmp_path, Path("a.toml"), overrides, ["--ranks", "2"])
    assert f"the run is in {tmp_path}; its newest checkpoint is step-000010" in said
    command = said.partition("continue with: ")[2]
    flags = ["--set", "training.seed=1", "--set", 'jsonl.system_prompt="Be brief."']
    assert shlex.split(command) == ["retrain", "train", "a.toml", *flags, "--ranks", "2", "--resume", "auto"]


@pytest.mark.parametrize("kind", ["advantage", "transform", "reward", "loss"])
def test_a_plugin_is_written_with_a_run_file_and_a_test(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"own_{kind}"
    assert run("init", "--plugin", kind, name).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.py", f"{name}.toml", f"test_{name}.py"]
    valid = run("validate", f"{name}.toml")
    assert valid.exit_code == 0, valid.output
    again = run("init", "--plugin", kind, name)
    assert (again.exit_code, "exists already" in again.output) == (2, True)


@pytest.mark.slow
def test_the_tests_of_written_plugins_pass_and_fail_for_what_is_wrong(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind in ("advantage", "transform", "reward", "loss"):
        assert run("init", "--plugin", kind, f"own_{kind}").exit_code == 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0
    (tmp_path / "own_advantage.py").write_text("def own_advantage(rewards):\n    return rewards\n")
    assert b"test_equal_rewards_teach_nothing" in subprocess.run(command, cwd=tmp_path, capture_output=True).stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--plugin", "adv", "x"], "there is no such template; use one of advantage, loss, reward, transform"),
        (["--plugin", "advantage"], "is not a name that a module of yours can have"),
        (["--plugin", "loss", "json"], "is not a name that a module of yours can have; retrain init --plugin loss my_"),
    ],
)
def test_a_plugin_needs_a_kind_and_a_name(arguments, says):
    result = run("init", *arguments)
    assert (result.exit_code, says in result.output) == (2, True), result.output
