"""Mistakes in rubrics, in the TOML and in the rows, are found before training, each at its place."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from retrain.cli.main import app
from retrain.config.load import load
from retrain.errors import ConfigError

RUN = """
[task]
name = "jsonl"
[jsonl]
path = "rows.jsonl"
answer_field = ""
[warmup]
steps = 0
[eval]
problems = 0
[[rewards]]
name = "judge"
[judge]
base_url = "http://127.0.0.1:8000/v1"
model = "m"
"""
BASE = RUN.count("\n")
"""Lines of RUN."""
GROUP = RUN.replace("judge", "judge_group")
A, B = '{ criterion = "a", name = "a" }', '{ criterion = "b", name = "b" }'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows({"prompt": "1+1="})


def rows(*several):
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in several))


def validated(text):
    Path("run.toml").write_text(text)
    return CliRunner().invoke(app, ["validate", "run.toml"])


MISTAKES = [
    ('rubric = [{ criterion = "a", weight = 0 }]', "1:30: [[judge.rubric]] weight: 0: a weight of 0 has no effect"),
    ('rubric = ["a", 3]', "1:16: [judge] rubric[1]: must be a table, not 3; write it in braces"),
    (
        'rubric = [{ criterion = "a", name = "score" }]',
        '1:30: [[judge.rubric]] name: "score" cannot name a part of the reward; name it with letters',
    ),
    ('rubric = [{ criterion = "a", weight = -1 }]', "1:1: [judge] rubric: has no criterion with a positive weight;"),
    (f'rubric = [{A}]\nprompt = "{{completion}}"', "2:1: [judge] prompt: does not show the criterion; add {crit"),
    ("parts = { a = 1.0 }", "1:1: [judge] parts: names criteria of rubric_field, which is not set; set rubric_field"),
    (
        f'rubric_field = "r"\nparts = {{ a = 1.0 }}\nrubric = [{A}]',
        '3:30: [[judge.rubric]] name: "a" is in parts as well, which names criteria of rubric_field; give one',
    ),
]


@pytest.mark.parametrize(("text", "said"), MISTAKES, ids=[text for text, _ in MISTAKES])
def test_a_mistake_in_the_file(text, said):
    result = validated(RUN + text)
    line, _, rest = said.partition(":")
    assert result.exit_code == 2, result.output
    assert f"run.toml:{BASE + int(line)}:{rest}" in result.stderr
    assert result.stderr.count("run.toml:") == 1


ROWS = [
    ({}, 'no field "meta.rubric", the rubric_field; it has id'),
    ({"meta": {"rubric": "be good"}}, "meta.rubric: expected a list, got str"),
    ({"meta": {"rubric": [{"criterion": "b", "weight": 0}]}}, "meta.rubric[0].weight: a weight of 0 has no effect"),
    ({"meta": {"rubric": [{"criterion": "b", "weight": -1}]}}, "the rubric has no criterion with a positive weight"),
]


def test_mistakes_in_rows_have_their_lines():
    good = {"prompt": "0+0=", "id": "good", "meta": {"rubric": ["a", {"criterion": "b", "weight": -2, "name": None}]}}
    rows(good, *({"prompt": f"1+{k}=", "id": f"row {k}"} | row for k, (row, _) in enumerate(ROWS)))
    result = validated(RUN + 'rubric_field = "meta.rubric"')
    assert result.exit_code == 3, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("run.toml:12:1: [[rewards]] name: rows.jsonl:2: ")
    for number, (_, said) in enumerate(ROWS, 2):
        assert f"rows.jsonl:{number}: {said}" in line
    assert "rows.jsonl:1:" not in line
    assert 'correct these rows, or the settings of "judge"' in line


def test_names_of_a_rows_criteria_are_those_of_the_parts():
    rows(
        {"prompt": "1+1=", "r": [{"criterion": "a", "name": "facts"}]},
        {"prompt": "1+2=", "r": [{"criterion": "a", "name": "fact"}, "b"]},
        {"prompt": "1+3=", "r": ["b"]},
        {"prompt": "1+4=", "r": []},
    )
    settings = 'rubric_field = "r"\nparts = { facts = 1.0, tone = 2.0 }'
    result = validated(RUN + settings)
    assert result.exit_code == 3
    assert (
        'rows.jsonl:2: r[0] has the name "fact"; parts names facts, tone; rows.jsonl:3: r[0] has no n' in result.stderr
    )
    assert "rows.jsonl:1:" not in result.stderr
    assert "rows.jsonl:4:" not in result.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            'prompt = "{completion} {context}"',
            'rows.jsonl:2: no field "context", which prompt shows; it has prompt, ans',
        ),
        ('prompt = "{completion} {answer}"', "rows.jsonl:2: the answer is empty, and prompt shows it"),
    ],
)
def test_what_the_prompt_shows_is_in_the_rows(text, said):
    rows({"prompt": "1+1=", "answer": "2", "context": "c"}, {"prompt": "1+2=", "answer": " "})
    result = validated(RUN.replace('answer_field = ""\n', "") + text)
    assert result.exit_code == 3, result.output
    assert said in result.stderr
    assert "rows.jsonl:1:" not in result.stderr


def test_a_judge_of_groups_is_checked_likewise():
    assert "[judge_group] prompt: does not show the completions" in validated(GROUP + 'prompt = "{completion}"').stderr
    rows({"prompt": "1+1=", "r": "x"})
    assert "rows.jsonl:1: r: expected a list, got str" in validated(GROUP + 'rubric_field = "r"').stderr
    result = validated(GROUP + 'prompt = "{completions} {completion}"')
    assert (
        'rows.jsonl:1: no field "completion", which prompt shows; it has prompt, answer, completions' in result.stderr
    )


def test_what_is_right_is_valid():
    rows({"prompt": "1+1=", "r": [{"criterion": "a", "name": "facts"}], "context": 3})
    text = f'rubric_field = "r"\nparts = {{ facts = 1.0 }}\nrubric = [{A}, {B}]\n'
    text += 'prompt = """{context} {prompt} {criterion} {completion} {"score": N} {}"""'
    for run in (RUN + text, GROUP + text.replace("{completion}", "{completions}")):
        result = validated(run)
        assert (result.exit_code, result.stderr) == (0, ""), result.output


@pytest.mark.parametrize(
    ("rubric", "fine"),
    [("", False), (f"rubric = [{A}]", False), (f"rubric = [{A}, {B}]", True), ('rubric_field = "r"', False)],
)
def test_gdpo_takes_the_parts_of_a_rubric(rubric, fine):
    Path("run.toml").write_text(RUN + rubric + '\n[algorithm]\nadvantage_mode = "gdpo"\n')
    if fine:
        assert load("run.toml").warnings == ()
        return
    with pytest.raises(ConfigError, match="the run has 1") as caught:
        load("run.toml")
    (found,) = caught.value.problems
    assert (found.key, found.problem) == (
        "[algorithm] advantage_mode",
        "gdpo normalises each reward on its own, and the run has 1",
    )
    assert found.fix == 'list two [[rewards]] at least, or a judge with a rubric, or use advantage_mode = "grpo_std"'


def test_a_comparison_has_no_greedy_baseline():
    Path("run.toml").write_text(GROUP + '[algorithm]\nadvantage_mode = "remax"\n')
    with pytest.raises(ConfigError, match='"judge_group" compares the completions of a group, and the greedy one'):
        load("run.toml")
