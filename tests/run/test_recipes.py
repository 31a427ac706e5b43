"""Every shipped recipe: valid, the same algorithm as its preset, and able to train."""

import json
from pathlib import Path

import pytest
import tomli

from retrain.config.load import load
from retrain.config.presets import FOLDER, preset_names
from retrain.config.reported_metrics import metric_problem
from retrain.run.before.explain import explain
from retrain.run.session import Resume, run

ROOT = Path(__file__).parents[2]
RECIPES = sorted({*(ROOT / "configs").glob("*.toml")} - {ROOT / "configs" / "smollm2.toml"})
NF4 = ROOT / "configs" / "gpu" / "32b_nf4.toml"
STUDIES = {ROOT / "configs" / "gpu" / f"{name}.toml" for name in ("gsm8k_qwen3", "hicra_qwen2_deepmath", "dca_paper")}
"""Recipes of a walk-through or of a paper's setting, which have tests of their own."""
GPU = sorted({*(ROOT / "configs" / "gpu").glob("[!8]*.toml")} - STUDIES - {NF4})
RANKS = sorted((ROOT / "configs" / "gpu").glob("8b_*.toml"))
QWEN3_8B = {
    "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
METHODS = sorted((ROOT / "configs" / "methods").glob("*.toml"))
SURROUNDINGS = ("model", "task", "hub", "reward_pool", "training", "eval", "checkpoint")
CREDIT = ("advantage", "transform", "algorithm", "uncertainty", "filter", "loss", "reduction")
TINY = """
training.max_steps=2 training.batch_size=2 training.group_size=4 training.threads=1
warmup.steps=12 warmup.batch_size=8 warmup.warmup_steps=2 warmup.problems=96
eval.problems=4 eval.every=0 checkpoint.every=0 reward_pool.workers=0
""".split()  # noqa: SIM905
NO_VLLM = ("rollout.engine=auto", "task.name=addition")
"""Engine and data of the GPU recipes are extras that a test machine need not have."""
EXAMPLES = {"quickstart", "calculator", "grid"}
"""Recipes that show a task or an environment, and no algorithm of their own."""
EXPERT = "configs/data/addition_expert.jsonl"
OWN = {
    "grpo_lp": {"grpo_lp": {"gamma"}},
    "prime": {"prime": {"lr"}},
    "prime_lora": {"prime": {"lr"}},
    "chord": {"mix": {"warmup", "decay", "peak", "valley"}},
    "sepa": {"sepa": {"steps", "delay_steps"}},
}
"""Keys of a GPU recipe's algorithm that its size or its length decides."""


def stem(file):
    return file.stem


def algorithm_of(file):
    """A recipe without what surrounds its algorithm."""
    return {key: table for key, table in tomli.loads(file.read_text()).items() if key not in SURROUNDINGS}


@pytest.fixture(autouse=True)
def root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("file", [file for file in RECIPES if file.stem in preset_names()], ids=stem)
def test_a_recipe_and_its_preset_resolve_to_the_same_components(file, tmp_path):
    preset = tmp_path / "preset.toml"
    preset.write_text(f'[algorithm]\nalgorithm_mode = "{file.stem}"\n')
    overrides = [f"{key}={json.dumps(value)}" for key, value in _expert(file).items()]
    recipe, expanded = load(file), load(preset, overrides)
    assert credit_of(recipe) == credit_of(expanded)


def credit_of(loaded):
    """Components from rewards to loss with their parameters, without loss terms that are switched off."""
    described = loaded.resolved()["components"]
    return {kind: [one for one in described.get(kind, []) if one["params"].get("weight") != 0] for kind in CREDIT}


def _expert(file):
    """The expert data that a recipe names: a preset leaves that to its user."""
    expert = tomli.loads(file.read_text()).get("expert", {})
    return {f"expert.{key}": value for key, value in expert.items() if key == "path"}


@pytest.mark.parametrize("file", GPU, ids=stem)
def test_a_gpu_recipe_is_the_same_algorithm(file):
    found = algorithm_of(file)
    expert = [f"expert.path={EXPERT}"] if found.get("expert", {}).pop("path", None) else []
    loaded = load(file, [*NO_VLLM, *expert])
    assert loaded.warnings == ()
    assert loaded.config.model.gradient_checkpointing
    assert (loaded.config.model.lora is not None) == file.stem.endswith("_lora")
    assert found.pop("rollout")["engine"] == "vllm"
    preset = tomli.loads((FOLDER / f"{file.stem.removesuffix('_lora')}.toml").read_text())
    for key in ("rewards", "vllm"):
        found.pop(key, None)
    for key in ("rewards", "rollout"):
        preset.pop(key, None)
    assert without_own(file.stem, found) == without_own(file.stem, preset)


def test_every_recipe_of_an_algorithm_has_a_twin_for_a_gpu():
    assert {file.stem for file in RECIPES} - EXAMPLES == {file.stem for file in GPU}


@pytest.mark.slow
@pytest.mark.parametrize(("file", "needed"), zip(RANKS, (8, 1), strict=True), ids=["full", "lora"])
def test_a_recipe_for_ranks_fits_gpus_of_80_gb_by_the_estimate(file, needed, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    loaded = load(file, ["task.name=addition", f'model.path="{tmp_path}"'])
    assert loaded.warnings == ()

    def gigabytes(ranks):
        facts = explain(loaded, ranks)["model"]
        return sum(facts["memory_mb_without_prompts_about"].values()) / 1000

    assert gigabytes(needed) < 60
    assert (gigabytes(1) > 80) == (needed > 1)
    assert gigabytes(16) < gigabytes(8)


def test_a_base_of_4_bits_fits_one_gpu_of_80_gb_by_the_estimate(tmp_path):
    shape = {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25600}
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B | shape))
    (tmp_path / "whole.toml").write_text(NF4.read_text().replace("quantization", "# quantization"))

    def gigabytes(file):
        loaded = load(file, ["task.name=addition", f'model.path="{tmp_path}"'])
        assert loaded.warnings == ()
        return sum(explain(loaded)["model"]["memory_mb_without_prompts_about"].values()) / 1000

    assert gigabytes(NF4) < 75
    assert gigabytes(tmp_path / "whole.toml") > 80


