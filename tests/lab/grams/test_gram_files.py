import gzip
import json
import re

import pytest

from retrain.algorithms.planning.gram_pattern import read_grams
from retrain.errors import DataError
from retrain.lab.grams import gram_files as grams
from retrain.lab.grams.gram_extraction import Recipe, extract
from retrain.lab.grams.gram_files import Files, SolutionFormat, coverage, solutions_in, task_solutions
from retrain.types import Problem
from tests.small_runs import rows as metric_rows


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_solutions(files, reading):
    return solutions_in(Files(files).rows(), reading, str(Files(files)))


def test_successful_solutions_of_files(tmp_path):
    rows = [{"solution": "right", "reward": 1.0}, {"solution": "wrong", "reward": 0.5}, {"text": "free"}]
    rows.append({"text": "failed", "reward": None})
    file = jsonl(tmp_path / "a.jsonl", rows)
    assert read_solutions([file], SolutionFormat()) == ["right", "free"]
    assert read_solutions([file, file], SolutionFormat())[2:] == ["right", "free"]
    graded = jsonl(tmp_path / "b.jsonl", [{"s": "half", "score": 0.5}, {"s": "none", "score": 0}])
    assert read_solutions([graded], SolutionFormat("s", "score", 0.5)) == ["half"]


@pytest.mark.parametrize(
    ("row", "reading", "says"),
    [
        ({"prompt": "x"}, SolutionFormat(), 'a.jsonl:1: no text in column "solution"; it has prompt'),
        ({"solution": "x"}, SolutionFormat(min_reward=1), 'no column "reward".*--reward-column'),
        ({"solution": "x", "reward": 0}, SolutionFormat(), "none of 1 rows"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, row, reading, says):
    with pytest.raises(DataError, match=says):
        read_solutions([jsonl(tmp_path / "a.jsonl", [row])], reading)


def test_worked_solutions_of_a_task_are_right():
    solutions = task_solutions("addition", 40, 0)
    assert len(solutions) == 40
    for text in solutions:
        assert re.search(r"so (\d+)$", text)
    with pytest.raises(DataError, match="0 correct solutions"):
        task_solutions("tests.lab.grams.test_gram_files.Silent", 2, 0)


class Silent:
    """A task without worked solutions."""

    def __init__(self, seed):
        pass

    def problem(self, index):
        return Problem(str(index), "1 + 1", "2")

    def heldout(self, count):
        return [self.problem(index) for index in range(count)]


def test_coverage_counts_words_and_solutions_as_training_matches_them():
    texts = ["Wait, let me add 3 and 4", "nothing here", "so 7"]
    assert coverage(["wait let me"], texts) == {"words": 3 / 11, "solutions": 1 / 3}
    assert coverage(["x"], []) == {"words": 0, "solutions": 0}


@pytest.mark.slow
def test_a_run_trains_on_what_was_extracted_from_rollouts_of_another(train, tmp_path):
    first = train("logging.rollouts_every=1", "training.max_steps=1", "eval.problems=0", name="first")
    solutions = read_solutions([first], SolutionFormat(min_reward=-10.0))
    with gzip.open(next((first / "rollouts").glob("*.gz")), "rt") as lines:
        stored = [json.loads(line)["text"] for line in lines]
    assert set(stored) <= set(solutions)
    found = extract(task_solutions("addition", 300, 0), Recipe(top_percentile=1.0))
    written = grams.document(found, Recipe(), coverage(found.grams, solutions), ["x"])
    file = tmp_path / "grams.json"
    grams.write(file, json.dumps(written))
    assert read_grams(path=str(file)) == found.grams == ("let me check", "let me think", "wait let me redo")
    second = train(
        f'hicra.strategic_grams_path="{file}"',
        "algorithm.transform_mode=hicra",
        "warmup.steps=60",  # enough for the phrases to be learned
        "training.max_steps=1",
        "training.max_tokens=24",
        "eval.problems=0",
        name="second",
    )
    (row,) = metric_rows(second / "metrics.jsonl")
    assert row["hicra/planning_token_ratio"] > 0
    assert row["hicra/distinct_sg"] > 0


@pytest.mark.slow
def test_switched_off_metrics_are_left_out_and_the_others_stay(train):
    common = ("training.max_steps=1", "eval.problems=0", 'logging.observe=["planning_mask"]')
    (everything,) = metric_rows(train(*common, name="all") / "metrics.jsonl")
    off = ("hicra.log_semantic_entropy=false", "hicra.log_planning_token_ratio=false")
    (fewer,) = metric_rows(train(*common, *off, name="fewer") / "metrics.jsonl")
    assert set(everything) - set(fewer) == {
        "hicra/semantic_entropy",
        "hicra/semantic_entropy_norm",
        "hicra/distinct_sg",
        "hicra/planning_token_ratio",
    }


@pytest.mark.parametrize("detector", ["semantic", "planning_file_of_mine.fn"])
def test_other_detectors_train(train, tmp_path, detector):
    (tmp_path / "planning_file_of_mine.py").write_text(
        "def fn(texts):\n    return [[(0, 1)] * (t != '') for t in texts]\n"
    )
    own = (f"planning.detector={detector}", f'plugins.search_paths=["{tmp_path}"]', "algorithm.transform_mode=hicra")
    rows = metric_rows(train(*own, "training.max_steps=2", "eval.problems=0") / "metrics.jsonl")
    assert all("hicra/planning_token_ratio" in row for row in rows)
    if detector != "semantic":
        assert rows[0]["hicra/planning_token_ratio"] > 0
