"""What training would ask of the data and not find is told by `validate`, and by `train` before it loads a model."""

import json

import pytest
from typer.testing import CliRunner

from retrain.cli.main import app

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1), "solution": str(n + 1)} for n in range(40)]
RUN = '[task]\nname = "jsonl"\n[jsonl]\npath = "rows.jsonl"\n'
EXPERT = '[[loss]]\nname = "ppo_clip"\n[[loss]]\nname = "sft"\n[expert]\npath = "said.jsonl"\n'
REWARD = "def known(completions, answer):\n    return [0.0 for _ in completions]\n\n\n"
REWARD += "def unknown(completions, gold):\n    return [0.0 for _ in completions]\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Entered, with rows, rows without solutions, one row, and rewards of TRL's form."""
    monkeypatch.chdir(tmp_path)
    rows("rows.jsonl", ROWS)
    rows("bare.jsonl", [{key: row[key] for key in ("prompt", "answer")} for row in ROWS])
    rows("one.jsonl", ROWS[:1])
    (tmp_path / "own.py").write_text(REWARD)
    return tmp_path


def rows(name, several):
    with open(name, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in several)


def run(command, text, *options):
    with open("run.toml", "w") as file:
        file.write(text)
    return CliRunner().invoke(app, [command, "run.toml", *options])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            RUN.replace("rows", "bare"),
            "[warmup] steps: the warm start imitates worked solutions, and problem 'bare.jsonl:",
        ),
        (RUN.replace("rows", "one"), "[eval] problems: 256 held-out problems were asked for, and the task has none"),
        (RUN + "system_prompt = 'Be brief.'", "[model] path: the prompts are chats, and builtin:tiny has no chat"),
        (RUN + "[model]\nchat = 'on'", "[model] path: the prompts are chats, and builtin:tiny has no chat template"),
        (RUN + "[[rewards]]\nname = 'own.unknown'", '[[rewards]] name: reward "own.unknown": it reads gold, but'),
        (
            RUN + "[[eval.sets]]\nname = 'other'\ntask_params = { path = 'one.jsonl', heldout_fraction = 0.0 }",
            "[[eval.sets]] name: 256 held-out problems were asked for, and the task has none",
        ),
        (RUN + EXPERT, "[expert] path: said.jsonl:1: the expert's answer is empty"),
    ],
)
def test_training_would_not_get_to_its_first_step(text, said):
    rows("said.jsonl", [{"prompt": "1+1=", "completion": " "}])
    result = run("validate", text)
    assert result.exit_code == 3, result.output
    assert said in result.stderr
    assert result.stderr.count("run.toml:") == 1


def test_all_is_told_at_once_and_by_every_command(folder):
    text = RUN.replace("rows", "bare") + "heldout_fraction = 0.0\n[[rewards]]\nname = 'own.unknown'"
    keys = ["[eval] problems", "[warmup] steps", "[[rewards]] name"]
    result = run("validate", text, "--json")
    assert [one["key"] for one in json.loads(result.stdout)["problems"]] == keys
    trained = run("train", text)
    assert trained.exit_code == 3
    assert all(key in trained.stderr for key in (keys[0], keys[2]))
    assert "warm start" not in trained.stdout


def test_rows_far_from_the_first_are_read_too():
    rows("rows.jsonl", [*ROWS, {"prompt": "none"}])
    result = run("validate", RUN)
    assert result.exit_code == 3
    assert "rows.jsonl:41: " in result.stderr
