"""The whole examples of docs/examples.md run, in small."""

import re
import shutil
from pathlib import Path

import pytest

from tests.forks import run_command
from tests.make_checkpoint import make_checkpoint
from tests.small_runs import rows

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "examples.md").read_text()
FILES = {name: text for text, name in re.findall(r"```\w+\n(# ([\w.]+)\n.*?)```", PAGE, re.DOTALL)}
(GRADED,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
SMALL = {
    "training.max_steps": 1,
    "training.batch_size": 2,
    "training.group_size": 2,
    "training.max_tokens": 8,
    "training.threads": 1,
    "warmup.steps": 0,
    "eval.problems": 0,
    "reward_pool.workers": 0,
    "logging.rollouts_every": 1,
}


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "graded.jsonl").write_text(GRADED * 20)
    (tmp_path / "problems.jsonl").write_text('{"question": "12 + 34 = ?", "answer": 46}\n' * 40)
    return tmp_path


def train(folder, file, *options, **changes):
    """Train a file of the page in small, and return its run directory."""
    sets = SMALL | {key.replace("__", "."): value for key, value in changes.items()}
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    run_command("train", file, "--plain", *options, *words, cwd=folder, code=0)
    return folder / "runs" / Path(file).stem


def test_every_file_of_the_page_is_run():
    assert set(FILES) == {"lora.toml", "graded.py", "graded.toml", "weighted.py", "weighted.toml"}


def test_the_tensor_advantage_trains(folder):
    (row,) = rows(train(folder, "weighted.toml") / "metrics.jsonl")
    assert row["step"] == 0


def test_the_rewards_read_a_column(folder):
    (row,) = rows(train(folder, "graded.toml", jsonl__heldout_fraction=0.0) / "metrics.jsonl")
    assert row["reward/failed"] == 0
    assert row["reward/graded.brief"] != 0


@pytest.mark.slow
def test_a_copied_run_of_lora_ends_with_the_same_bits(folder, tmp_path_factory):
    """The lost machine's run is a copy without what came after its first checkpoint."""
    model = make_checkpoint(folder / "model", chat=True)
    small = {
        "model__path": f'"{model}"',
        "model__dtype": '"float32"',
        "training__max_steps": 2,
        "jsonl__heldout_fraction": 0.0,
        "checkpoint__every": 1,
    }
    run = train(folder, "lora.toml", **small)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in ("lora.toml", "problems.jsonl"):
        shutil.copy(folder / name, elsewhere)
    lost = shutil.ignore_patterns("step-000002", "model", "status.json")
    shutil.copytree(run, elsewhere / "runs" / "lora", ignore=lost)
    checkpoint = elsewhere / "runs" / "lora" / "checkpoints" / "step-000001"
    copied = checkpoint.stat().st_ino
    moved = train(elsewhere, "lora.toml", "--resume", "auto", **small)
    assert checkpoint.stat().st_ino == copied  # it was read and not made again
    adapter = Path("model/adapter/adapter_model.safetensors")
    assert (moved / adapter).read_bytes() == (run / adapter).read_bytes()
