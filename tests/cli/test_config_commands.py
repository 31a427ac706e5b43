"""`retrain validate`: every mistake with its place and a fix, all at once, and nothing heavy imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from retrain.cli.main import app

MISTAKES: list[tuple[str, str, str, tuple[str, ...]]] = [
    ("slip in a key", "[training]\nmax_stpes = 3", "2:1", ("[training] max_stpes", 'did you mean "max_steps"?')),
    ("slip in a component's key", "[gtpo]\nbta = 0.1", "2:1", ("[gtpo] bta", 'did you mean "beta"?')),
    ("slip in a name", '[algorithm]\nadvantage_mode = "gpro"', "2:1", ("gpro", 'did you mean "grpo"?')),
    ("unknown table", "[frobnicate]\nx = 1", "1:1", ("unknown table", "sections: ")),
    ("key at the top level", "lr = 1e-4", "1:1", ("lr: unknown key here", "lr belongs in [optimizer]")),
    (
        "slip in a nested table",
        "[model.lora]\nrank = 8",
        "2:1",
        ("[model.lora] rank", "write [model.lora] r = 8"),
    ),
    ("quoted number", '[training]\nbatch_size = "16"', "2:1", ("must be an integer", "write batch_size = 16")),
    ("number for a boolean", "[eval]\ngreedy = 1", "2:1", ("must be true or false", "write greedy = true")),
    ("value for a list", "[eval]\npass_at = 4\nsamples = 4", "2:1", ("must be a list", "write pass_at = [4]")),
    ("wrong item in a list", '[optimizer]\nbetas = [0.9, "x"]', "2:15", ("must be a number", "a number")),
    ("value for a table", "training = 3", "1:1", ("must be a table", "write [training]")),
    ("table for a list of tables", "[rewards]\nname = 'exact'", "1:1", ("must be a list", "write rewards = [")),
    ("negative", "[training]\nseed = -1", "2:1", ("-1 is out of range", "use a value >= 0")),
    ("out of a component's range", "[hicra]\nalpha = 3.0", "2:1", ("3.0 is out of range", "use a value <= 1")),
    ("infinity", "[kl]\nweight = inf", "2:1", ("[kl] weight: Infinity", "finite")),
    ("none of the choices", '[optimizer]\nname = "adam"', "2:1", ('did you mean "adamw"?', '"muon"')),
    ("pattern", '[training]\ndevice = "gpu"', "2:1", ("gpu", "should match")),
    ("missing key", "[[rewards]]\nweight = 1.0", "1:1", ("[[rewards]] name: is missing", "add name = ...")),
    ("same key twice", "[training]\nseed = 1\nseed = 2", "3:9", ("not valid TOML", "write each key once")),
    ("Python's True", "[eval]\ngreedy = True", "2:10", ("not valid TOML", "lower case")),
    ("alias and key", "[training]\nlr = 1.0\n[optimizer]\nlr = 2.0", "2:1", ("[optimizer] lr in line 4", "keep one")),
    ("unequal minibatches", "[training]\nminibatches = 3", "2:1", ("128 completions", "a divisor of 128")),
    (
        "tiny micro-batch",
        "[training]\nmicro_batch_tokens = 32",
        "2:1",
        ("are fewer than one completion", "at least 128"),
    ),
    ("truncated sampling", "[rollout]\ntop_p = 0.9", "2:1", ("unknown key here", "top_p belongs in [eval]")),
    ("pass@k beyond the samples", "[eval]\npass_at = [1, 8]", "2:1", ("pass@8", "use samples = 8")),
    ("no such directory", '[model]\npath = "./nowhere"', "2:1", ("there is no directory", "give a directory")),
    (
        "a file for a directory",
        '[model]\npath = "/etc/passwd"',
        "2:1",
        ('there is no directory "/etc/passwd"', "give a"),
    ),
    ("no such search path", '[plugins]\nsearch_paths = ["/nowhere"]', "2:17", ("there is no directory", "create it")),
    ("missing parameter", '[[rewards]]\nname = "format"', "1:1", ("pattern: is missing", "add pattern = ...")),
    (
        "params of a registered name",
        "[algorithm]\nadvantage_params = {a = 1}",
        "2:21",
        ("only a dotted path", "[grpo]"),
    ),
    ("broken pattern", "[[rewards]]\nname='format'\n[format]\npattern='('", "4:1", ("not a regular expression",)),
    ("no such builtin", "[model]\npath = 'builtin:huge'", "2:1", ("no builtin", "use builtin:tiny")),
    ("NUL in a path", '[logging]\ndir = "\\u0000"', "2:1", ("[logging] dir: contains a NUL", "remove it")),
    (
        "dotted path without a module",
        '[task]\nname = "no_such_file.task"',
        "2:1",
        ("no module named", "no_such_file.py"),
    ),
    (
        "dotted path without the function",
        '[task]\nname = "math.sine"',
        "2:1",
        ("has no 'sine'", 'did you mean "sin"?'),
    ),
]
"""(name, TOML, line:column, what the message must say)"""


def validate(file: Path, *options: str):
    return CliRunner().invoke(app, ["validate", str(file), *options])


@pytest.mark.parametrize(("name", "text", "place", "says"), MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_shown_with_its_place_and_a_fix(tmp_path, name, text, place, says):
    file = tmp_path / "run.toml"
    file.write_text(text)
    result = validate(file)
    assert result.exit_code == 2
    line = result.stderr.splitlines()[0]
    assert line.startswith(f"{file}:{place}: ")
    assert all(part in line for part in says), line
    assert "; " in line
    assert "Traceback" not in result.output


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("\ufeff[training]\nseed = 1\n", encoding="utf-8")
    assert validate(file).exit_code == 0


def test_all_mistakes_are_shown_at_once_in_the_order_of_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'lr = 1\n[algorithm]\nadvantage_mode = "gpro"\nfliter = "none"\n[training]\nseed = -1\nbatch_size = "x"\n'
        "[gtpo]\nbeta = -1.0\n[foo]\n"
    )
    lines = validate(file, "--set", "eval.evry=1").stderr.splitlines()
    assert [line.split(":")[1] for line in lines[1:]] == ["1", "3", "4", "6", "7", "9", "10"]
    assert lines[0].startswith("--set eval.evry=1: [eval] evry: unknown key; did you mean")


@pytest.mark.slow
def test_no_mistake_imports_torch_or_runs_a_dotted_path(tmp_path):
    for number, (_, text, _, _) in enumerate(MISTAKES):
        (tmp_path / f"{number}.toml").write_text(text)
    (tmp_path / "boom.py").write_text("raise SystemExit('imported')")
    (tmp_path / "boom.toml").write_text('[task]\nname = "boom.task"\n[training]\nseed = -1\n')
    script = (
        "import sys\nfrom pathlib import Path\nfrom retrain.config.load import load\n"
        "from retrain.errors import ConfigError\nrefused = 0\n"
        "for file in Path('.').glob('*.toml'):\n"
        "    try:\n        load(file)\n    except ConfigError:\n        refused += 1\n"
        "print(refused, 'torch' in sys.modules, 'transformers' in sys.modules, 'boom' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.split() == [str(len(MISTAKES) + 1), "False", "False", "False"], result.stderr


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("training.lr", "the value is missing"),
        ("training.max_stpes=3", 'did you mean "max_steps"?'),
        ("training.seed=-1", "out of range"),
        ("rewards.5.weight=1", "not one of its indices"),
        ("model.path.deeper=1", "is not a table"),
    ],
)
def test_a_mistake_in_an_override_names_the_flag(tmp_path, override, says):
    file = tmp_path / "run.toml"
    file.write_text('[model]\npath = "builtin:tiny"\n[[rewards]]\nname = "exact"\n')
    result = validate(file, "--set", override)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"--set {override}: ")
    assert says in result.stderr


def test_a_plugin_that_raises_is_shown_with_its_traceback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raises_on_import.py").write_text("x = 1\nx / 0\n")
    (tmp_path / "run.toml").write_text('[algorithm]\nadvantage_mode = "raises_on_import.fn"\n')
    result = validate(Path("run.toml"))
    assert result.exit_code == 2
    first, *trace = result.stderr.splitlines()
    assert first.startswith("run.toml:2:1: [algorithm] advantage_mode: importing raises_on_import raised ZeroDivision")
    assert any("x / 0" in line for line in trace)


def test_a_plugin_with_the_wrong_signature_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong_signature.py").write_text("def fn(a, b, c):\n    return []\n")
    (tmp_path / "run.toml").write_text('[algorithm]\nadvantage_mode = "wrong_signature.fn"\n')
    result = validate(Path("run.toml"))
    assert result.exit_code == 2
    assert "takes (a, b, c); a plain function here is called as (rewards)" in result.stderr


def test_json_lists_problems(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[training]\nmax_stpes = 3\n")
    result = validate(file, "--json")
    assert result.exit_code == 2
    (problem,) = json.loads(result.stdout)["problems"]
    assert (problem["line"], problem["column"], problem["key"]) == (2, 1, "[training] max_stpes")


def test_json_of_a_valid_file_lists_warnings(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[algorithm]\nalgorithm_mode = "dapo"\n[ppo_clip]\neps_high = 0.3\n')
    result = validate(file, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["valid"]
    assert report["warnings"][0]["key"] == "[ppo_clip] eps_high"


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (None, "No such file"),
        (b"[training]\nx = '\xff'\n", ":2:1: file: not UTF-8 text; save the file as UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path, write, says):
    file = tmp_path / "run.toml"
    if write is not None:
        file.write_bytes(write)
    result = validate(file)
    assert result.exit_code == 2
    assert says in result.stderr
