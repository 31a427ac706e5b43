"""`retrain task export`, and a run on what it wrote."""

import json

import pytest

TERMS = '\n[expert]\npath = "expert.jsonl"\n[[loss]]\nname = "ppo_clip"\n[[loss]]\nname = "sft"\n'


@pytest.mark.slow
def test_the_default_task_is_exported_and_trained_on(cli, folder):
    result = cli("task", "export", "--solutions", "expert.jsonl", "--count", "9", "--set", "addition.max_digits=2")
    assert (result.exit_code, result.stdout) == (0, "wrote 9 rows to expert.jsonl, from 9 solutions\n")
    rows = [json.loads(line) for line in (folder / "expert.jsonl").read_text().splitlines()]
    assert [[message["role"] for message in row["messages"]] for row in rows] == [["user", "assistant"]] * 9
    (folder / "mix.toml").write_text((folder / "run.toml").read_text() + TERMS)
    assert cli("validate", "mix.toml").exit_code == 0
    result = cli("train", "mix.toml", "--set", "training.max_steps=1", "--plain", code=0)
    assert "loss/sft" in (folder / "runs" / "mix" / "metrics.jsonl").read_text()


def test_the_seed_is_the_configurations_unless_given(cli, folder):
    for name, options in {"a": ("run.toml",), "b": ("--seed", "0"), "c": ("--seed", "1")}.items():
        options = (*options, "--solutions", f"{name}.jsonl", "--count", "3", "--format", "prompt", "--json")
        assert json.loads(cli("task", "export", *options).stdout)["rows"] == 3
    a, b, c = ((folder / f"{name}.jsonl").read_text() for name in "abc")
    assert a == b != c
