"""Templates and recipes for a newcomer, and what Ctrl-C leaves."""

import shlex
import tomllib
import zipfile
from pathlib import Path

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
