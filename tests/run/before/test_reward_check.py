"""`retrain reward check`: what rewards pay for right, wrong and cheating completions."""

import re
from pathlib import Path

import pytest

from retrain.config.load import load
from retrain.run.before import reward_check
from retrain.run.before.reward_check import FORMS, as_table, paid
from retrain.types import Problem
from tests.commands import invoke

SUM = Problem("1", "What is 1200 + 34?", "1234", solution="1200 + 34 = 1234\nso 1234")
BUILT_IN = """
reward_pool = { workers = 0 }
rewards = [
    { name = "number" },
    { name = "boxed_math", params = { equivalence = "simple" } },
    { name = "exact" },
    { name = "format", params = { pattern = "<think>.*</think>" } },
    { name = "overlong" },
]
"""
HOLE = """
def echo(completion: str, answer: str, prompt: str) -> float:
    return float(answer in completion.split() or prompt in completion)
"""


@pytest.fixture
def check(tmp_path):
    def go(text, *options):
        (tmp_path / "run.toml").write_text(text)
        return invoke("reward", "check", str(tmp_path / "run.toml"), *options)

    return go


def built_in(tmp_path):
    (tmp_path / "run.toml").write_text(BUILT_IN)
    loaded = load(tmp_path / "run.toml")
    return loaded, paid(loaded, [SUM])


def test_the_table_of_the_built_in_rewards(tmp_path):
    loaded, found = built_in(tmp_path)
    table = as_table(loaded, found)
    lines = [
        f"| {' | '.join(row[:-1])} |" for row in (table.columns, *table.rows)
    ]  # it counts as the first reward says
    text = Path(__file__).with_name("built_in_rewards.md").read_text()
    assert "\n".join([lines[0], "|---" * (len(table.columns) - 1) + "|", *lines[1:]]) in text


def test_what_the_built_in_rewards_promise(tmp_path):
    _, found = built_in(tmp_path)
    assert [one.form for one in found] == [*FORMS]
    wrong = {one.form.name: one.values for one in found if one.form.right is False}
    for name in ("number", "boxed_math", "exact"):
        assert [form for form, values in wrong.items() if values[name]] == (["negated"] if name == "number" else [])
    right = {one.form.name: one.values for one in found if one.form.right}
    assert [form for form, values in right.items() if not values["number"]] == ["before reasoning"]


def test_a_hole_is_found(check, cwd):
    (cwd / "echo_reward.py").write_text(HOLE)
    text = '[reward_pool]\nworkers = 0\n[[rewards]]\nname = "echo_reward.echo"\n'
    done = check(text, "--rows", "3")
    assert done.exit_code == 1
    assert "! wrong, and counts as right: the prompt (100%)" in done.output
    allowed = check(text, "--rows", "3", "--allow", "the prompt")
    assert (allowed.exit_code, allowed.output) == (0, done.output)
    assert check(text, "--allow", "prompt").exit_code == 2


def test_a_wrong_answer_that_is_paid_less_than_a_right_one_is_marked(check, cwd):
    (cwd / "generous.py").write_text(
        "def generous(completion: str, answer: str) -> float:\n    return 1.0 if answer in completion else 0.2\n"
    )
    done = check('[reward_pool]\nworkers = 0\n[[rewards]]\nname = "generous.generous"\n', "--rows", "2")
    assert re.search(r"wrong alone +wrong +0\.2 \+ +0%", done.output)
    assert re.search(r"\nalone +right +1 +100%", done.output)
    assert "+ wrong, and paid more than the lowest value and 0" in done.output


def test_a_reward_that_fails(check, cwd):
    code = "def long(completion):\n    return 1 / (len(completion) > LENGTH) - 1\n"
    for name, length in (("failing_always", 10**6), ("failing_once", 0)):
        (cwd / f"{name}.py").write_text(code.replace("LENGTH", str(length)))
    text = '[reward_pool]\nworkers = 0\n[[rewards]]\nname = "NAME.long"\n'
    done = check(text.replace("NAME", "failing_always"), "--rows", "1")
    assert done.exit_code == 1
    assert re.search(r"could not be scored: (\d+) of \1 completions", done.output)
    done = check(text.replace("NAME", "failing_once"), "--rows", "1")  # only on the empty completion
    assert done.exit_code == 0
    assert re.search(r"could not be scored: 1 of \d\d completions", done.output)


def test_other_answers_than_numbers(tmp_path):
    loaded, _ = built_in(tmp_path)
    found = {one.form.name: one.values for one in paid(loaded, [Problem("1", "Capital of France?", "Paris")])}
    assert "with thousands separators" not in found
    assert "worked solution" not in found
    assert (found["boxed"]["boxed_math"], found["wrong boxed"]["boxed_math"]) == (1, 0)
    assert found["boxed"]["number"] is None  # it refuses this answer


def test_nothing_to_compare_with(check, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "a {n}"}}\n' for n in range(40)))
    data = f'[task]\nname = "jsonl"\n[jsonl]\npath = "{tmp_path}/rows.jsonl"\nanswer_field = ""\n[warmup]\nsteps = 0\n'
    done = check(data + '[[rewards]]\nname = "overlong"\n')
    assert done.exit_code == 3
    assert "no problem has an answer" in done.output
    played = check('[task]\nname = "sums"\n[environment]\nname = "calculator"\n')
    assert played.exit_code == 2
    assert "the environment rewards this run" in played.output


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        ("34", "37"),
        ("-3", "0"),
        ("1,200", "1203"),
        ("2.5", "5.5"),
        ("inf", "infx"),
        ("nan", "nanx"),
        ("123456789012345678", "123456789012345678x"),
        ("1.5e20", "1.5e20x"),
        ("Paris", "Parisx"),
    ],
)
def test_a_wrong_answer_is_another_one(answer, wrong):
    assert reward_check._other(answer) == wrong
