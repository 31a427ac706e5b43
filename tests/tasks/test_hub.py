"""Hub data sets, read from a local directory of the same layout."""

import json

import pytest

from retrain.data.rows import Hub
from retrain.errors import DataError

pytest.importorskip("datasets", reason="`make test` does not install the hub's loader")


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "set"
    data.mkdir()
    for split, start in (("train", 0), ("test", 100)):
        rows = [{"prompt": f"q{start + i}", "answer": f"a{i}", "level": i} for i in range(40)]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(data)


def test_a_fraction_or_a_split_is_held_out(directory):
    by_fraction = Hub(0, name=directory, heldout_fraction=0.25)
    held = by_fraction.heldout(40)
    assert {by_fraction.problem(i).prompt for i in range(40 - len(held))} | {p.prompt for p in held} == {
        f"q{i}" for i in range(40)
    }
    by_split = Hub(0, name=directory, heldout_split="test")
    assert {p.prompt for p in by_split.heldout(99)} == {f"q{i}" for i in range(100, 140)}
    assert by_split.problem(0).id.startswith(f"{directory}/train:")
    assert by_split.problem(0).extra.keys() == {"answer", "level"}
    assert by_split.fingerprint() != by_fraction.fingerprint()
    assert by_split.fingerprint() == Hub(5, name=directory, heldout_split="test").fingerprint()


def test_bad_rows_and_bad_names(directory):
    with pytest.raises(DataError, match=r'/train:1: no field "question"; it has prompt, answer, level'):
        Hub(0, name=directory, prompt_field="question")
    with pytest.raises(DataError, match="this prompt is held out"):
        Hub(0, name=directory, heldout_split="train")
    with pytest.raises(DataError, match="split validation"):
        Hub(0, name=directory, split="validation")
    with pytest.raises(DataError, match=r"data set .*nowhere"):
        Hub(0, name=directory + "/nowhere")
