"""Rows as people have them: nested and numeric answers, rows of TRL and verl, templates and system prompts."""

import json
import re

import pytest

from retrain.data.rows import Jsonl, Parquet
from retrain.errors import DataError
from retrain.registry import find
from retrain.rewards.pool import RewardPool

USER = [{"role": "user", "content": "2+2?"}]
ASSISTANT = {"role": "assistant", "content": "so 4"}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": USER,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 0},
}


def read(tmp_path, row, **params):
    """The problem that a file with this row alone has."""
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return Jsonl(0, path=str(path), heldout_fraction=0.0, **params).problem(0)


@pytest.mark.parametrize(
    ("row", "params", "prompt", "answer", "solution"),
    [
        (VERL, {}, USER, "4", None),
        ({"prompt": USER}, {"answer_field": ""}, USER, "", None),
        ({"prompt": "2+2?", "completion": " so 4", "answer": "4"}, {}, "2+2?", "4", " so 4"),
        ({"prompt": USER, "completion": [ASSISTANT]}, {"answer_field": ""}, USER, "", "so 4"),
        ({"messages": [*USER, ASSISTANT], "answer": 4}, {}, USER, "4", "so 4"),
        ({"q": {"text": "?"}, "a": {"n": 0.5}}, {"prompt_field": "q.text", "answer_field": "a.n"}, "?", "0.5", None),
        ({"prompt": "p", "answer": {"sum": 24, "of": [1, 2]}}, {}, "p", '{"sum": 24, "of": [1, 2]}', None),
    ],
)  # fmt: skip
def test_rows_of_other_trainers_need_no_other_data(tmp_path, row, params, prompt, answer, solution):
    problem = read(tmp_path, row, **params)
    assert (problem.prompt, problem.answer, problem.solution) == (prompt, answer, solution)


def test_a_parquet_file_gives_each_call_its_own_arguments(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    import pyarrow.parquet as parquet

    calls = [{"function": {"name": "add", "arguments": {"a": 1}}}, {"function": {"name": "neg", "arguments": {"x": 1}}}]
    prompt = [*USER, {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "3"}]
    tools = [
        {"name": "add", "parameters": {"a": {"type": "string"}}},
        {"name": "neg", "parameters": {"x": {"type": "integer"}}},
    ]
    cases = [{"input": "1", "expected": None}]
    row = {"prompt": prompt, "tools": tools, "cases": cases, "answer": "3"}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "data.parquet")
    problem = Parquet(0, path=str(tmp_path / "data.parquet"), heldout_fraction=0.0).problem(0)
    assert problem.prompt == [*USER, {**prompt[1], "content": ""}, prompt[2]]
    assert problem.template["tools"][1] == tools[1]
    assert problem.extra["cases"] == cases, "other columns stay as they are"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"tools": ["python"]}, "tools: expected JSON schemas of functions"),
        ({"tools": "python"}, "tools: expected JSON schemas of functions"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: expected an object"),
        ({"completion": [ASSISTANT, *USER]}, "completion: the last message must be the assistant's"),
    ],
)
def test_a_column_of_trl_with_something_else_is_a_bad_row(tmp_path, row, problem):
    with pytest.raises(DataError, match=problem):
        read(tmp_path, {"prompt": USER, "answer": "4"} | row)


def test_rewards_find_the_columns_as_they_were(tmp_path):
    problem = read(tmp_path, {"prompt": "p", "ground_truth": 4, "level": 2}, answer_field="ground_truth")
    assert (problem.answer, problem.extra) == ("4", {"ground_truth": 4, "level": 2})


def test_a_parquet_file_of_verl_is_scored_by_a_score_function_of_verl(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    import pyarrow.parquet as parquet

    file = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([VERL]), file)
    problem = Parquet(0, path=str(file), heldout_fraction=0.0).problem(0)
    reward = find("reward", "tests.rewards.brought.verl_rewards.compute_score").bind({})
    with RewardPool([(reward, 1.0)], workers=0) as pool:
        item = {"completion": "#### 4", "answer": problem.answer, "problem": problem.facts}
        assert pool.score([item])[0].value == 1.0


def test_a_template_shows_columns_and_a_system_prompt_comes_first(tmp_path):
    params = {"prompt_template": "{meta.topic}: {question} Use \\boxed{}.", "system_prompt": "Be brief."}
    problem = read(tmp_path, {"question": "2+2?", "meta": {"topic": "sums"}, "answer": 4}, **params)
    system = {"role": "system", "content": "Be brief."}
    assert problem.prompt == [system, {"role": "user", "content": "sums: 2+2? Use \\boxed{}."}]
    own = [{"role": "system", "content": "mine"}, *USER]
    assert read(tmp_path, {"prompt": own, "answer": "4"}, system_prompt="Be brief.").prompt == own
    assert read(tmp_path, {"prompt": USER, "answer": "4"}, system_prompt="Be brief.").prompt == [system, *USER]


def test_what_is_typed_gets_the_template_and_the_system_prompt(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n')
    task = Jsonl(0, path=str(path), heldout_fraction=0.0, prompt_template="Q: {question}\nA:", system_prompt="s")
    asked = {"role": "user", "content": "Q: how?\nA:"}
    assert task.pose("how?") == [{"role": "system", "content": "s"}, asked]


@pytest.mark.parametrize(
    ("row", "params", "says"),
    [
        ({"prompt": "p"}, {"prompt_template": "{question}"}, 'no field "question", which prompt_template uses'),
        ({"prompt": "p", "a": {}}, {"answer_field": "a.b"}, 'no field "a.b"'),
    ],
)
def test_what_is_no_problem_is_named(tmp_path, row, params, says):
    with pytest.raises(DataError, match=re.escape(says)):
        read(tmp_path, row, **params)
