"""Run directories that somebody else hands over: opening one runs none of its code and follows none of its links."""

import json
import shutil
from pathlib import Path

import pytest
import tomli

from retrain.config.load import load
from retrain.run.session import Resume, run
from tests.commands import invoke
from tests.small_runs import TOML

EVIL = "open({mark!r}, 'w').write('ran')\ndef fn(*a, **k):\n    return 1.0\nclass Task:\n    pass\n"
OPENING = {
    "eval": ["eval", "theirs"],
    "sample": ["sample", "theirs", "1+1?"],
    "export": ["export", "theirs", "out"],
    "play": ["play", "theirs"],
    "audit": ["audit", "theirs", "--batches", "4", "--continuations", "2"],
    "serve": ["serve", "theirs", "--episodes", "episodes.jsonl", "--port", "8999"],
}
READING = (["status", "theirs"], ["report", "theirs"], ["credit", "theirs"], ["compare", "theirs", "theirs"])
CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one step, trained once."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "run.toml").write_text(TOML)
    overrides = ["reward_pool.workers=1", "training.max_steps=1", "eval.problems=2", f'logging.dir="{folder}/runs"']
    return run(load(folder / "run.toml", [*overrides, "logging.name=theirs"]), Resume(), lambda *_: None)


@pytest.fixture
def theirs(trained, tmp_path, monkeypatch):
    """A run that was trained elsewhere, in the user's folder: `theirs(changes)` changes its configuration."""
    folder = tmp_path / "user"
    folder.mkdir()
    shutil.copytree(trained, folder / "theirs")
    (folder / "theirs" / "evil").mkdir()
    mark = folder / "mark"
    for place in (folder / "theirs" / "evil", folder / "theirs"):
        (place / "chance.py").write_text(EVIL.format(mark=str(mark)))
    monkeypatch.chdir(folder)

    def go(**changes):
        file = folder / "theirs" / "config.resolved.json"
        config = json.loads(file.read_text())
        for key, value in changes.items():
            section, _, name = key.partition("__")
            config[section] = config.get(section, {}) | {name: value} if name else value
        file.write_text(json.dumps(config))
        return mark

    return go


STRANGERS = tomli.loads(Path(__file__).with_name("foreign_runs.toml").read_text())
EVIL_KEYS = STRANGERS["code"]
GADGETS = STRANGERS["functions"]


def refused(command):
    done = invoke(*OPENING[command], code=2)
    assert "--trust" in done.stderr
    return done.stderr


CREDIT = ("a transform", "an advantage", "a loss", "a curriculum", "a detector")
"""What only training and the audit use."""
SCORING = [command for command in OPENING if command not in ("sample", "export")]
"""Commands that use rewards and the environment."""
UNUSED = [*(("eval", what) for what in CREDIT), ("sample", "a reward"), ("export", "a tool"), ("sample", "a tool")]


@pytest.mark.parametrize(("command", "what"), UNUSED)
def test_code_that_a_command_does_not_use_is_neither_imported_nor_refused(theirs, command, what):
    mark = theirs(**json.loads(json.dumps(EVIL_KEYS[what]).replace("chance", "theirs.chance")))
    invoke(*OPENING[command], code=0)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("command", "what"),
    [
        *(("audit" if what in CREDIT else "eval", what) for what in EVIL_KEYS),
        *((command, "a reward") for command in SCORING),
    ],
)
def test_code_in_the_run_is_not_imported_unless_it_is_trusted(theirs, command, what):
    text = json.dumps(EVIL_KEYS[what]).replace("chance", "theirs.chance")
    mark = theirs(**json.loads(text))
    assert "theirs/chance.py belongs to the run that is opened" in refused(command)
    assert not mark.exists()


def test_code_beside_a_run_is_not_imported_in_its_own_directory(theirs, monkeypatch):
    mark = theirs(rewards=[{"name": "chance.fn"}])
    monkeypatch.chdir("theirs")
    assert "chance.py belongs to the run" in invoke("eval", ".").stderr
    assert not mark.exists()


def test_a_tool_of_python_imports_nothing_from_the_current_directory(theirs, monkeypatch):
    mark = theirs(environment__name="tools", tools={"functions": ["builtins.str"], "describe": False})
    for name in ("sitecustomize", "asyncio"):  # Python and the environment's worker import these
        Path(f"theirs/{name}.py").write_text(EVIL.format(mark=str(mark)))
    monkeypatch.chdir("theirs")
    assert invoke("eval", ".").exit_code == 0
    assert not mark.exists()


def test_code_beside_the_runs_of_a_campaign_is_not_imported(theirs):
    mark = theirs(rewards=[{"name": "theirs.chance.fn"}])
    shutil.copytree("theirs", "theirs/cells/grpo/s0")
    done = invoke("eval", "theirs/cells/grpo/s0")
    assert "chance.py belongs to the run that is opened" in done.stderr
    assert not mark.exists()


