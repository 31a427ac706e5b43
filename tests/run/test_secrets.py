"""A secret that was typed into a configuration stays in the two files that give the run again, and nowhere else."""

import gzip
import json

import pytest

from retrain.config.load import load
from retrain.report.run_page import write_report
from retrain.run.before.explain import explain
from retrain.run.export import export
from retrain.run.reopen import reopen

PARAM, COMMENT, FLAG = "canary-param-4711", "canary-comment-4712", "canary-flag-4713"
KEPT = {"config.toml", "config.resolved.json"}

JUDGE = """
def judge(completion, *, api_key, api_key_env="", url=""):
    return float(len(completion) % 2)
"""


def holds(path, canary):
    data = path.read_bytes()
    return canary.encode() in (gzip.decompress(data) if path.suffix == ".gz" else data)


def secretive(toml, tmp_path):
    (tmp_path / "judging.py").write_text(JUDGE)
    text = (
        toml.read_text() + f'\n[[rewards]]  # {COMMENT}\nname = "judging.judge"\nparams = {{ api_key = "{PARAM}" }}\n'
    )
    toml.write_text(text)
    return [f'plugins.search_paths=["{tmp_path}"]', f'rewards.2.params.url="https://me:{FLAG}@host"']


@pytest.fixture
def run(train, toml, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return train(*secretive(toml, tmp_path), "training.max_steps=2", "eval.problems=2", 'logging.trackers=["wandb"]')


@pytest.mark.slow
def test_nothing_secret_is_in_any_other_file_of_a_run(run, tmp_path):
    write_report(run)
    out = tmp_path / "out"
    export(reopen(run, (), lambda event, details: None, "weights", trust=True), out)
    files = [path for path in (*run.rglob("*"), *out.rglob("*")) if path.is_file()]
    names = {str(path.relative_to(tmp_path)) for path in files}
    assert any("wandb/" in name for name in names)
    assert {"out/README.md", "runs/run/report.html", "runs/run/model/README.md"} <= names
    for canary in (PARAM, COMMENT, FLAG):
        assert {path.name for path in files if holds(path, canary)} <= KEPT, canary
    assert all(holds(run / "config.toml", canary) for canary in (PARAM, COMMENT))
    assert not holds(run / "config.toml", FLAG)
    assert "# --set rewards.2.params.url=(hidden)" in (run / "config.toml").read_text()
    card = (out / "README.md").read_text()
    assert 'api_key = "(hidden)"' in card
    assert "https://(hidden)@host" in card
    assert json.loads((run / "config.resolved.json").read_text())["rewards"][2]["params"]["api_key"] == PARAM


def test_explain_shows_no_secret(toml, tmp_path):
    facts = json.dumps(explain(load(toml, secretive(toml, tmp_path))))
    assert '"api_key": "(hidden)"' in facts
    assert not any(canary in facts for canary in (PARAM, COMMENT, FLAG))


def test_a_secret_in_the_file_is_a_warning_with_its_place(toml, tmp_path):
    overrides = secretive(toml, tmp_path)
    found = [str(one) for one in load(toml, overrides).warnings]
    line = toml.read_text().splitlines().index(f'params = {{ api_key = "{PARAM}" }}') + 1
    (literal,) = [text for text in found if "api_key" in text]
    assert literal.startswith(f"{toml}:{line}:12: [[rewards.params]] api_key: looks like a secret")
    assert "set api_key_env to the name of an environment variable" in literal
    assert len([text for text in found if "looks like a secret" in text]) == 2
    assert not any(canary in text for text in found for canary in (PARAM, COMMENT, FLAG))
