"""`[[eval.sets]]`: several held-out sets, each with a task, rewards and settings of its own."""

import gzip
import json
import re

import pytest

from retrain.config.load import load
from retrain.functional.evaluation import mean_interval
from retrain.report.run_page import render
from tests.small_runs import rows

SETS = """
[[eval.sets]]
name = "file"
task = "jsonl"
task_params = {{ path = "{path}" }}
rewards = [{{ name = "easy.always" }}]
samples = 3
pass_at = [1, 3]
greedy = false

[[eval.sets]]
name = "cold"
problems = 4
temperature = 0.1
"""

EASY = """
def always(completion, answer):
    return 1.0 if answer == "yes" else 0.0
"""


@pytest.fixture
def sets(toml, cwd):
    """The small run with two sets: one of a file, three of whose four answers its reward takes for right."""
    (cwd / "easy.py").write_text(EASY)
    answers = ["yes", "yes", "no", "yes"]
    lines = [json.dumps({"prompt": f"{number}+1?\n", "answer": answer}) for number, answer in enumerate(answers)]
    (cwd / "rows.jsonl").write_text("\n".join(lines) + "\n")
    toml.write_text(toml.read_text() + SETS.format(path=cwd / "rows.jsonl"))
    return toml


@pytest.mark.slow
def test_each_set_is_measured_with_its_own_problems_and_rewards(sets, train, tmp_path):
    run = train("checkpoint.every=4")
    measured = rows(run / "eval.jsonl")
    assert [row["step"] for row in measured] == [0, 2, 4]
    for row in measured:
        assert (row["file/problems"], row["file/samples"], row["file/accuracy"]) == (4, 3, 0.75)
        assert (row["file/avg@3"], row["file/pass@3"]) == (0.75, 0.75)
        assert (row["file/ci_low"], row["file/ci_high"]) == mean_interval([1.0, 1.0, 0.0, 1.0])[1:]
        assert "file/greedy_accuracy" not in row
        assert (row["cold/problems"], row["cold/temperature"], row["cold/samples"]) == (4, 0.1, 1)
        assert row["problems"] == 6
    page, card = render(run), (run / "model" / "README.md").read_text()
    assert "Held-out accuracy, file" in page
    assert "<td>cold</td>" in page
    assert "By set of problems" in card
    assert "| file |" in card
    without = train("eval.sets=[]", "checkpoint.every=4", name="without")
    plain = rows(without / "eval.jsonl")
    assert [{key: row[key] for key in plain[0]} for row in measured] == plain, "sets change no other figure"


def test_truncated_sampling_holds_for_sets_as_well(toml, train):
    toml.write_text(toml.read_text() + '[[eval.sets]]\nname = "sharp"\nproblems = 4\nsamples = 3\n')
    run = train("eval.top_k=1", "training.max_steps=0")
    [row] = rows(run / "eval.jsonl")
    assert row["sharp/accuracy"] == row["sharp/greedy_accuracy"]
    with gzip.open(next((run / "eval").glob("*sharp*")), "rt") as lines:
        stored = [json.loads(line) for line in lines]
    assert [len(set(one["predictions"])) for one in stored] == [1, 1, 1, 1]
    assert [one["greedy"]["prediction"] for one in stored] == [one["predictions"][0] for one in stored]


@pytest.mark.slow
def test_without_problems_of_its_own_the_first_set_is_the_result(sets, train):
    run = train("eval.problems=0", "training.max_steps=1", "eval.every=0", "warmup.steps=1")
    assert [row["accuracy"] for row in rows(run / "eval.jsonl")] == [0.75, 0.75]


def test_a_table_that_a_set_alone_reads_is_read(sets):
    sets.write_text(re.sub('path = ".*"', 'answer_field = "answer"', sets.read_text()))
    sets.write_text(sets.read_text() + '\n[jsonl]\npath = "rows.jsonl"\nid_field = "key"\n')
    loaded = load(sets)
    assert [*loaded.sets] == ["file", "cold"]
    params = loaded.sets["file"].one("task").params
    assert (params["heldout_fraction"], params["id_field"]) == (1.0, "key")
    assert (params["path"], params["answer_field"]) == ("rows.jsonl", "answer")
    assert loaded.sets["cold"].one("task").name == "addition"
