"""The campaign of a report card: what is taken from the method's file, and what the testbed decides."""

import tomllib
from pathlib import Path

import pytest

from retrain.algorithms.planning.gram_pattern import read_grams
from retrain.campaign.plan.load_campaign import load_campaign
from retrain.campaign.verdict.statistics import t_power
from retrain.errors import ConfigError
from retrain.lab import testbed

METHOD = """
model = { path = "builtin:tiny" }
task = { name = "addition" }
addition = { p_slip = 0.2 }
algorithm = { transform_mode = "gtpo_hicra" }
hicra = { alpha = 0.3 }
training = { max_steps = 500, minibatches = 2, lr = 1e-4 }
plugins = { search_paths = ["."] }
"""

ROOT = Path(__file__).parents[2]


@pytest.fixture
def method(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(METHOD)
    return file


def test_the_method_is_what_the_file_says_of_credit_and_optimization(method):
    data = tomllib.loads(testbed.card_toml(method, None, ["rare", "decoy"], 3, 2))
    grpo, mine = data["campaign"].pop("conditions")
    assert grpo == {"label": "grpo"}
    assert mine == {
        "label": "mine",
        "algorithm": {"transform_mode": "gtpo_hicra"},
        "hicra": {"alpha": 0.3},
        "optimizer": {"lr": 1e-4},
        "training": {"minibatches": 2},
    }
    facts = {"name": "testbed-mine", "tasks": ["rare", "decoy"], "seeds": 3, "baseline": "grpo", "slots": 2}
    assert data == {"campaign": facts, "plugins": {"search_paths": ["."]}}


def test_the_campaign_is_valid_on_all_tasks_and_enough_seeds_could_tell(method, tmp_path):
    file = tmp_path / "testbed.toml"
    file.write_text(testbed.card_toml(method, None, testbed.tasks_with_premise(), testbed.SEEDS, None))
    loaded = load_campaign(file)
    assert len(loaded.conditions) == 2 * len(testbed.tasks_with_premise())
    assert {*testbed.QUICK} < {*testbed.tasks_with_premise()}
    tasks = len(testbed.tasks_with_premise())
    assert t_power(testbed.SEEDS - 1, 2.0 * testbed.SEEDS**0.5, tasks, loaded.settings.alpha) > 0.9
    assert loaded.settings.look_sizes == (8, 9)
    steps = {config.config.training.max_steps for config in loaded.configs}
    assert max(steps) < 100, "the tasks decide, not the file of the method"
    assert {config.config.environment.name for config in loaded.configs} == {None, "calculator", "guess"}


def test_the_shipped_method_finds_phrases_in_the_testbeds_tasks(tmp_path):
    file = tmp_path / "testbed.toml"
    method = Path(__file__).parents[2] / "benchmarks" / "evidence" / "hicra.toml"
    file.write_text(testbed.card_toml(method, None, ["planning", "decoy"], 3, None))
    for config in load_campaign(file).configs:
        if config.config.algorithm.transform_mode == "hicra":
            grams = read_grams(config.signal("planning_mask").arguments["strategic_grams"], None)
            task = config.task(0)
            assert any(gram in (task.problem(number).solution or "") for gram in grams for number in range(8))


def test_controls_and_a_claim(method, tmp_path):
    tasks = testbed.tasks_with_premise(controls=True)
    assert {*testbed.tasks_with_premise()} - {*tasks} == {"calculator", "guess"}
    file = tmp_path / "testbed.toml"
    file.write_text(testbed.card_toml(method, None, tasks, 9, None, claim="rare", controls=True))
    loaded = load_campaign(file)
    labels = [one.method for one in loaded.conditions if one.task == "rare"]
    controls = ["other seeds", "oracle", "random credit", "reversed", "mine shuffled"]
    assert labels == ["grpo", "mine", *controls]
    assert (loaded.settings.primary, loaded.settings.claim) == ("mine", "rare")
    assert list(loaded.settings.controls) == controls
    assert loaded.control_of == {"mine shuffled": "mine"}
    mine, placebo = (loaded.configs[labels.index(label)].method() for label in ("mine", "mine shuffled"))
    assert placebo == mine.replace("hicra", "hicra > shuffled")


def test_controls_have_the_settings_of_another_baseline(method, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text(
        '[algorithm]\nadvantage_mode = "dca"\n[dca]\nbeta = 0.3\n[optimizer]\nlr = 2e-4\n[ppo_clip]\neps_high = 0.28\n'
    )
    data = tomllib.loads(testbed.card_toml(method, other, ["rare"], 3, None, controls=True))
    found = {one.pop("label"): one for one in data["campaign"]["conditions"]}
    assert found["other seeds"] == {**found["other"], "seed_offset": 1000}
    for label in ("oracle", "random credit", "reversed"):
        assert found[label]["optimizer"] == {"lr": 2e-4}
        assert found[label]["ppo_clip"] == {"eps_high": 0.28}
        assert "dca" not in found[label]
    file = tmp_path / "testbed.toml"
    file.write_text(testbed.card_toml(method, other, ["rare"], 3, None, controls=True))
    assert len(load_campaign(file).conditions) == 7


@pytest.mark.parametrize(
    ("keys", "credit"),
    [
        ('advantage_mode = "maxrl"', None),
        ('transform_mode = "tis"', None),
        ('transform_mode = ["gtpo", "tis"]', "grpo, gtpo > shuffled > tis"),
        ('algorithm_mode = "sepa"', "maxrl, sepa > gtpo > shuffled"),
        ('algorithm_mode = "vine"', "vine, shuffled"),
    ],
)
def test_the_placebo_of_a_method_is_its_own_credit_shuffled(keys, credit, method, tmp_path):
    method.write_text(f"[algorithm]\n{keys}\n")
    file = tmp_path / "testbed.toml"
    file.write_text(testbed.card_toml(method, None, ["planning"], 3, None, controls=True))
    loaded = load_campaign(file)
    found = {one.method: config.method() for one, config in zip(loaded.conditions, loaded.configs, strict=True)}
    assert ("mine shuffled" in found) is (credit is not None)
    if credit is not None:
        assert found["mine shuffled"] == f"{credit}, loss ppo_clip"


@pytest.mark.parametrize("name", ["dapo", "gspo", "dr_grpo", "dca", "hicra"])
def test_controls_fit_every_kind_of_baseline(name, method, tmp_path):
    file = tmp_path / "testbed.toml"
    for text in ((ROOT / "configs" / f"{name}.toml").read_text(), f'[algorithm]\nalgorithm_mode = "{name}"\n'):
        other = tmp_path / "other.toml"
        other.write_text(text)
        file.write_text(testbed.card_toml(method, other, ["rare"], 3, None, controls=True))
        assert len(load_campaign(file).conditions) == 7


def test_mistakes(method):
    with pytest.raises(ConfigError, match="--tasks: rare: this task is given twice"):
        testbed.card_toml(method, None, ["rare", "rare"], 3, None, controls=True)
    with pytest.raises(ConfigError, match=r'--claim: .*did you mean "rare"'):
        testbed.card_toml(method, None, ["rare", "decoy"], 3, None, claim="rar")
    with pytest.raises(ConfigError, match='did you mean "rare"'):
        testbed.card_toml(method, None, ["rar"], 3, None)
    with pytest.raises(ConfigError, match="the same method as the baseline, mine"):
        testbed.card_toml(method, method, ["rare"], 3, None)
    method.write_text("[algorithm]\nadvantage_mode = 3\n")
    with pytest.raises(ConfigError, match=r"mine\.toml:2:1"):
        testbed.card_toml(method, None, ["rare"], 3, None)
