"""Files that a run would miss as it starts are found by whoever reads its configuration, and by `train` alike."""

import pytest
from typer.testing import CliRunner

from retrain.cli.main import app

TASK = '[task]\nname = "jsonl"\n[warmup]\nsteps = 0\n[jsonl]\n'
NOWHERE = '[jsonl] path: there is no file "none.jsonl"; check the path, which is relative to the working directory'
EXPERT = '[[loss]]\nname = "ppo_clip"\n[[loss]]\nname = "sft"\n[expert]\n'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Entered, with a good file, an empty one and a folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "list.jsonl").write_text('[{"prompt": "1+1?", "answer": "2"}]\n')
    rows = [
        '{"prompt": "1+1?", "answer": "2"}',
        '{"prompt": "", "answer": "2"}',
        '{"prompt": " ", "answer": "2"}',
        "{}",
    ]
    (tmp_path / "several.jsonl").write_text("\n".join(rows))
    (tmp_path / "table.jsonl").write_text("prompt,answer\n1+1?,2\n")
    return tmp_path


def run(command, folder, text, *options):
    (folder / "run.toml").write_text(text)
    return CliRunner().invoke(app, [command, "run.toml", *options])


@pytest.mark.parametrize("command", ["validate", "explain", "train"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TASK + 'path = "none.jsonl"', f"run.toml:6:1: {NOWHERE}"),
        (TASK + 'path = "empty.jsonl"', 'run.toml:6:1: [jsonl] path: the file "empty.jsonl" is empty; '),
        (TASK + 'path = "folder.jsonl"', 'run.toml:6:1: [jsonl] path: "folder.jsonl" is a directory, not a file; '),
        (TASK + f'path = "{"x" * 5000}"', 'run.toml:6:1: [jsonl] path: there is no file "xxx'),
        (
            TASK + 'path = "good.jsonl"\nheldout_path = "none.jsonl"',
            'run.toml:7:1: [jsonl] heldout_path: there is no file "none.jsonl"; ',
        ),
        (
            '[task]\nname = "jsonl"\nparams = { path = "none.jsonl" }',
            'run.toml:3:12: [task.params] path: there is no file "none.jsonl"; ',
        ),
        (
            TASK + 'path = "several.jsonl"',
            "run.toml:6:1: [jsonl] path: 3 bad rows: several.jsonl:2: prompt: empty (and 1 more row); ",
        ),
        (TASK + 'path = "table.jsonl"', "run.toml:6:1: [jsonl] path: bad row table.jsonl:1: not JSON: "),
        (EXPERT + 'path = "none.jsonl"', 'run.toml:6:1: [expert] path: there is no file "none.jsonl"; '),
    ],
)
def test_the_place_is_named_and_the_exit_code_is_that_of_data(folder, command, text, said):
    result = run(command, folder, text)
    assert result.exit_code == 3
    assert result.stderr.startswith(said)
    assert len(result.stderr.splitlines()) == 1
    assert ("convert a JSON array, indented JSON or CSV first" in result.stderr) == ("bad row " in said)
    assert not (folder / "runs").exists()


def test_other_mistakes_are_shown_with_it_and_decide_the_exit_code(folder):
    result = run("validate", folder, '[model]\npath = ":"\n' + TASK + 'path = "none.jsonl"')
    assert result.exit_code == 2
    assert [line.split(": ")[1] for line in result.stderr.splitlines()] == ["[model] path", "[jsonl] path"]


def test_an_override_may_name_another_file(folder):
    flags = ("--set", "jsonl.path=good.jsonl", "--set", "eval.problems=0")
    assert run("validate", folder, TASK + 'path = "none.jsonl"', *flags).exit_code == 0
    result = run("validate", folder, TASK + 'path = "good.jsonl"', "--set", "jsonl.path=none.jsonl")
    assert result.exit_code == 3
    assert result.stderr.startswith('--set jsonl.path=none.jsonl: [jsonl] path: there is no file "none.jsonl"; ')


@pytest.mark.parametrize("command", ["validate", "campaign"])
def test_every_condition_of_a_campaign_is_looked_at(folder, command):
    conditions = "".join(
        f'[[campaign.conditions]]\nlabel = "{name}"\n"jsonl.path" = "{name}.jsonl"\n' for name in ("good", "none")
    )
    result = run(command, folder, f'[campaign]\nseeds = 2\n{conditions}{TASK}path = "good.jsonl"\n')
    assert result.exit_code == 3
    assert result.stderr.startswith('run.toml:8:1: [[campaign.conditions]] jsonl.path: there is no file "none.jsonl"; ')
    assert len(result.stderr.splitlines()) == 1
    shared = f'[campaign]\nseeds = 2\n{TASK}path = "none.jsonl"\n'
    assert run(command, folder, shared).stderr.splitlines() == [f"run.toml:8:1: {NOWHERE}"], "once for all conditions"
