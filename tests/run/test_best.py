"""`[checkpoint] best` keeps the best evaluation; a metric ends a run by `[training] stop_when`, and a resumed one."""

import json
from contextlib import closing

import pytest

from retrain.config.load import load
from retrain.config.sections.heldout import StopWhen
from retrain.errors import ConfigError
from retrain.report.run_summary import status
from retrain.run.evaluate import measure
from retrain.run.reopen import each_checkpoint, reopen
from retrain.run.session import Resume
from retrain.run.stop_signal import StopCondition
from retrain.storage import checkpoint
from retrain.storage.run_directory import RunDirectory
from tests.small_runs import digest, rows

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
    with closing(reopen(run / "best", (), nothing)) as parts:
        again = measure(parts, parts.trained.steps).row
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


def ended(tmp_path, values, **settings):
    """(the step that the values end a run at, the reason)."""
    directory = RunDirectory(tmp_path / "none", "new", load_config(tmp_path).checkpoint, nothing)
    watch = StopCondition(StopWhen(metric="reward/mean", **settings), directory, nothing)
    for step, value in enumerate(values):
        watch("step", {"step": step} | ({} if value is None else {"reward/mean": value}))
        if directory.stop_reason:
            return step + 1, directory.stop_reason
    return 0, ""


@pytest.mark.parametrize(
    ("values", "settings", "expected"),
    [
        ((0.1, 0.5, 0.9), {"above": 0.5}, (2, "after 2 steps reward/mean = 0.5 >= 0.5")),
        ((0.1, 0.5, 0.2), {"below": 0.05}, (0, "")),
        ((None, 0.1, None, 0.7), {"above": 0.5}, (4, "after 4 steps reward/mean = 0.7 >= 0.5")),
        ((0.1, 0.3, 0.2, 0.3, 0.4), {"patience": 2}, (4, "after 4 steps reward/mean = 0.3 <= 0.3, 2 times in a row")),
    ],
)  # fmt: skip
def test_when_a_metric_ends_a_run(tmp_path, values, settings, expected):
    assert ended(tmp_path, values, **settings) == expected


def test_a_run_that_ends_early_is_finished_and_stays_so_when_it_is_resumed(train):
    early = ("training.stop_when={metric='tokens/response', above=0.0}", "training.max_steps=9")
    run = train(*early)
    assert [row["step"] for row in rows(run / "metrics.jsonl")] == [0]
    assert rows(run / "eval.jsonl")[-1]["step"] == 1
    assert checkpoint.step_of(checkpoint.every(run / "checkpoints")[0]) == 1
    facts = status(run)
    assert (facts["state"], facts["stopped"][:13]) == ("finished", "after 1 steps")
    assert json.loads((run / "status.json").read_text())["stopped"] == facts["stopped"]
    before = digest(run)
    train(*early, resume=Resume("auto"))
    assert (len(rows(run / "metrics.jsonl")), digest(run)) == (1, before)
