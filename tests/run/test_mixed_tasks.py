"""Whole runs on a mix of tasks."""

import json
import re

import pytest

from retrain.config.load import load
from retrain.report.run_page import write_report
from tests.small_runs import TOML, rows, stored

TASKS = """
tasks = [
    { name = "addition", weight = 2.0, params = { min_digits = 1, max_digits = 1 } },
    { name = "jsonl", label = "words", params = { path = "words.jsonl", heldout_fraction = 0.5 } },
]
"""


@pytest.fixture
def toml(cwd):
    pairs = [(f"{number} plus {number} =", 2 * number) for number in range(1, 31)]
    rows = [{"prompt": prompt, "answer": answer, "solution": f"so {answer}"} for prompt, answer in pairs]
    (cwd / "words.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = cwd / "run.toml"
    file.write_text(TASKS + TOML)
    return file


@pytest.mark.slow
def test_a_mix_trains_is_measured_by_parts_and_resumes_to_the_bit(resumed):
    whole = resumed("logging.rollouts_every=1", steps=2)
    answers = [one for step in range(4) for one in stored(whole, step)]
    assert {one["environment"] for one in answers} == {"addition", "words"}
    assert all(("plus" in one["prompt"]) == (one["environment"] == "words") for one in answers)
    for step, row in enumerate(rows(whole / "metrics.jsonl")):
        own = [one for one in stored(whole, step) if one["environment"] == "words"]
        assert ("task/words/reward" in row) == bool(own)
        if own:
            assert row["task/words/reward"] == pytest.approx(sum(one["reward"] for one in own) / len(own))
    last = rows(whole / "eval.jsonl")[-1]
    assert [last["problems"], last["addition/problems"], last["words/problems"]] == [6, 3, 3]
    page = write_report(whole).read_text()
    assert re.search(rf"<td>words</td>\s*<td>{100 * last['words/accuracy']:.1f}%</td>", page)
    assert "addition, jsonl" in page


def test_a_set_for_evaluation_has_its_own_task(toml):
    loaded = load(toml, ['eval.sets=[{name="chain", task="chain"}, {name="cold", temperature=0.5}]'])
    kinds = {name: {problem.environment for problem in one.task(0).heldout(4)} for name, one in loaded.sets.items()}
    assert kinds == {"chain": {""}, "cold": {"addition", "words"}}
