"""`[checkpoint] best`: the state whose evaluation was best, apart from the newest ones."""

from __future__ import annotations

import json
import re

import pytest

from retrain.config.load import load
from retrain.errors import ConfigError
from retrain.run.evaluate import measure
from retrain.run.reopen import each_checkpoint, reopen
from retrain.storage import checkpoint
from retrain.storage.run_directory import RunDirectory
from tests.small_runs import rows

KEEP_ALL = ("checkpoint.keep=9", 'checkpoint.best="eval/accuracy"', "eval.every=1", "training.max_steps=3")


def nothing(event, details):
    """An observer of nothing."""


def best_step(run):
    [path] = checkpoint.every(run / "best")
    return checkpoint.step_of(path)


@pytest.mark.slow
def test_the_best_evaluation_is_kept_and_can_be_used(train):
    run = train(*KEEP_ALL, "optimizer.lr=0.01")
    measured = rows(run / "eval.jsonl")
    expected = max(measured[1:], key=lambda row: (row["accuracy"], -row["step"]))
    assert best_step(run) == expected["step"]
    parts = reopen(run / "best", (), nothing)
    try:
        again = measure(parts, parts.trained.steps).row
    finally:
        parts.close()
    assert (again["step"], again["accuracy"]) == (expected["step"], expected["accuracy"])


@pytest.mark.parametrize(("values", "kept"), [((0.1, 0.3, 0.2), [1, 2, 2]), ((0.3, 0.3, 0.1), [1, 1, 1])])
def test_the_greatest_value_is_best_and_the_first_of_equals_stays(tmp_path, values, kept):
    config = load_config(tmp_path)
    found = []
    with RunDirectory(tmp_path / "run", "new", config.checkpoint, nothing) as directory:
        directory.write_config("", {"config": {}})
        for step, value in enumerate(values, 1):
            directory.append("eval.jsonl", {"step": step, "aime/accuracy": value})
            if directory.is_best("aime/accuracy", step):
                directory.save_checkpoint(step, {"loop": {"step": step}}, best=True)
            found.append(best_step(tmp_path / "run"))
    assert found == kept


def test_a_best_of_steps_that_are_done_again_goes(tmp_path):
    config = load_config(tmp_path)
    with RunDirectory(tmp_path / "run", "new", config.checkpoint, nothing) as directory:
        directory.write_config("", {"config": {}})
        directory.append("eval.jsonl", {"step": 2, "accuracy": 0.5})
        directory.save_checkpoint(1, {"loop": {"step": 1}})
        directory.save_checkpoint(2, {"loop": {"step": 2}}, best=True)
    with RunDirectory(tmp_path / "run", "resume", config.checkpoint, nothing) as directory:
        directory.restore()
    assert checkpoint.every(tmp_path / "run" / "best") == []


@pytest.mark.parametrize(
    ("best", "says"),
    [
        ("eval/acuracy", 'no evaluation measures "eval/acuracy"; did you mean "eval/accuracy"?'),
        ("accuracy", "[checkpoint] best"),
    ],
)
def test_a_best_that_nothing_measures_is_refused(toml, best, says):
    toml.write_text(toml.read_text() + '[[eval.sets]]\nname = "hot"\n')
    load(toml, ['checkpoint.best="eval/hot/accuracy"'])
    with pytest.raises(ConfigError, match=re.escape(says)):
        load(toml, [f'checkpoint.best="{best}"'])


@pytest.mark.slow
def test_every_checkpoint_is_evaluated_and_a_damaged_one_left_out(train):
    run = train("checkpoint.keep=9", "checkpoint.every=1", "eval.every=1", "training.max_steps=3")
    next((run / "checkpoints" / "step-000002").glob("*.safetensors")).write_bytes(b"cut")
    said = []
    found = []
    for parts in each_checkpoint(run, (), lambda event, details: said.append(details.get("text", ""))):
        found.append(json.loads(json.dumps(measure(parts, parts.trained.steps).row)))
    stored = [row for row in rows(run / "eval.jsonl") if row["step"] in (1, 3)]
    assert found == stored, "what was measured in training is measured again"
    assert any("step-000002" in text and "it is skipped" in text for text in said)


def test_a_run_without_checkpoints_has_none_to_evaluate(tmp_path):
    with pytest.raises(ConfigError, match="has no valid checkpoint"):
        next(each_checkpoint(tmp_path, (), nothing))


def load_config(folder):
    (folder / "plain.toml").write_text("")
    return load(folder / "plain.toml").config
