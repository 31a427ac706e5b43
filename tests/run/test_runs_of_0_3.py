"""A run that version 0.3.0 wrote, with every key that has been removed since, opens and resumes."""

import json
import re
import shutil
from contextlib import closing

import pytest

from docs.measure import ROOT
from retrain.config.load import load
from retrain.errors import ConfigError, StorageError
from retrain.run.reopen import reopen
from retrain.run.session import Resume, run
from retrain.storage import checkpoint
from retrain.storage.run_files import with_current_keys
from tests.small_runs import rows

STORED = ROOT / "tests" / "data" / "run_of_0_3"
REMOVED = {"rollout": ("top_p", "top_k", "drain_timeout_s"), "eval": ("store",), "checkpoint": ("on_save_error",)}
"""Section -> keys of 0.3.0; `rows` of `stop_when` is another."""


@pytest.fixture
def folder(cwd):
    """Entered, with the model and runs/run, which SIGTERM stopped after two of four steps."""
    shutil.copytree(STORED / "model", "model")
    shutil.copytree(STORED / "run", "runs/run")
    return cwd


def test_the_stored_run_has_the_removed_keys_and_opens(folder):
    stored = json.loads((folder / "runs/run/config.resolved.json").read_text())
    assert all(key in stored[section] for section, keys in REMOVED.items() for key in keys)
    assert stored["training"]["stop_when"]["rows"] == 1
    with closing(reopen(folder / "runs/run", [], lambda event, details: None)) as context:
        assert context.trained.steps == 2
        weights = checkpoint.load(folder / "runs/run/checkpoints/step-000002")["policy"]["model"]
        for name, value in context.trained.policy.state_dict()["model"].items():
            assert value.equal(weights[name])


def test_another_number_of_rows_ended_the_run_at_another_step_and_is_refused(folder):
    file = folder / "runs/run/config.resolved.json"
    file.write_text(file.read_text().replace('"rows": 1', '"rows": 3'))
    with pytest.raises((ConfigError, StorageError), match=r"stop_when\] rows: unknown key"):
        reopen(folder / "runs/run", [], lambda event, details: None)


@pytest.mark.parametrize(("among", "kept"), [("reached", {}), ("all", {"among": "all"})])
def test_a_removed_parameter_is_left_out_if_it_has_the_value_of_today(among, kept):
    entry = {"name": "turn_returns", "params": {"among": among}}
    current = with_current_keys({"turn_returns": {"among": among}, "components": {"transform": [entry]}})
    assert current["turn_returns"] == current["components"]["transform"][0]["params"] == kept


def test_it_resumes_with_the_file_without_them(folder):
    text = (STORED / "run.toml").read_text()
    (folder / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match="unknown key") as caught:
        load("run.toml")
    refused = {problem.key.split()[-1] for problem in caught.value.problems}
    assert refused == {"rows", *(key for keys in REMOVED.values() for key in keys)}
    text = re.sub(rf"^({'|'.join(refused)}) = .*\n", "", text.replace(", rows = 1", ""), flags=re.MULTILINE)
    (folder / "run.toml").write_text(text)
    run(load("run.toml"), Resume("auto"), lambda event, details: None)
    assert [row["step"] for row in rows(folder / "runs/run/metrics.jsonl")] == [0, 1, 2, 3]
    assert rows(folder / "runs/run/metrics.jsonl")[:2] == rows(STORED / "run" / "metrics.jsonl")
    assert (folder / "runs/run/model/model.safetensors").is_file()
