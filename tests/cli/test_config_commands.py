"""`retrain validate`: every mistake with its place and a fix, all at once, and nothing heavy imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import invoke
from tests.config.test_mistakes import GROUPS


def validate(file: Path, *options: str, code: int | None = None):
    return invoke("validate", file, *options, code=code)


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("\ufeff[training]\nseed = 1\n", encoding="utf-8")
    assert validate(file).exit_code == 0


@pytest.mark.slow
def test_no_mistake_imports_torch_or_runs_a_dotted_path(tmp_path):
    (slips,) = [group["case"] for group in GROUPS if group["about"] == "Slips in keys and values"]
    slips = [case["toml"] for case in slips if case["toml"] and "set" not in case and "files" not in case]
    for number, text in enumerate(slips):
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
    assert result.stdout.split() == [str(len(slips) + 1), "False", "False", "False"], result.stderr


def test_a_plugin_that_raises_is_shown_with_its_traceback(cwd):
    (cwd / "raises_on_import.py").write_text("x = 1\nx / 0\n")
    (cwd / "run.toml").write_text('[algorithm]\nadvantage_mode = "raises_on_import.fn"\n')
    result = validate(Path("run.toml"), code=2)
    first, *trace = result.stderr.splitlines()
    assert first.startswith("run.toml:2:1: [algorithm] advantage_mode: importing raises_on_import raised ZeroDivision")
    assert any("x / 0" in line for line in trace)


def test_json_lists_problems(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[training]\nmax_stpes = 3\n")
    result = validate(file, "--json", code=2)
    (problem,) = json.loads(result.stdout)["problems"]
    assert (problem["line"], problem["column"], problem["key"]) == (2, 1, "[training] max_stpes")


def test_json_of_a_valid_file_lists_warnings(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[algorithm]\nalgorithm_mode = "dapo"\n[ppo_clip]\neps_high = 0.3\n')
    result = validate(file, "--json", code=0)
    report = json.loads(result.stdout)
    assert report["valid"]
    assert report["warnings"][0]["key"] == "[ppo_clip] eps_high"


@pytest.mark.parametrize(
    ("write", "says"),
    [(None, "No such file"), (b"[training]\nx = '\xff'\n", ":2:1: file: not UTF-8 text; save the file as UTF-8")],
)
def test_a_file_that_cannot_be_read(tmp_path, write, says):
    file = tmp_path / "run.toml"
    if write is not None:
        file.write_bytes(write)
    result = validate(file, code=2)
    assert says in result.stderr
