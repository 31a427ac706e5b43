"""The plug-in MIX in plugins/ trains with its TOML."""

from pathlib import Path

import pytest

from retrain.config.load import load
from retrain.run.session import Resume, run
from tests.small_runs import rows

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory with the files under `plugins/`, and with the data."""
    copied = tmp_path / "plugins"
    copied.mkdir()
    for name in ("my_mix.py", "my_mix.toml", "expert_data.jsonl"):
        (copied / name).write_text((ROOT / "plugins" / name).read_text())
    monkeypatch.chdir(tmp_path)
    return copied


def test_it_trains_on_both_sorts_of_rows(folder, tmp_path):
    few = ("training.max_steps=2", "training.batch_size=2", "warmup.steps=12", "eval.problems=0", "model.dtype=float32")
    loaded = load(folder / "my_mix.toml", [*few, f'logging.dir="{tmp_path}/runs"', "reward_pool.workers=0"])
    assert loaded.division == (1, [4])
    steps = rows(run(loaded, Resume(), lambda *_: None) / "metrics.jsonl")
    assert [row["my_mix/passes"] for row in steps] == [4 / 24, 8 / 24]
    for row in steps:
        assert row["rollout/completions"] == 8
        policy = row.get("loss/ppo_clip", 0.0)
        assert row["loss/total"] == pytest.approx(0.9 * policy + 0.1 * row["loss/plugins.my_mix.my_sft"])


def test_its_settings_are_a_preset(folder, tmp_path):
    (tmp_path / "mine.toml").write_text(
        '[algorithm]\nalgorithm_mode = "plugins/my_mix.toml"\n[mix]\nmu = 0.3\n[training]\nbatch_size = 16\n'
    )
    loaded = load(tmp_path / "mine.toml")
    assert loaded.division == (12, [32])
    assert loaded.tables["mix"]["mu"] == 0.3
