"""Run directories that somebody else hands over: opening one runs none of its code and follows none of its links."""

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from retrain.cli.main import app
from retrain.config.load import load
from retrain.run.session import Resume, run
from retrain.storage.own_runs import is_own, sign
from tests.small_runs import TOML

EVIL = "open({mark!r}, 'w').write('ran')\ndef fn(*a, **k):\n    return 1.0\nclass Task:\n    pass\n"
OPENING = {
    "eval": ["eval", "theirs"],
    "sample": ["sample", "theirs", "1+1?"],
    "export": ["export", "theirs", "out"],
    "play": ["play", "theirs"],
    "audit": ["audit", "theirs", "--batches", "4", "--continuations", "2"],
}
READING = (["status", "theirs"], ["report", "theirs"], ["credit", "theirs"])


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


def invoke(words):
    return CliRunner().invoke(app, words)


def entry(name, **more):
    return {"name": name, "params": {}, "weight": 1.0, **more}


EVIL_KEYS = {
    "a reward": {"rewards": [{"name": "chance.fn"}]},
    "a task": {"task__name": "chance.Task"},
    "a transform": {"algorithm__transform_mode": "chance.fn"},
    "an advantage": {"algorithm__advantage_mode": "chance:fn"},
    "an engine": {"rollout__engine": "chance.Task"},
    "an environment": {"environment__name": "chance.fn"},
    "a loss": {"loss": [{"name": "chance.fn"}]},
    "a curriculum": {"training__curriculum": "chance.Task"},
    "a set of an evaluation": {"eval__sets": [{"name": "more", "task": "chance.Task"}]},
    "one of several tasks": {"tasks": [entry("chance.Task", label="a"), entry("addition", label="b")]},
    "one of several environments": {"environments": [entry("chance.fn", label="a", task="addition", task_params={})]},
    "a tool": {"environment__name": "tools", "tools": {"functions": ["chance.fn"]}},
    "a parser": {
        "environment__name": "tools",
        "tools": {"functions": ["retrain.environments.tools.python"], "parser": "chance:fn"},
    },
    "a detector": {"planning": {"detector": "chance.fn"}, "algorithm__transform_mode": "hicra"},
}


@pytest.mark.parametrize("command", OPENING)
@pytest.mark.parametrize("what", EVIL_KEYS)
def test_code_that_a_run_names_is_not_imported_unless_it_is_trusted(theirs, command, what):
    mark = theirs(plugins__search_paths=[str(Path("theirs/evil").resolve())], **EVIL_KEYS[what])
    done = invoke(OPENING[command])
    assert not mark.exists(), done.output
    if done.exit_code:
        assert done.exit_code == 2, done.output
        assert "chance" in done.stderr
        assert "--trust" in done.stderr


def test_what_would_be_imported_is_named_and_trust_imports_it(theirs):
    mark = theirs(plugins__search_paths=[str(Path("theirs/evil").resolve())], rewards=[{"name": "chance.fn"}])
    refused = invoke(OPENING["eval"])
    assert refused.exit_code == 2
    assert f'"chance.fn" imports the module chance, from {Path("theirs/evil/chance.py").resolve()}' in refused.stderr
    assert not mark.exists()
    invoke([*OPENING["eval"], "--trust"])
    assert mark.exists()


@pytest.mark.parametrize("command", ["sample", "export"])
def test_a_model_is_sampled_and_exported_without_what_scored_it(theirs, command):
    mark = theirs(
        rewards=[{"name": "chance.fn"}], environment__name="chance.fn", environment__python="theirs/evil/python"
    )
    assert invoke(OPENING[command]).exit_code == 0
    assert not mark.exists()


def test_a_run_of_registered_parts_opens_without_trust(theirs):
    theirs()
    for command in ("eval", "sample", "export"):
        assert invoke(OPENING[command]).exit_code == 0, command


@pytest.mark.parametrize("words", READING, ids=lambda words: words[0])
def test_reading_a_run_imports_nothing_of_it(theirs, words):
    mark = theirs(plugins__search_paths=[str(Path("theirs/evil").resolve())], rewards=[{"name": "chance.fn"}])
    invoke(words)
    assert not mark.exists()


@pytest.mark.parametrize("command", OPENING)
def test_code_of_a_model_and_another_interpreter_are_refused(theirs, tmp_path, command):
    mark = theirs(model__trust_remote_code=True)
    model = Path("theirs/model")
    (model / "evil.py").write_text(EVIL.format(mark=str(mark)))
    config = json.loads((model / "config.json").read_text()) | {"auto_map": {"AutoConfig": "evil.Task"}}
    (model / "config.json").write_text(json.dumps(config))
    done = invoke(OPENING[command])
    assert done.exit_code == 2, done.output
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
        done = invoke(OPENING["export"])
        assert done.exit_code == 6, done.output
        assert "is a link" in done.stderr
        assert not Path("out").exists()
        path.unlink()
        if kept:
            path.write_bytes(kept)


def test_a_signature_holds_for_one_place_one_directory_and_one_configuration(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = train("training.max_steps=0")
    assert is_own(run)
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    assert not is_own(run), "a module name means another file here"
    monkeypatch.chdir(tmp_path)
    copy = shutil.copytree(run, tmp_path / "copy")
    assert not is_own(copy)
    (run / "config.resolved.json").write_text((run / "config.resolved.json").read_text() + " ")
    assert not is_own(run)
    sign(run)
    assert is_own(run)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another-user"))
    assert not is_own(run)
    key = tmp_path / "another-user" / "retrain"
    sign(run)
    assert is_own(run)
    os.chmod(key / "signing-key", 0o644)
    assert not is_own(run), "somebody else could have read the key"
