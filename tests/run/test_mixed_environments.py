"""Whole runs on a mix of environments."""

import re

import pytest

from retrain.config.load import load
from retrain.report.run_page import write_report
from retrain.tools.play import by_hand
from tests.small_runs import rows, stored

RUN = """
training = { max_steps = 3, batch_size = 4, group_size = 3, max_tokens = 48 }
warmup = { steps = 12, batch_size = 8, problems = 96 }
eval = { every = 0, problems = 4, greedy = false }
checkpoint = { every = 0 }
logging = { rollouts_every = 1 }
algorithm = { transform_mode = "turn_returns" }
environment = { max_turns = 4, turn_tokens = 12 }
[[environments]]
name = "guess"
task = "numbers"
weight = 2.0
params = { guesses = 4, top = 15 }
task_params = { top = 15 }
[[environments]]
name = "calculator"
label = "sums"
task = "sums"
"""


@pytest.mark.slow
def test_a_mix_trains_is_measured_by_parts_and_resumes_to_the_bit(resumed):
    whole = resumed(steps=2)
    episodes = [one for step in range(3) for one in stored(whole, step)]
    assert {one["environment"] for one in episodes} == {"guess", "sums"}
    assert all(one["problem_id"].startswith(f"{one['environment']}/") for one in episodes)
    assert all(
        ("found" in one["parts"]) == (one["environment"] == "guess") for one in episodes if one["ended"] == "done"
    )
    for number, row in enumerate(rows(whole / "metrics.jsonl")):
        own = [one for one in stored(whole, number) if one["environment"] == "sums"]
        assert row.get("env/sums/episodes", 0) == len(own)
        if own:
            assert row["env/sums/turns"] == pytest.approx(sum(len(one["turns"]) for one in own) / len(own))
            assert row["env/sums/reward"] == pytest.approx(sum(one["reward"] for one in own) / len(own))
    last = rows(whole / "eval.jsonl")[-1]
    assert last["problems"] == last["guess/problems"] + last["sums/problems"]
    assert last["sums/problems"] == 2
    right = sum(last[f"{label}/accuracy"] * last[f"{label}/problems"] for label in ("guess", "sums"))
    assert last["accuracy"] == pytest.approx(right / last["problems"])
    page = write_report(whole).read_text()
    assert "<th>set</th>" in page
    assert re.search(rf"<td>sums</td>\s*<td>{100 * last['sums/accuracy']:.1f}%</td>", page)
    assert "numbers, sums" in page


def test_a_person_plays_whichever_a_problem_belongs_to(toml):
    loaded = load(toml)
    task = loaded.task(loaded.config.training.seed)
    place = {task.problem(number).environment: number for number in range(20)}
    assert next(by_hand(loaded, place["guess"], iter(["99"]))) == "0-15:"
    assert "?" in list(by_hand(loaded, place["sums"], iter(["what"])))[1]


def test_a_table_holds_for_every_entry_of_its_component(toml):
    toml.write_text(RUN.replace("guesses = 4, ", "") + "\n[guess]\nguesses = 5\n")
    bound = load(toml).all("environment")
    assert [one.params.get("guesses") for one in bound] == [5, None]
