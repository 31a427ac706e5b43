"""Scripts and settings that compare DCA with its baselines, here and in other trainers."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from retrain.adapters.core import portable_advantages
from retrain.registry import bind, names
from tests.forks import BIN
from tests.waiting import PATIENCE_S

CONFIGS = Path(__file__).parents[2] / "configs"
MODES = ("vanilla", "grpo_lp", "dca")
FAST = [
    "training.max_steps=1",
    "training.batch_size=2",
    "training.group_size=2",
    "training.max_tokens=8",
    "warmup.steps=1",
    "warmup.batch_size=1",
    "eval.problems=2",
    "reward_pool.workers=0",
]


def script(name, *arguments, cwd, **variables):
    paths = {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(CONFIGS.parent)}
    return subprocess.run(
        [str(CONFIGS / name), *arguments],
        cwd=cwd,
        env=os.environ | paths | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.mark.slow
def test_the_pipeline_prepares_trains_and_scores(tmp_path):
    settings = [word for one in FAST for word in ("--set", one)]
    sizes = {"BUILTIN_ONLY": "1", "TRAIN_SIZE": "10", "VAL_SIZE": "5", "DATA_DIR": "rows"}
    done = script("dca/pipeline.sh", *settings, cwd=tmp_path, **sizes)
    assert done.returncode == 0, done.stderr
    assert "AES from pass@1" in done.stdout
    assert "avg_tokens" in done.stdout
    assert len((tmp_path / "rows" / "train.jsonl").read_text().splitlines()) == 10
    config = json.loads((tmp_path / "runs" / "dca-pipeline-dca" / "config.resolved.json").read_text())
    assert [one["name"] for one in config["components"]["advantage"]] == ["dca"]


def test_a_file_of_results_is_only_scored(tmp_path):
    rows = [{"predictions": ["so 2", "3"], "lengths": [3, 4], "ground_truth": "2"}] * 3
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = script("dca/pipeline.sh", cwd=tmp_path, RESULTS_FILE="results.jsonl")
    assert done.returncode == 0, done.stderr
    assert "3 problems, 6 rollouts" in done.stdout
    assert [one.name for one in tmp_path.iterdir()] == ["results.jsonl"]


@pytest.mark.parametrize("mode", MODES)
def test_the_settings_for_verl_and_slime_name_advantages_and_rewards_of_this_package(mode):
    verl = yaml.safe_load((CONFIGS / "verl" / f"{mode}.yaml").read_text())
    slime = yaml.safe_load((CONFIGS / "slime" / f"{mode}.yaml").read_text())
    assert verl["algorithm"]["adv_estimator"] == f"retrain_{mode}"
    assert slime["retrain_mode"] == mode
    assert mode in portable_advantages()
    params = verl["algorithm"].get("retrain", {})
    assert params == slime.get("retrain_params", {})
    bind("advantage", mode, params)
    for reward in (verl["custom_reward_function"]["reward_kwargs"]["reward"], slime["retrain_reward"]):
        assert reward in names("reward")


@pytest.mark.parametrize(("trainer", "first"), [("verl", ["-m", "verl.trainer.main_ppo"]), ("slime", ["train.py"])])
def test_the_scripts_run_the_three_baselines_one_after_the_other(trainer, first, tmp_path):
    program = tmp_path / "program"  # in the place of another trainer's Python: writes down what it is called with
    program.write_text('#!/bin/sh\necho "$ADV_MODE" "$VERL_USE_EXTERNAL_MODULES" "$@" >> calls\n')
    program.chmod(0o755)
    done = script(f"{trainer}/run_baselines.sh", "more=1", cwd=tmp_path, PYTHON=str(program))
    assert done.returncode == 0, done.stderr
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    assert [call[0] for call in calls] == list(MODES)
    for mode, call in zip(MODES, calls, strict=True):
        assert " ".join(first) in " ".join(call)
        assert call[-1] == "more=1"
        assert any(mode in Path(word).stem for word in call[1:])
    other = script(f"{trainer}/run_baselines.sh", cwd=tmp_path, PYTHON=str(program), RUN_BASELINES="ppo")
    assert other.returncode == 2
    assert "no baseline ppo" in other.stderr
