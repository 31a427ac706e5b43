"""reasoning-gym tasks: the allowlist, disjoint splits, and scorers that cannot be fooled or run code."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import get_args

import pytest

from retrain.config.load import load
from retrain.data.gym import Dataset, Gym, GymReward
from retrain.errors import ComponentError, ConfigError
from retrain.registry import ParameterError, find
from retrain.rewards.pool import RewardPool
from retrain.run.before.data_checks import check_data
from tests.forks import run_command

pytest.importorskip("reasoning_gym", reason="it needs a C compiler to install")
warnings.filterwarnings("ignore", module="reasoning_gym")

BANNED = (
    *("countdown", "puzzle24", "binary_matrix", "n_queens", "spiral_matrix"),
    *("string_insertion", "polynomial_multiplication", "simple_integration", "intermediate_integration", "codeio"),
)
JUNK = ["", "-7.5", "asdf", "None", "[]", "the answer", "0 0 0", "()"]


def as_dict(problem):
    return {"id": problem.id, "prompt": problem.prompt, "answer": problem.answer, "extra": problem.extra}


@pytest.mark.parametrize("name", get_args(Dataset))
def test_every_listed_data_set(name, tmp_path):
    task, score = Gym(1, name=name), GymReward()
    problems, held = [task.problem(i) for i in range(3)], task.heldout(3)
    again = Gym(1, name=name)
    assert [again.problem(i) for i in (2, 0, 1)] == [problems[i] for i in (2, 0, 1)]
    assert Gym(2, name=name).heldout(3) == held
    assert {p.prompt for p in problems}.isdisjoint({p.prompt for p in held})
    canary = tmp_path / "canary"
    payloads = [f"__import__('os').system('touch {canary}')", f"[open({str(canary)!r}, 'w')]"]
    for problem in problems:
        assert score(f"thinking <answer>\n{problem.answer}\n</answer> done", as_dict(problem)) == 1.0
        for junk in JUNK + payloads:
            assert score(f"<answer>{junk}</answer>", as_dict(problem)) == 0.0
    assert not canary.exists()


def test_banned_data_sets_are_refused_everywhere():
    assert not set(BANNED) & set(get_args(Dataset))
    for name in BANNED:
        with pytest.raises(ParameterError, match="name: Input should be"):
            find("task", "gym").bind({"name": name})
        with pytest.raises(ComponentError, match="is not allowed"):
            Gym(0, name=name)
        with pytest.raises(ComponentError, match="is not allowed"):
            GymReward()("1", {"extra": {"dataset": name, "entry": {}}})


@pytest.mark.slow
def test_problems_do_not_depend_on_the_process():
    script = "from retrain.data.gym import *\nfor n in get_args(Dataset): print(n, Gym(1, name=n).problem(0).prompt)"
    outputs = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


@pytest.mark.slow
def test_scored_inside_the_pool():
    task = (
        find("task", "gym")
        .bind({"name": "chain_sum", "config": {"max_terms": 2}, "instruction": ""})
        .build({"seed": 3})
    )
    problems = [task.problem(i) for i in range(8)]
    reward = find("reward", "gym").bind({})
    texts = [p.answer if i % 2 else "so 0.5" for i, p in enumerate(problems)]
    with RewardPool([(reward, 1.0)]) as pool:
        scores = pool.score([{"completion": t, "problem": as_dict(p)} for t, p in zip(texts, problems, strict=True)])
    assert [s.value for s in scores] == [0.0, 1.0] * 4


def test_partial_credit_only_on_request():
    problem = as_dict(Gym(0, name="gcd").problem(0))
    hedged = f"<answer>{problem['answer']} or so</answer>"
    assert GymReward()(hedged, problem) == 0.0
    assert 0.0 < GymReward(partial=True)(hedged, problem) < 1.0


@pytest.mark.parametrize(
    ("answer", "completion", "value"),
    [
        ("number", "{} is the sum of these numbers.", 1.0),
        ("number", "First 7, then: the answer is **{}**.", 1.0),
        ("number", "{} or 7", 0.0),
        ("number", "I do not know.", 0.0),
        ("Answer: (.*)", "Answer: 7\nAnswer: {}\nbye", 1.0),
        ("Answer: (.*)", "{}", 0.0),
        ("tag", "{} is the sum", 0.0),
    ],
)
def test_where_the_answer_is_looked_for(answer, completion, value):
    problem = as_dict(Gym(0, name="chain_sum").problem(0))
    assert problem["answer"] != "7"
    assert GymReward(answer=answer)(completion.format(problem["answer"]), problem) == value


@pytest.mark.slow
@pytest.mark.parametrize("config", ["max_terms = 1000000000", "max_digits = 1000000000"])
def test_a_config_whose_problems_take_too_long_is_refused(config, tmp_path):
    text = f'[task]\nname = "gym"\n[gym]\nname = "chain_sum"\nconfig = {{ {config} }}\n[[rewards]]\nname = "gym"\n'
    file = tmp_path / "run.toml"
    file.write_text(f"{text}[warmup]\nsteps = 0\n")
    found = run_command("validate", file, code=2)
    assert "takes more than 0.5 s for 4 problems of this config; choose smaller numbers" in found.stderr


RUN = """
[task]
name = "gym"
[gym]
name = "chain_sum"
config = {config}
[[rewards]]
name = "gym"
params = {{ answer = "{answer}" }}
"""


@pytest.mark.parametrize(
    ("config", "answer", "message"),
    [
        ("{ min_term = 2 }", "tag", "run.toml:3:1: [task] name: [gym] chain_sum rejects its config: "),
        ("{ seed = 2, size = 3 }", "tag", "run.toml:6:1: [gym] config: the task itself sets seed and size; remove it"),
        (
            "{ min_terms = 2 }",
            "numbr",
            'run.toml:9:12: [[rewards.params]] answer: "numbr": it has no group; use "tag"',
        ),
    ],
)
def test_validate_says_where_a_mistake_is(config, answer, message, cwd):
    file = Path("run.toml")
    file.write_text(RUN.format(config=config, answer=answer))
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_data(load(file))
