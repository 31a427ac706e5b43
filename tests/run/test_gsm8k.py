"""The walk-through of docs/gsm8k.md on rows of the same form: its own file, with data from files, on a processor."""

import json
import re
from pathlib import Path

import pytest

from retrain.config.load import load
from retrain.run.session import Resume, run
from retrain.training.chat import plain_text
from tests.small_runs import rows

FILE = Path(__file__).parents[2] / "configs" / "gpu" / "gsm8k_qwen3.toml"
SMALL = """
model.path="builtin:tiny" model.dtype=float32 torch.dtype=float32 rollout.engine=torch training.max_steps=2
training.batch_size=2 training.group_size=2 training.max_tokens=24 training.lr=1e-3 eval.every=2 checkpoint.every=2
reward_pool.workers=0 warmup.steps=0
""".split()  # noqa: SIM905


def problem(n):
    """A row as GSM8K has them: calculations in angle brackets, and the answer after four hashes."""
    text = f"Ann picks {n} apples and {n + 3} pears. How many pieces of fruit is that?"
    return {
        "question": text,
        "answer": f"She picks {n}+{n + 3}=<<{n}+{n + 3}={2 * n + 3}>>{2 * n + 3}.\n#### {2 * n + 3:,}",
    }


@pytest.fixture
def file(cwd):
    for name, numbers in (("train", range(500, 524)), ("test", range(900, 908))):
        (cwd / f"{name}.jsonl").write_text("".join(json.dumps(problem(n)) + "\n" for n in numbers))
    text = FILE.read_text().replace('name = "hub"', 'name = "jsonl"').replace("[hub]", "[jsonl]")
    text = re.sub(r'name = "openai/gsm8k".*\nconfig = .*\n', 'path = "train.jsonl"\n', text)
    text = text.replace('heldout_split = "test"', 'heldout_path = "test.jsonl"')
    changed = cwd / "run.toml"
    changed.write_text(re.sub(r"problems = \d+", "problems = 4", text))
    return changed


def test_the_walk_through_trains_and_evaluates_on_rows_of_the_same_form(file, tmp_path):
    loaded = load(file, [*SMALL, f'logging.dir="{tmp_path}/runs"', "logging.name=gsm8k", "logging.rollouts_every=1"])
    asked = loaded.task(0).heldout(4)[0]
    assert plain_text(asked.prompt).endswith(
        "pieces of fruit is that? Let's think step by step and end with the number alone."
    )
    folder = run(loaded, Resume(), lambda *_: None)
    last = rows(folder / "eval.jsonl")[-1]
    assert {"accuracy", "greedy_accuracy", "four/pass@4"} <= last.keys()
    assert list((folder / "best").glob("step-*"))
