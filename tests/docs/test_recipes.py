"""The recipes of docs/compare.md read the files of TRL, verl, prime-rl and Weights & Biases as these write them."""

import json
import re
from pathlib import Path

import pytest

from retrain.campaign.comparison import compare
from tests.forks import run_source

pytestmark = pytest.mark.repository

PAGE = (Path(__file__).parents[2] / "docs" / "compare.md").read_text()
RESULTS = {"grpo": [0.50, 0.52, 0.49, 0.51, 0.50, 0.53], "dapo": [0.56, 0.57, 0.56, 0.58, 0.55, 0.58]}
RUNS = [(f"{method}_s{seed}", value) for method, values in RESULTS.items() for seed, value in enumerate(values)]


def written(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def trl(folder):
    """Checkpoints of GRPOTrainer: transformers writes their state, with training and evaluation in turn."""
    from transformers import TrainerState

    for name, value in RUNS:
        for step in (10, 20):
            history = [{"epoch": 0.5, "step": at, "loss": 0.1, "reward": 0.2} for at in range(5, step + 1, 5)]
            history += [{"epoch": 0.5, "step": at, "eval_reward": value * at / 20} for at in range(10, step + 1, 10)]
            checkpoint = folder / "out" / name / f"checkpoint-{step}"
            checkpoint.mkdir(parents=True)
            TrainerState(global_step=step, log_history=history).save_to_json(str(checkpoint / "trainer_state.json"))


def verl(folder):
    """The file logger: a row for each step, with validation only in some."""
    for name, value in RUNS:
        data = {step: {"actor/pg_loss": 0.1, "timing_s/step": 2.0} for step in range(21)}
        for step in (0, 10, 20):
            data[step]["val-core/openai/gsm8k/acc/mean@1"] = value * (1 + step) / 21
        rows = [{"step": step, "elapsed_seconds": 2.0 * step, "data": data[step]} for step in data]
        written(folder / "logs" / f"{name}.jsonl", rows)


def prime(folder):
    """The file monitor appends to metrics.jsonl; a run that was resumed at step 10 goes back."""
    for name, value in RUNS:
        rows = [{"step": step, "time": 1e9 + step, "loss/mean": 0.1} for step in range(21)]
        evals = [{"step": step, "time": 1e9, "eval/gsm8k/all/avg@1": value * (1 + step) / 21} for step in (0, 10, 20)]
        if name == "dapo_s3":
            evals[1:1] = [{"step": 20, "time": 1e8, "eval/gsm8k/all/avg@1": 0.9}]
        written(folder / "outputs" / name / "metrics.jsonl", [*rows, *evals])


def wandb(folder):
    head = ",".join(f'"{name} - eval/accuracy{end}"' for name, _ in RUNS for end in ("", "__MIN", "__MAX"))
    rows = [
        f"{step}," + ",".join(f'"{value * step / 20}"' if step % 10 == 0 else "" for _, value in RUNS for _ in range(3))
        for step in (5, 10, 20)
    ]
    (folder / "wandb.csv").write_text(f'"Step",{head}\n' + "\n".join(rows))


@pytest.mark.parametrize(
    ("title", "write"),
    [("from_trl.py", trl), ("from_verl.py", verl), ("from_prime_rl.py", prime), ("from_wandb.py", wandb)],
)
def test_a_recipe_makes_a_table_with_the_results_of_all_runs(tmp_path, title, write):
    write(tmp_path)
    (recipe,) = re.findall(rf'```python title="{title}"\n(.*?)```', PAGE, re.DOTALL)
    run_source(recipe, cwd=tmp_path, code=0)
    found = compare([tmp_path / "results.csv"])
    assert {label: found.first.values(label) for label in found.first.conditions} == {
        label: pytest.approx(values) for label, values in RESULTS.items()
    }
    (one,) = found.comparisons
    assert (one.condition, one.against, one.kind) == ("dapo", "grpo", "better")
    assert ("goes back from step 20" in found.first.steps_note) is (write is prime)
