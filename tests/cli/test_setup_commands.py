import json
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import retrain
from retrain.cli import setup_commands
from retrain.cli.run_commands import _how_to_continue
from retrain.config.load import load
from tests.commands import invoke as run

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("template", ["quickstart", "jsonl"])
def test_a_template_is_written_and_valid(cwd, template):
    rows = [{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(100)]
    (cwd / "problems.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    result = run("init", "mine.toml", "--template", template, code=0)
    assert "retrain train mine.toml" in result.stdout
    assert "retrain train mine.toml" in Path("mine.toml").read_text()
    checked = run("validate", "mine.toml")
    assert (checked.exit_code, checked.stderr) == (0, "")


def test_init_overwrites_on_demand_only(cwd):
    Path("run.toml").write_text("precious = 1\n")
    refused = run("init", code=2)
    assert "exists already" in refused.stderr
    assert Path("run.toml").read_text() == "precious = 1\n"
    assert run("init", "--force").exit_code == 0
    assert "precious" not in Path("run.toml").read_text()


def test_init_writes_the_page_for_coding_agents(cwd):
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
    done = run("help", topic, code=0)
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
    refused = run("help", "troubleshoting", code=2)
    assert 'did you mean "troubleshooting"?' in refused.stderr


def test_init_into_a_missing_directory_is_a_storage_error(tmp_path):
    result = run("init", str(tmp_path / "no" / "run.toml"), code=6)
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
    result = run("plugins", "advantages", code=2)
    assert 'did you mean "advantage"? one of: task, ' in result.stderr
    assert "maxrl is a component of the kind advantage" in run("plugins", "maxrl").stderr


def test_doctor_describes_this_machine(cwd):
    found = json.loads(run("doctor", "--json").stdout)
    assert found["torch"]["version"].startswith("2.")
    assert found["this directory"] == "writable"
    assert "torch" in found["engines"]
    project = tomllib.loads((Path(retrain.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert set(found["extras"]) == set(project["optional-dependencies"]) - {"bench", "dev", "docs", "test"}
    assert found["extras"]["serve"].startswith("starlette ")
    assert "this directory: writable" in run("doctor").stdout


def test_doctor_fails_where_nothing_can_be_written(monkeypatch):
    monkeypatch.chdir("/proc")
    result = run("doctor", code=6)
    assert "this directory: broken" in result.stdout


def test_every_recipe_is_listed_with_what_it_is():
    listed = run("init", "--list").stdout.splitlines()
    names = [line.split()[0] for line in listed]
    assert {"quickstart", "jsonl", "dapo", "gpu/dapo"} <= set(names)
    assert all(len(line.split()) > 3 for line in listed)


def test_a_recipe_becomes_a_file_that_is_valid_anywhere(cwd):
    assert run("init", "mine.toml", "--template", "mix").exit_code == 0
    assert load("mine.toml").config.experts[0].path
    assert "retrain train mine.toml" in Path("mine.toml").read_text()
    wrong = run("init", "other.toml", "--template", "gpu/dappo")
    assert (wrong.exit_code, 'did you mean "gpu/dapo"?' in wrong.output) == (2, True)


def test_a_built_wheel_holds_every_recipe_and_its_data(tmp_path):
    from hatchling.builders.wheel import WheelBuilder

    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path))
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if "/templates/recipes/" in name}
        recipes = {name.partition("/recipes/")[2] for name in shipped}
        assert {file.relative_to(ROOT / "configs").as_posix() for file in (ROOT / "configs").rglob("*.toml")} <= recipes
        assert any(name.startswith("data/") for name in recipes)
        for name in shipped:
            if name.endswith(".toml"):
                tomllib.loads(archive.read(name).decode())


def test_an_interrupted_run_says_where_it_is_and_how_it_continues(tmp_path):
    said = _how_to_continue(tmp_path / "none", Path("a.toml"), (), ())
    assert said == "nothing of the run is written yet; start it again with: retrain train a.toml"
    said = _how_to_continue(tmp_path, Path("a.toml"), (), ())
    assert "it has no checkpoint yet; start over with: retrain train a.toml --fresh" in said
    for step in (5, 10):
        (tmp_path / "checkpoints" / f"step-{step:06}").mkdir(parents=True)
    overrides = ["training.seed=1", 'jsonl.system_prompt="Be brief."']
    said = _how_to_continue(tmp_path, Path("a.toml"), overrides, ["--ranks", "2"])
    assert f"the run is in {tmp_path}; its newest checkpoint is step-000010" in said
    command = said.partition("continue with: ")[2]
    flags = ["--set", "training.seed=1", "--set", 'jsonl.system_prompt="Be brief."']
    assert shlex.split(command) == ["retrain", "train", "a.toml", *flags, "--ranks", "2", "--resume", "auto"]


@pytest.mark.parametrize("kind", ["advantage", "transform", "reward", "loss"])
def test_a_plugin_is_written_with_a_run_file_and_a_test(cwd, monkeypatch, kind):
    monkeypatch.syspath_prepend(str(cwd))
    name = f"own_{kind}"
    assert run("init", "--plugin", kind, name).exit_code == 0
    assert sorted(path.name for path in cwd.iterdir()) == [f"{name}.py", f"{name}.toml", f"test_{name}.py"]
    run("validate", f"{name}.toml", code=0)
    again = run("init", "--plugin", kind, name)
    assert (again.exit_code, "exists already" in again.output) == (2, True)


MUTATIONS = [
    (r"(?<= )\+(?= )", "-"),
    (r"(?<= )-(?= )", "+"),
    (r"(?<= )\*(?= )", "/"),
    (r"(?<= )/(?= )", "*"),
    (r" > ", " < "),
    (r" > ", " >= "),
    (r"-(?=[\d(])", ""),  # a sign
    (r"\d+(\.\d+)?", r"(\g<0> + 0.05)"),
    (r"\d+(\.\d+)?", r"(\g<0> - 0.05)"),
    (r"(?<![\w.])(\w+) - (\w+)\b(?![.(])", r"\2 - \1"),
    (r" [-*] \w+\b(?![.(])", ""),
    (r"\.\w+\(\)", ""),  # .exp(), .strip()
    (r"\bminimum\b", "maximum"),
    (r"\bmax\(", "min("),
    (r"\bsum\(", "max("),
    (r"\bendswith\b", "startswith"),
    (r"\bor\b", "and"),
    (r"\bnot ", ""),
    (r"\bnot \w+ or ", ""),
    (r" or [^:]+(?=:)", ""),
]
"""Pattern and replacement of each change of a written plug-in: of operators, signs, constants, conditions and calls."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["advantage", "transform", "reward", "loss"])
def test_the_tests_of_a_written_plugin_pass_and_fail_for_every_change_of_it(cwd, kind):
    assert run("init", "--plugin", kind, "own").exit_code == 0
    head, _, body = Path("own.py").read_text().split('"""')
    code = head + body
    mutants = [code] + [
        code[: match.start()] + match.expand(new) + code[match.end() :]
        for pattern, new in MUTATIONS
        for match in re.finditer(pattern, code)
    ]
    assert len(mutants) == len({*mutants}) > 5
    # One process tests them all, each as a plug-in with a name of its own.
    for number, mutant in enumerate(mutants):
        compile(mutant, f"own_{number}.py", "exec")
        Path(f"own_{number}.py").write_text(mutant.replace("own", f"own_{number}"))
        Path(f"test_own_{number}.py").write_text(Path("test_own.py").read_text().replace("own", f"own_{number}"))
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", *cwd.glob("test_own_*")]
    said = subprocess.run(command, cwd=cwd, capture_output=True, text=True).stdout
    failed = {int(number) for number in re.findall(r"FAILED .*?test_own_(\d+)\.py", said)}
    assert [mutants[number] for number in range(len(mutants)) if number not in failed] == [code], said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--plugin", "adv", "x"], "there is no such template; use one of advantage, loss, reward, transform"),
        (["--plugin", "advantage"], "run.toml: is not a name that Python allows"),
        (
            ["--plugin", "loss", "json"],
            "is the name of an installed module; choose another name: retrain init --plugin",
        ),
        (["--plugin", "advantage", "pytest"], "is a name that the written files or pytest use"),
        (["--plugin", "reward", "pluggy"], "is a name that the written files or pytest use"),
        (["--plugin", "loss", "torch"], "is a name that the written files or pytest use"),
        (["--plugin", "transform", "retrain"], "is a name that the written files or pytest use"),
        (["--plugin", "advantage", "sum"], "is a name that the written files or pytest use"),
        (["--plugin", "transform", "transformed"], "is a name that the written files or pytest use"),
        (["--plugin", "reward", "test_it"], "is a name with a meaning for pytest or Python"),
        (["--plugin", "reward", "__main__"], "is a name with a meaning for pytest or Python"),
        (["--plugin", "loss", "training"], "training.toml would be invalid: file: not valid TOML: Cannot declare"),
        (["--plugin", "loss", "optimizer"], "optimizer.toml would be invalid: [optimizer] clip: unknown key"),
        (["--plugin", "loss", "strategy"], "strategy.toml would be invalid: [strategy] clip: unknown key"),
        (["--plugin", "loss", "kl"], "kl.toml would be invalid: [kl] clip: unknown key"),
        (["--plugin", "reward", "Ünï"], "Ünï.toml would be invalid: [logging] name: the file's name, 'Ünï', is not a "),
        (["--plugin", "advantage", "größe"], "choose another name: retrain init --plugin advantage my_advantage"),
    ],
)
def test_a_plugin_needs_a_kind_and_a_name_with_which_its_files_work(cwd, monkeypatch, arguments, says):
    known = find_spec
    monkeypatch.setattr(setup_commands, "find_spec", lambda name: None if name in ("pytest", "torch") else known(name))
    result = run("init", *arguments)
    assert (result.exit_code, says in result.output) == (2, True), result.output
    assert [*cwd.iterdir()] == []