def test_a_package_in_the_run_is_not_imported_for_a_module_in_it(theirs):
    mark = theirs(rewards=[{"name": "theirs.package.chance.fn"}])
    package = Path("theirs/package")
    package.mkdir()
    for name in ("__init__.py", "chance.py"):
        (package / name).write_text(EVIL.format(mark=str(mark)))
    assert "__init__.py belongs to the run" in refused("eval")
    assert not mark.exists()


@pytest.mark.parametrize("command", OPENING)
def test_search_paths_are_used_with_trust_alone(theirs, command):
    mark = theirs(plugins__search_paths=[str(Path("theirs/evil").resolve())], rewards=[{"name": "chance.fn"}])
    assert "[plugins] search_paths: ('" in refused(command)
    assert not mark.exists()
    if command in SCORING and command != "serve":  # it would serve until it is stopped
        invoke(*OPENING[command], "--trust")
        assert mark.exists()


@pytest.mark.slow(but=9)
@pytest.mark.parametrize("where", ["in the checkout", "above it", "outside of it"])
@pytest.mark.parametrize("what", GADGETS)
def test_functions_of_python_and_packages_are_not_the_users(theirs, what, where, monkeypatch):
    theirs(**GADGETS[what])
    Path("mine.py").write_text("from subprocess import run\n")
    folder = {"in the checkout": CHECKOUT, "above it": CHECKOUT.parent, "outside of it": Path.cwd()}[where]
    run = Path("theirs").resolve()
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.chdir(folder)
    done = invoke("eval", str(run), code=2)
    assert "is neither a component nor a file of the working directory" in done.stderr


def test_code_in_the_working_directory_is_used_as_in_the_users_own_files(theirs):
    theirs(rewards=[{"name": "mine.fn"}])
    Path("mine.py").write_text("def fn(completions):\n    return [1.0 for _ in completions]\n")
    done = invoke(*OPENING["eval"], "--json", code=0)
    assert json.loads(done.stdout)["accuracy"] == 1.0


@pytest.mark.parametrize("named", STRANGERS["named"], ids=lambda named: named["says"])
def test_programs_variables_and_servers_are_named(theirs, named):
    theirs(**named["changes"])
    assert named["says"] in refused("eval")


def test_a_value_that_is_set_on_the_command_line_is_trusted(theirs):
    theirs(reward_pool__env=["HF_TOKEN"])
    assert invoke(*OPENING["eval"], "--set", 'reward_pool.env=["LANG"]').exit_code == 0


def test_a_run_of_registered_parts_opens_without_trust(theirs):
    theirs()
    for command in ("eval", "sample", "export"):
        assert invoke(*OPENING[command]).exit_code == 0, command


def test_a_run_with_keys_of_the_former_sandbox_opens(theirs):
    theirs(reward_pool__sandbox="auto", reward_pool__readable=["/data"], rewards=[{"name": "exact", "network": False}])
    assert invoke(*OPENING["eval"]).exit_code == 0


@pytest.mark.parametrize("words", READING, ids=lambda words: words[0])
def test_reading_a_run_imports_nothing_of_it(theirs, words):
    mark = theirs(plugins__search_paths=[str(Path("theirs/evil").resolve())], rewards=[{"name": "chance.fn"}])
    invoke(*words)
    assert not mark.exists()


@pytest.mark.parametrize("command", OPENING)
def test_code_of_a_model_and_another_interpreter_are_refused(theirs, tmp_path, command):
    mark = theirs(model__trust_remote_code=True)
    model = Path("theirs/model")
    (model / "evil.py").write_text(EVIL.format(mark=str(mark)))
    config = json.loads((model / "config.json").read_text()) | {"auto_map": {"AutoConfig": "evil.Task"}}
    (model / "config.json").write_text(json.dumps(config))
    done = invoke(*OPENING[command], code=2)
    assert "trust_remote_code" in done.stderr
    assert not mark.exists()


def test_export_refuses_links_in_the_model(theirs, tmp_path):
    theirs()
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "id_rsa").write_text("private")
    for place in ("theirs/model/process_rewards", "theirs/model/base", "theirs/model/README.md"):
        path = Path(place)
        kept = path.read_bytes() if path.is_file() else None
        path.unlink(missing_ok=True)
        path.symlink_to(tmp_path / "secret" / ("id_rsa" if kept else ""))
        done = invoke(*OPENING["export"], code=6)
        assert "is a link" in done.stderr
        assert not Path("out").exists()
        path.unlink()
        if kept:
            path.write_bytes(kept)
