"""`[training] stop_when`: a metric ends a run, and a resumed run ends at the same step."""

from __future__ import annotations

import json
import re

import pytest

from retrain.config.load import load
from retrain.config.sections.heldout import StopWhen
from retrain.errors import ConfigError
from retrain.report.run_summary import status
from retrain.run.session import Resume
from retrain.run.stop_signal import StopCondition
from retrain.storage import checkpoint
from retrain.storage.run_directory import RunDirectory
from tests.small_runs import digest, rows


def nothing(event, details):
    """An observer of nothing."""


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


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ('{ metric = "eval/acc", above = 1.0 }', 'no evaluation measures "eval/acc"'),
        ('{ metric = "reward/mean" }', "needs exactly one of above, below and patience"),
    ],
)  # fmt: skip
def test_a_mistake_in_it_is_found(tmp_path, written, says):
    (tmp_path / "run.toml").write_text(f"[training]\nstop_when = {written}\n")
    with pytest.raises(ConfigError, match=re.escape(says)):
        load(tmp_path / "run.toml")


def load_config(folder):
    (folder / "plain.toml").write_text("")
    return load(folder / "plain.toml").config