def test_the_length_penalty_fits_the_budget():
    loaded = load(ROOT / "configs" / "gpu" / "grpo_lp.toml", NO_VLLM)
    gamma = loaded.one("advantage").params["gamma"]
    assert gamma * loaded.config.training.max_tokens < 1 <= 1e-3 * 2048


def without_own(stem, tables):
    own = OWN.get(stem, {})
    return {
        name: {key: value for key, value in table.items() if key not in own[name]} if name in own else table
        for name, table in tables.items()
    }


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("file", RECIPES, ids=stem)
def test_a_recipe_trains(file, tmp_path):
    short = [] if "environment" in tomli.loads(file.read_text()) else ["training.max_tokens=12"]
    loaded = load(file, [*TINY, *short, f'logging.dir="{tmp_path}"'])
    rows = trained(loaded)
    assert len([row for row in rows if "reward/mean" in row]) == 2
    assert list((loaded.directory / "model").glob("*.safetensors"))


def trained(loaded):
    """Train; return the rows of metrics.jsonl, whose names the registry of metrics has for this run."""
    folder = run(loaded, Resume(), lambda event, details: None)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row} - {"step"}
    assert [name for name in names if metric_problem(name, loaded)] == []
    return rows


def method_overrides(file, folder):
    """What a test machine lacks: the model that a teacher's recipe is trained after."""
    (folder / "teacher").mkdir()
    (folder / "teacher" / "config.json").write_text("{}")
    return [f'teacher.model="{folder}/teacher"'] if "runs/base/model" in file.read_text() else []


@pytest.mark.parametrize("file", METHODS, ids=stem)
def test_a_recipe_of_a_method_is_valid(file, tmp_path):
    assert load(file, method_overrides(file, tmp_path)).warnings == ()
    assert (file.stem == "base") or f"configs/methods/{file.name}" in file.read_text()


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("file", METHODS, ids=stem)
def test_a_recipe_of_a_method_trains(file, tmp_path):
    there = [f'logging.dir="{tmp_path}"', "logging.name=base"]
    overrides = method_overrides(file, tmp_path)
    if overrides:
        run(load(METHODS[0].parent / "base.toml", [*TINY, *there]), Resume(), lambda event, details: None)
        overrides = [f'teacher.model="{tmp_path}/base/model"']
    short = [] if "environment" in tomli.loads(file.read_text()) else ["training.max_tokens=12"]
    changed = [*TINY, *short, *there[:1], *overrides, "reward_pool.workers=1"]
    rows = trained(load(file, changed))
    assert len([row for row in rows if "reward/mean" in row]) == 2
    assert not any(row.get("update/nonfinite") for row in rows)
