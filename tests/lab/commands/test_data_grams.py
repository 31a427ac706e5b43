import json

import pytest

TASK = ("grams", "extract", "--task", "addition", "--count", "150", "--top-percentile", "1")


def test_two_extractions_are_the_same_bytes_and_training_accepts_the_file(folder, cli):
    first = cli(*TASK, "--out", "a.json", "--plot", "a.svg", code=0)
    assert "150 solutions" in first.stdout
    assert "of the words" in first.stdout
    assert cli(*TASK, "--out", "b.json", "--plot", "b.svg").exit_code == 0
    for end in ("json", "svg"):
        assert (folder / f"a.{end}").read_bytes() == (folder / f"b.{end}").read_bytes()
    content = json.loads((folder / "a.json").read_text())
    assert "let me think" in content["strategic_grams"]
    assert content["metadata"]["solutions"] == 150
    (folder / "run.toml").write_text('[planning]\nstrategic_grams_path = "a.json"\n')
    assert cli("validate", "run.toml").exit_code == 0


@pytest.fixture
def data_set(folder, monkeypatch):
    pytest.importorskip("datasets", reason="`make test` does not install the hub's loader")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    (folder / "trl-lib" / "Maths").mkdir(parents=True)
    rows = [{"solution": f"notice that it holds. so {i}"} for i in range(6)]
    (folder / "trl-lib" / "Maths" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "trl-lib/Maths"


def test_the_command_of_the_documentation_of_hicra_works_as_it_is_printed(folder, cli, data_set):
    printed = "--output_path strategic_grams_math.json --n_min 3 --n_max 5 --n_clusters 100 --top_percentile 0.2"
    cli("grams", "extract", "--dataset_name", data_set, *printed.split(), code=0)
    written = json.loads((folder / "strategic_grams_math.json").read_text())
    assert written["strategic_grams"] == ["notice that it holds"]
    assert written["metadata"]["sources"] == [f"{data_set}/train"]
    assert written["metadata"]["recipe"]["clusters"] == 100
    same = cli("grams", "extract", "--source", "hub", data_set, "--column", "solution", "--json")
    assert json.loads(same.stdout) == written


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 2, "--task NAME"),
        (("a.jsonl", "--n-min", "4", "--n-max", "3"), 2, "above --n-max 3"),
        (("--source", "hub"), 2, "the name of one data set"),
        (("none.jsonl",), 3, "cannot be read"),
        (("--task", "addition", "--count", "20", "--embedder", "nowhere"), 2, "no directory"),
    ],
)
def test_mistakes(folder, cli, arguments, code, says):
    result = cli("grams", "extract", *arguments, code=code)
    assert says in result.stderr
