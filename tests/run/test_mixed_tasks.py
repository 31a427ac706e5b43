"""Whole runs on a mix of tasks."""

import json
import re

import pytest

from retrain.config.load import load
from retrain.errors import ConfigError
from retrain.report.run_page import write_report
from retrain.run.session import Resume
from tests.run.test_environment_runs import stored
from tests.small_runs import TOML, digest, rows

TASKS = """
[[tasks]]
name = "addition"
weight = 2.0
params = { min_digits = 1, max_digits = 1 }

[[tasks]]
name = "jsonl"
label = "words"
params = { path = "words.jsonl", heldout_fraction = 0.5 }
"""


@pytest.fixture
def toml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pairs = [(f"{number} plus {number} =", 2 * number) for number in range(1, 31)]
    rows = [{"prompt": prompt, "answer": answer, "solution": f"so {answer}"} for prompt, answer in pairs]
    (tmp_path / "words.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = tmp_path / "run.toml"
    file.write_text(TASKS + TOML)
    return file


@pytest.mark.slow
def test_a_mix_trains_is_measured_by_parts_and_resumes_to_the_bit(train, stopped):
    options = ("logging.rollouts_every=1",)
    whole = train(*options, name="whole")
    stopped(*options, name="cut", steps=2)
    cut = train(*options, name="cut", resume=Resume("auto"))
    assert digest(cut) == digest(whole)
    for file in ("metrics.jsonl", "eval.jsonl"):
        assert rows(cut / file) == rows(whole / file)
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (['tasks.0.name="additoin"'], 'no task named "additoin"; did you mean "addition"'),
        (['environment.name="guess"'], r"\[\[tasks\]\] have no environment"),
        (['checkpoint.best="eval/word/accuracy"'], 'did you mean "eval/words/accuracy"'),
    ],
)
def test_mistakes_are_found_at_load(toml, settings, message):
    with pytest.raises(ConfigError, match=message):
        load(toml, settings)


def test_a_set_for_evaluation_has_its_own_task(toml):
    loaded = load(toml, ['eval.sets=[{name="chain", task="chain"}, {name="cold", temperature=0.5}]'])
    kinds = {name: {problem.environment for problem in one.task(0).heldout(4)} for name, one in loaded.sets.items()}
    assert kinds == {"chain": {""}, "cold": {"addition", "words"}}
