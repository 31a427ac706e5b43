import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from retrain.errors import install
from tests.cli.conftest import installed


def rows(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.slow
def test_the_installed_command_honours_the_sizes_and_repeats_itself(tmp_path):
    sizes = ["--train-size", "10", "--val-size", "5"]
    for folder in ("one", "two", "one"):
        done = installed("data", "prepare", "--out", folder, *sizes, cwd=tmp_path, code=0)
        assert f"{folder}/val.jsonl, {folder}/val.parquet: 5 rows" in done.stdout
    one, two = tmp_path / "one", tmp_path / "two"
    assert sorted(path.name for path in one.iterdir()) == ["train.jsonl", "train.parquet", "val.jsonl", "val.parquet"]
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes()
    assert (len(rows(one / "train.jsonl")), len(rows(one / "val.jsonl"))) == (10, 5)


@pytest.fixture
def prepare(cli):
    return lambda arguments: cli("data", "prepare", *arguments.split())


@pytest.fixture
def source(cwd):
    lines = [json.dumps({"question": f"q{i}", "answer": f"because\n#### {i}"}) for i in range(30)]
    (cwd / "mine.jsonl").write_text("\n".join(lines))
    return "mine.jsonl"


def test_a_file_with_fields_of_its_own(prepare, source):
    result = prepare(f"--source jsonl {source} --set jsonl.prompt_field=question --final-answer")
    assert result.exit_code == 0, result.stderr
    train, val = rows("data/processed/train.jsonl"), rows("data/processed/val.jsonl")
    assert (len(train), len(val)) == (27, 3)
    assert not {row["question"] for row in train} & {row["question"] for row in val}
    assert all(row["label"] == row["question"][1:] for row in train)
    assert train[0]["solution"] == "because"
    assert train[0]["data_source"] == source


def test_the_options_of_the_documentation_of_dca(prepare, cwd):
    result = prepare("--output_dir out --train_size 10 --val_size 5 --builtin_only")
    assert result.exit_code == 0, result.stderr
    assert len(rows("out/train.jsonl")) == 10
    assert prepare("--builtin --train-size 2 --val-size 2").exit_code == 0
    assert len(rows("data/processed/val.jsonl")) == 2


MIX = """
tasks = [
    { name = "jsonl", label = "gsm8k", params = { path = "gsm8k.jsonl", prompt_field = "question" } },
    { name = "jsonl", label = "math", weight = 2.0, params = { path = "math.jsonl", prompt_field = "problem" } },
]
[eval]
problems = 0
sets = [
    { name = "gsm8k", task = "jsonl", task_params = { path = "test.jsonl", prompt_field = "question" } },
]
"""


def test_a_mix_of_a_run_file_with_its_sets_of_held_out_problems(prepare, source, tmp_path):
    Path(source).rename("gsm8k.jsonl")
    Path("math.jsonl").write_text("".join(json.dumps({"problem": f"p{i}", "answer": f"{i}"}) + "\n" for i in range(60)))
    Path("test.jsonl").write_text(
        "".join(json.dumps({"question": f"t{i}", "answer": f"#### {i}"}) + "\n" for i in range(4))
    )
    Path("mix.toml").write_text(MIX)
    result = prepare("--source config mix.toml --final-answer --train-size 30 --val-size 4 --no-parquet")
    assert result.exit_code == 0, result.stderr
    train = rows("data/processed/train.jsonl")
    counts = Counter(row["data_source"] for row in train)
    assert counts["math"] > counts["gsm8k"] > 0
    tests = rows("data/processed/test_gsm8k.jsonl")
    assert {(row["label"], row["data_source"]) for row in tests} == {(str(n), "gsm8k") for n in range(4)}
    Path("test.jsonl").write_bytes(Path("gsm8k.jsonl").read_bytes() + Path("test.jsonl").read_bytes())
    prepare("--source config mix.toml --train-size 30 --val-size 4 --no-parquet --force")
    asked = {row["question"] for row in rows("data/processed/train.jsonl")}
    assert asked
    assert not asked & {row["question"] for row in rows("data/processed/test_gsm8k.jsonl")}


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ("--source jsonl", 2, "needs one"),
        ("--set addition.min_digit=1", 2, 'did you mean "min_digits"?'),
        ("--source jsonl mine.jsonl", 3, 'mine.jsonl:1: no field "prompt"'),
        ("--out mine.jsonl", 6, "cannot be written"),
    ],
)
def test_what_cannot_be_prepared(prepare, source, arguments, code, text):
    result = prepare(arguments)
    assert (result.exit_code, text in result.stderr) == (code, True), result.stderr
    assert not Path("data").exists()


def test_without_pyarrow_there_is_jsonl_and_a_message(prepare, source, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = prepare("--train-size 3 --val-size 2")
    assert result.exit_code == 0
    assert f"no parquet files: pyarrow is not installed; {install('parquet')}" in result.stderr
    assert sorted(path.name for path in Path("data/processed").iterdir()) == ["train.jsonl", "val.jsonl"]
