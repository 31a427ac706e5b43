"""Recipes in the setting of a paper, on rows of the same form: their own files, with data from folders, on a CPU."""

import json
import re
from pathlib import Path

import pytest

from retrain.config.load import load
from retrain.run.session import Resume, run
from tests.small_runs import rows

pytest.importorskip("datasets", reason="`make test` does not install the hub's loader")

CONFIGS = Path(__file__).parents[2] / "configs" / "gpu"
SMALL = """
model.path="builtin:tiny" model.dtype=float32 torch.dtype=float32 rollout.engine=torch training.max_steps=1
training.batch_size=3 training.group_size=2 training.max_tokens=12 training.lr=1e-3 eval.every=0 checkpoint.every=0
reward_pool.workers=0 warmup.steps=0
""".split()  # noqa: SIM905


def question(number):
    return f"{number}+1?\n", str(number + 1)


FORMS = {
    "trl-lib/DeepMath-103K/train": lambda q, a: {"prompt": q, "solution": a},
    "di-zhang-fdu/AIME_1983_2024/train": lambda q, a: {"ID": q, "Question": q, "Answer": a},
    "nlile/hendrycks-MATH-benchmark/train": lambda q, a: {"problem": q + " ", "answer": a, "unique_id": q},
    "openai/gsm8k/test": lambda q, a: {"question": q, "answer": f"so {a}\n#### {a}"},
    "HuggingFaceH4/MATH-500/test": lambda q, a: {"problem": q, "answer": a, "solution": "so", "unique_id": q},
    "math-ai/amc23/test": lambda q, a: {"question": q, "answer": float(a)},
    "math-ai/aime25/test": lambda q, a: {"problem": q, "answer": a},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for number, (name, form) in enumerate(FORMS.items()):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(parents=True)
        numbers = range(100 * number, 100 * number + 40)
        path.write_text("".join(json.dumps(form(*question(one))) + "\n" for one in numbers))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "figures", "advantage"),
    [
        ("hicra_qwen2_deepmath", {"accuracy"}, "grpo_std"),
        ("dca_paper", {"accuracy", "gsm8k/avg@3", "math500/avg@3", "amc23/pass@10", "aime25/pass@10"}, "dca"),
    ],
)
def test_a_recipe_of_a_paper_trains_and_evaluates(name, figures, advantage, folder):
    text = (
        (CONFIGS / f"{name}.toml")
        .read_text()
        .replace('config = "main", ', "")
        .replace("fraction = 0.01", "fraction = 0.2")
    )
    (folder / f"{name}.toml").write_text(re.sub(r"\nproblems = [1-9]\d*", "\nproblems = 2", text))
    loaded = load(folder / f"{name}.toml", SMALL)
    assert loaded.one("advantage").name == advantage
    done = run(loaded, Resume(), lambda *_: None)
    assert figures <= rows(done / "eval.jsonl")[-1].keys()
    assert rows(done / "metrics.jsonl")[-1]["step"] == 0
