# pyright: reportAttributeAccessIssue=false
"""A run that is opened again is read, never written."""

import json
import sys

import pytest

import retrain
from docs.measure import ROOT
from retrain.config.load import load
from retrain.errors import ConfigError
from retrain.registry.component import REGISTERED
from retrain.run.reopen import UNUSED, reopen, stored
from tests.run.test_resume import content

pytestmark = pytest.mark.numeric

ENGINE = """
from pathlib import Path

from retrain.types import Completion


class Writing:
    takes_adapters = True

    def __init__(self, run_dir):
        self.folder = run_dir / "vllm"
        self.folder.mkdir(parents=True)

    def sample(self, requests, sampling):
        one = Completion((5,), (-1.0,), "stop")
        return [[one] * request.count for request in requests]

    def load_weights(self, weights, version):
        (self.folder / "weights").write_text(str(len(weights)))

    def load_adapter(self, folder, version):
        assert (folder / "adapter_model.safetensors").is_file()
        self.adapter = folder
"""


def silent(event, details):
    pass


@pytest.mark.slow
def test_what_an_engine_hands_over_in_files_is_outside_the_run(train, tmp_path, monkeypatch):
    (tmp_path / "writing.py").write_text(ENGINE)
    monkeypatch.chdir(tmp_path)
    run = train("model.lora={r = 2}", "training.max_steps=2")
    before = content(run)
    for target in (run, run / "checkpoints" / "step-000002"):
        parts = reopen(target, ["rollout.engine=writing.Writing"], silent)
        folder = parts.sampler.folder
        assert (folder / "weights").is_file()
        assert parts.sampler.adapter.is_dir()
        parts.close()
        del parts
        assert content(run) == before
        assert not folder.exists()


def test_a_checkpoint_that_is_not_there_is_answered_with_those_that_are(tmp_path):
    for step in (50, 100):
        (tmp_path / "run" / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    with pytest.raises(ConfigError, match="is not a run; there are step-000050, step-000100"):
        reopen(tmp_path / "run" / "checkpoints" / "step-000075", (), silent)
    with pytest.raises(ConfigError, match="give runs/NAME or"):
        reopen(tmp_path / "nothing", (), silent)


@pytest.mark.slow
def test_an_older_checkpoint_is_used_with_a_warning(train):
    run = train("training.max_steps=4", "checkpoint.every=2")
    (run / "model" / "config.json").unlink()
    (run / "checkpoints" / "step-000004" / "manifest.json").write_text("{}")
    seen = []
    context = reopen(run, (), lambda event, details: seen.append((event, details)))
    context.close()
    assert context.trained.steps == 2
    assert any("falling back" in details["text"] and details["level"] == "warning" for _, details in seen[:1])


def test_a_run_that_ended_before_its_first_checkpoint_is_continued_by_its_own_command(tmp_path):
    """Its config.toml has the overrides of the command as comments, and the name of another run."""
    (tmp_path / "config.resolved.json").write_text("{}")
    (tmp_path / "status.json").write_text('{"outcome": "stopped"}')
    with pytest.raises(ConfigError, match="repeat its command with --resume auto, or that of its campaign"):
        reopen(tmp_path, [], lambda *_: None)


@pytest.mark.slow
def test_each_command_needs_the_components_that_it_uses_and_no_others(train, cwd, monkeypatch):
    """The advantage stands in the notebook that trained, the reward in a file that is gone."""
    (cwd / "paying.py").write_text("def paying(completion: str) -> float:\n    return len(completion) / 8\n")

    @retrain.advantage("halved")
    def halved(rewards, *, scale: float = 0.5):
        return (rewards - rewards.mean()) * scale

    settings = ("algorithm.advantage_mode=halved", "halved.scale=0.25", 'rewards=[{name="paying.paying"}]')
    run = train(*settings, "training.max_steps=1", "checkpoint.every=1")
    del REGISTERED["advantage", "halved"]
    reopen(run, (), silent, "scored").close()
    (cwd / "paying.py").unlink()
    monkeypatch.delitem(sys.modules, "paying")
    for target in (run, run / "checkpoints" / "step-000001"):
        assert reopen(target, (), silent, "weights").steps == 1
        reopen(target, (), silent, "sampler").close()
    with pytest.raises(ConfigError, match="paying"):
        reopen(run, (), silent, "scored")
    with pytest.raises(ConfigError, match="halved"):
        reopen(run, (), silent)


def test_every_recipe_opens_without_its_credit(tmp_path):
    """`UNUSED` leaves sections out; the defaults that take their place must fit the rest."""
    recipes = [*(ROOT / "configs").glob("*.toml"), *(ROOT / "configs" / "methods").glob("*.toml")]
    opened = 0
    for recipe in recipes:
        if "builtin:smollm2" in recipe.read_text() or recipe.stem == "opd":  # need files that are not here
            continue
        (tmp_path / "config.resolved.json").write_text(json.dumps(load(recipe).resolved()))
        for parts, unused in UNUSED.items():
            loaded = stored(tmp_path, ["rollout.engine=auto"] if parts == "weights" else [], False, unused)
            assert loaded.one("advantage").name == "grpo"
            opened += 1
    assert opened > 100
