"""Method and seed in the names of logs and of their folders."""

from pathlib import Path

import pytest

from retrain.campaign.verdict.run_names import run_of_file, run_of_name
from retrain.errors import DataError


@pytest.mark.parametrize(
    ("path", "method", "seed"),
    [
        ("qwen2.5-grpo-s0.jsonl", "qwen2.5-grpo", 0),
        ("beta0.1-s0.jsonl", "beta0.1", 0),
        ("grpo_seed=3.jsonl", "grpo", 3),
        ("grpo-s3-2026-11-27.jsonl", "grpo", 3),
        ("grpo-s3-global_step_100.jsonl", "grpo", 3),
        ("grpo_seed0/global_step_100/metrics.jsonl", "grpo", 0),
        ("grpo/s3/checkpoints/checkpoint-500/trainer_state.json", "grpo", 3),
        ("grpo/3.jsonl", "grpo", 3),
        ("seed0/grpo.jsonl", "grpo", 0),
        ("grpo_seed3/math500/metrics.jsonl", "grpo", 3),
    ],
)
def test_method_and_seed_of_a_log(tmp_path, monkeypatch, path, method, seed):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert run_of_file(Path(path)) == (method, seed)


@pytest.mark.parametrize(
    "path",
    [
        *("grpo.jsonl", "grpo-lr0.001.jsonl", "qwen2.5.jsonl", "grpo-lr1e-5.jsonl", "ppo2.jsonl"),
        *("grpo/global_step_100/metrics.jsonl", "grpo/2026-11-27/metrics.jsonl"),
    ],
)
def test_a_log_without_a_seed_is_refused(tmp_path, monkeypatch, path):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(DataError, match="does not end with a seed; rename it as in grpo-s3"):
        run_of_file(Path(path))


def test_the_folder_of_a_link_keeps_its_name(tmp_path):
    (tmp_path / "a7f3").mkdir()
    (tmp_path / "grpo_seed3").symlink_to(tmp_path / "a7f3")
    assert run_of_file(tmp_path / "grpo_seed3" / "metrics.jsonl") == ("grpo", 3)


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("grpo/seed3", ("grpo", 3)),
        ("grpo (seed=3)", ("grpo", 3)),
        ("qwen2.5-grpo 3", ("qwen2.5-grpo", 3)),
        ("grpo-s3-20261127", ("grpo", 3)),
    ],
)
def test_the_name_of_a_run_in_a_chart(name, run):
    assert run_of_name(name, "w.csv") == run


@pytest.mark.parametrize("name", ["grpo", "seed3", "3", "grpo-1e-5", "grpo2.5"])
def test_the_name_of_a_run_needs_method_and_seed(name):
    with pytest.raises(DataError, match=r"^w.csv: the name .* does not end with a seed"):
        run_of_name(name, "w.csv")
