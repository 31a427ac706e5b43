import json
from dataclasses import replace
from pathlib import Path

import pytest

from retrain.registry import find
from retrain.registry.component import REGISTERED
from tests.forks import run_command


@pytest.mark.slow
def test_verify_prints_a_line_for_each_property(tmp_path):
    done = run_command("verify", "--trials", "5", cwd=tmp_path, code=0)
    lines = done.stdout.splitlines()
    assert len(lines) == 10
    assert all(line.startswith("ok ") for line in lines)


def test_verify_exits_with_1_when_a_property_fails(cli, monkeypatch):
    wrong = replace(find("advantage", "rloo"), target=lambda rewards, group_ids: rewards)
    monkeypatch.setitem(REGISTERED, ("advantage", "rloo"), wrong)
    result = cli("verify", "--trials", "3", "--json", code=1)
    rows = {row["name"].split()[0]: row["ok"] for row in json.loads(result.stdout)}
    assert rows["leave-one-out"] is False
    assert "FAILED  leave-one-out" in cli("verify", "--trials", "3").stdout


@pytest.fixture
def rows(cwd):
    case = json.loads((Path(__file__).parents[2] / "data" / "vectors.json").read_text())["dca"][0]
    lists = {"group": "q", "rewards": case["input"]["correct"], "lengths": case["input"]["lengths"]}
    Path("rows.jsonl").write_text(json.dumps(lists))
    return case


def test_credit_of_the_command_is_the_published_one(tmp_path, rows):
    done = run_command("credit", "rows.jsonl", "--mode", "dca", "--mode", "dca_rloo", "--json", cwd=tmp_path, code=0)
    facts = json.loads(done.stdout)
    assert [one["name"] for one in facts["credit"]] == ["dca", "dca_rloo"]
    assert facts["credit"][0]["advantages"] == pytest.approx(rows["expected"]["dca_grpo"], abs=1e-9)
    assert facts["completions"][3]["length"] == 400


def test_credit_prints_a_table_with_a_summary(cli, rows):
    result = cli("credit", "rows.jsonl", "--plot", "out.html", code=0)
    head = result.stdout.splitlines()[0].split()
    assert head == ["group", "reward", "right", "tokens", "dca", "grpo_lp", "grpo_std"]
    assert "+0.6250" in result.stdout
    assert "without credit" in result.stdout
    assert "out.html: written" in result.stdout
    assert "<svg" in Path("out.html").read_text()


def test_credit_of_tokens_is_printed_for_the_first_group(cli, rows):
    Path("t.jsonl").write_text(json.dumps({"group": "q", "rewards": [1, 0], "logprobs": [[-1.0, -3.0], [-2.0]]}))
    result = cli("credit", "t.jsonl", "--mode", "grpo", "--transform", "gtpo", "--set", "gtpo.beta=1.0")
    assert "grpo + gtpo, tokens of group q" in result.stdout
    assert "+0.25 +0.75" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [("none.jsonl", 3), ("rows.jsonl --transform gtpo", 3), ("rows.jsonl --mode x", 2), ("rows.jsonl --plot no/x", 6)],
)
def test_what_cannot_be_compared(cli, rows, arguments, code):
    result = cli("credit", *arguments.split())
    assert (result.exit_code, bool(result.stderr)) == (code, True)
