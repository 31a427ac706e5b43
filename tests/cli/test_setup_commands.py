import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import retrain
from retrain.cli.main import app


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("template", ["quickstart", "jsonl"])
def test_a_template_is_written_and_valid(tmp_path, monkeypatch, template):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(100)]
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    result = run("init", "mine.toml", "--template", template)
    assert result.exit_code == 0
    assert "retrain train mine.toml" in result.stdout
    assert "retrain train mine.toml" in Path("mine.toml").read_text()
    checked = run("validate", "mine.toml")
    assert (checked.exit_code, checked.stderr) == (0, "")


def test_init_overwrites_on_demand_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("precious = 1\n")
    refused = run("init")
    assert refused.exit_code == 2
    assert "exists already" in refused.stderr
    assert Path("run.toml").read_text() == "precious = 1\n"
    assert run("init", "--force").exit_code == 0
    assert "precious" not in Path("run.toml").read_text()


def test_init_writes_the_page_for_coding_agents(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("init", "--skill").exit_code == 0
    page = Path(retrain.__file__).parents[1] / "docs" / "skill.md"
    assert Path("SKILL.md").read_text() == page.read_text()
    assert "exists already" in run("init", "--skill").stderr


@pytest.mark.parametrize(
    ("topic", "shown", "hidden"),
    [
        ("no_update", "finding: no_update", "cut_off"),
        ("from-verl", "Coming from verl", "Coming from TRL"),
        ("the-reward-stays-0", "The reward itself", "It stops"),
        ("run-directory#resuming", "--resume auto", "Trackers"),
        ("docs/rewards.md#check-a-reward", "retrain reward check", "Where rewards run"),
        ("margin", "term: margin", "HICRA"),
        ("lora-on-two-gpus", "micro_batch_tokens", "Resume on another"),  # "# lora.toml" in its code is no heading
    ],
)
def test_help_prints_the_section_of_a_topic(topic, shown, hidden):
    done = run("help", topic)
    assert done.exit_code == 0
    assert shown in done.stdout
    assert hidden not in done.stdout


@pytest.mark.parametrize(
    ("words", "address"),
    [
        ("loss is 0", "troubleshooting#the-loss-is-0-negative-or-does-not-fall"),
        ("how to keep the best checkpoints", "evaluation#the-best-checkpoint"),
        ("change temperature during training", "limits#change-a-run-that-is-under-way"),
        ("margin of error", "statistics#margins"),
    ],
)
def test_help_searches_all_sections_for_other_words(words, address):
    found = run("help", *words.split()).stdout.splitlines()
    assert found[0] == f"retrain help {address}"
    assert run(*found[0].split()[1:]).exit_code == 0
    assert len(found) <= 8


def test_help_lists_the_pages_and_knows_no_others():
    assert "troubleshooting    Troubleshooting" in run("help").stdout
    refused = run("help", "troubleshoting")
    assert refused.exit_code == 2
    assert 'did you mean "troubleshooting"?' in refused.stderr


def test_init_into_a_missing_directory_is_a_storage_error(tmp_path):
    result = run("init", str(tmp_path / "no" / "run.toml"))
    assert result.exit_code == 6
    assert "cannot be written" in result.stderr


def test_plugins_lists_names_reads_parameters_and_summaries():
    rows = {(row["kind"], row["name"]): row for row in json.loads(run("plugins", "--json").stdout)}
    gtpo = rows["transform", "gtpo"]
    assert gtpo["params"] == {"beta": 0.1, "per": "episode"}
    assert "uncertainty" in gtpo["reads"]
    assert gtpo["source"] == "built-in"
    built_in = {key: row for key, row in rows.items() if row["source"] == "built-in"}  # other tests register theirs
    assert all(row["summary"] for row in built_in.values()), built_in


def test_plugins_lists_what_other_packages_bring(tmp_path, monkeypatch):
    from retrain.registry import lookup

    (tmp_path / "zoo_code.py").write_text(
        'def fn(rewards, *, knob: float = 1.0):\n    """Zoo\'s own."""\n    return rewards\n'
    )
    (tmp_path / "zoo-1.0.dist-info").mkdir()
    (tmp_path / "zoo-1.0.dist-info" / "METADATA").write_text("Name: zoo\nVersion: 1.0\n")
    points = "[retrain.advantage]\nzoo_median = zoo_code:fn\nzoo_gone = zoo_missing:fn\n"
    (tmp_path / "zoo-1.0.dist-info" / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    lookup._entry_points.cache_clear()
    try:
        listed = run("plugins", "advantage")
    finally:
        lookup._entry_points.cache_clear()
    assert listed.exit_code == 0, listed.output
    assert "advantage zoo_median  (entry point)\n    Zoo's own." in listed.stdout
    assert "knob = 1.0" in listed.stdout
    assert "advantage zoo_gone  (entry point)\n    cannot be used: " in listed.stdout


def test_plugins_of_an_unknown_kind():
    result = run("plugins", "advantages")
    assert result.exit_code == 2
    assert 'did you mean "advantage"? one of: task, ' in result.stderr
    assert "maxrl is a component of the kind advantage" in run("plugins", "maxrl").stderr


def test_doctor_describes_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = json.loads(run("doctor", "--json").stdout)
    assert found["torch"]["version"].startswith("2.")
    assert found["this directory"] == "writable"
    assert "torch" in found["engines"]
    project = tomllib.loads((Path(retrain.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert set(found["extras"]) == set(project["optional-dependencies"]) - {"bench", "dev", "docs", "test"}
    assert found["extras"]["serve"].startswith("starlette: ")
    assert "this directory: writable" in run("doctor").stdout


def test_doctor_fails_where_nothing_can_be_written(monkeypatch):
    monkeypatch.chdir("/proc")
    result = run("doctor")
    assert result.exit_code == 6
    assert "this directory: broken" in result.stdout


@pytest.mark.slow
def test_schema_and_explain_print_json(tmp_path):
    assert json.loads(run("schema").stdout)["title"] == "retrain configuration"
    assert run("schema", "--json").stdout == run("schema").stdout
    file = tmp_path / "run.toml"
    file.write_text("[training]\ngroup_size = 2\n")
    batch = json.loads(run("explain", str(file), "--json").stdout)["batch"]
    assert batch["completions_per_step"] == "16 prompts x 2 = 32"
    assert "completions per step: 16 prompts x 2 = 32" in run("explain", str(file)).stdout
