"""The tables of the page for users of TRL say what happens: every argument and every column of a row is tried."""

import json
import logging
import re

import pytest

from docs.measure import ROOT
from retrain.config.mistakes import translated
from retrain.data.rows import Jsonl
from retrain.errors import DataError

_LINES = [
    ([*re.findall("`([^`]+)`", cells[0])], cells[1])
    for line in (ROOT / "docs" / "from-trl.md").read_text("utf-8").splitlines()
    if len(cells := [cell.strip() for cell in line.strip("| ").split(" | ")]) == 2 and cells[0].startswith("`")
]
_OUTCOMES = ("read", "refused: only", "ignored")
COLUMNS = {name: text for names, text in _LINES if text.startswith(_OUTCOMES) for name in names}
ARGUMENTS = {name: text for names, text in _LINES if not text.startswith(_OUTCOMES) for name in names}
USER = {"role": "user", "content": "2+2?"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
FOUND = {"role": "tool", "content": "4"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
READ = {
    "prompt": ([USER], ("prompt", [USER])),
    "messages": ([USER, {"role": "assistant", "content": "4"}], ("solution", "4")),
    "completion": (
        [CALL, FOUND, {"role": "assistant", "content": "4"}],
        ("prompt", [USER, {**CALL, "content": ""}, FOUND]),
    ),
    "tools": (json.dumps([TOOL]), ("template", {"tools": [TOOL]})),
    "chat_template_kwargs": ({"enable_thinking": False}, ("template", {"enable_thinking": False})),
}
"""Column: (value, (attribute of the problem, its value))."""


def problem(path, row):
    path.write_text(json.dumps(row) + "\n")
    return Jsonl(0, path=str(path), heldout_fraction=0.0, answer_field="").problem(0)


def test_both_tables_are_read():
    assert len(ARGUMENTS) > 40
    assert {*READ} == {name for name, text in COLUMNS.items() if text.startswith("read")}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_is_what_the_page_says(name, tmp_path, caplog):
    value, (attribute, expected) = READ.get(name, ("x", ("extra", {name: "x"})))
    row = {name: value} if name in ("prompt", "messages") else {"prompt": [USER], name: value}
    if COLUMNS[name].startswith("refused"):
        with pytest.raises(DataError, match=f'column "{name}": only text is trained on; remove the column'):
            problem(tmp_path / "rows.jsonl", row)
        return
    with caplog.at_level(logging.WARNING):
        found = problem(tmp_path / "rows.jsonl", row)
    assert getattr(found, attribute) == expected
    assert (f"only rewards read the columns {name}" in caplog.text) == COLUMNS[name].startswith("ignored")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_is_answered_with_what_the_page_says(name):
    value = "dr_grpo" if name == "loss_type" else "group" if name == "scale_rewards" else 2
    advice, text = translated(name, value), ARGUMENTS[name].replace("`", "")
    if not text.startswith("refused"):
        tables = set(re.findall(r"\[\[?[\w.]+\]", text)) or {"in the table of the task"}
        assert any(table in advice for table in tables), (advice, text)
    assert advice
