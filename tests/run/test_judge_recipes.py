"""The recipes of judges: valid, and able to train against a judge that answers by plan."""

import gzip
import hashlib
import json
import math
import re
from itertools import groupby
from pathlib import Path

import pytest

from retrain.config.load import load
from retrain.run.session import Resume, run
from tests.judge_server import Server

ROOT = Path(__file__).parents[2]
SHORT = """
model.path=builtin:tiny training.max_steps=1 training.batch_size=2 training.group_size=4 training.max_tokens=12
training.threads=1 warmup.steps=0 eval.problems=0
""".split()  # noqa: SIM905
WEIGHTS = ("length", "language", "content", "tone")


@pytest.fixture(autouse=True)
def root(monkeypatch):
    monkeypatch.chdir(ROOT)


def trained(name, table, judge, folder, *more):
    """(rows of metrics, stored rollouts, questions) of a short run of a recipe."""
    with Server(judge) as server:
        there = [f'logging.dir="{folder}"', f'{table}.base_url="{server.url}"']
        loaded = load(f"configs/rewards/{name}.toml", [*SHORT, *there, *more])
        done = run(loaded, Resume(), lambda event, details: None)
        questions = server.questions
    metrics = [json.loads(line) for line in (done / "metrics.jsonl").read_text().splitlines()]
    with gzip.open(done / "rollouts" / "step-000000.jsonl.gz", "rt") as file:
        return metrics, [json.loads(line) for line in file], questions


@pytest.mark.parametrize("name", ["rubric", "judge_group"])
def test_a_recipe_is_valid(name):
    assert load(f"configs/rewards/{name}.toml", SHORT).warnings == ()


def by_hash(question):
    """A score from 0 to 10 that differs between completions and criteria."""
    return f"Score: {hashlib.sha256(question.encode()).digest()[0] % 11}"


@pytest.mark.slow
def test_each_criterion_is_a_reward_of_its_own(tmp_path):
    metrics, rollouts, questions = trained("rubric", "judge", by_hash, tmp_path)
    parts = [{name.removeprefix("judge/"): one for name, one in row["parts"].items()} for row in rollouts]
    [step] = [row for row in metrics if "reward/mean" in row]
    for name in WEIGHTS:
        known = [row[name] for row in parts if name in row]
        assert step[f"reward/judge/{name}"] == pytest.approx(math.fsum(known) / len(known))
    assert any(value for row in rollouts for value in row["advantages"])
    readers = {json.loads(line)["reader"] for line in Path("configs/data/messages.jsonl").read_text().splitlines()}
    assert all(any(f"read by {one}.\n" in question for one in readers) for question in questions)


def places_of(rollouts):
    """Indices of the rollouts of each group."""
    return [[*places] for _, places in groupby(range(len(rollouts)), lambda place: rollouts[place]["group"])]


def longest_first(texts):
    return sorted(texts, key=lambda text: (-len(text), text))


def by_length(question):
    marks = {text: mark for mark, text in re.findall(r"\[answer (\w+)\]\n(.*?)\n\[end of", question, re.DOTALL)}
    return "Ranking: " + " > ".join(marks[text] for text in longest_first(marks))


@pytest.mark.slow
def test_a_group_is_ranked_by_one_request(tmp_path):
    _, rollouts, questions = trained("judge_group", "judge_group", by_length, tmp_path)
    groups = places_of(rollouts)
    assert len(questions) == len(groups) == 2
    for places in groups:
        ranked = longest_first({rollouts[k]["text"] for k in places})
        assert len(ranked) > 1
        for row in (rollouts[k] for k in places):
            assert row["reward"] == pytest.approx(1 - ranked.index(row["text"]) / (len(ranked) - 1))
