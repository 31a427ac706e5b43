"""verl cannot be installed here. The stand-in has the behavior of verl/trainer/ppo/core_algos.py
(`register_adv_est`, `get_adv_estimator_fn`), of `compute_advantage` in verl/trainer/ppo/ray_trainer.py (keywords of
an estimator) and of verl/__init__.py (VERL_USE_EXTERNAL_MODULES), as far as an adapter meets them."""

import os
import runpy
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
import torch

from retrain.adapters import compute_advantage, compute_advantage_for_verl, reward_for_verl, verl
from tests.forks import PYTHON

pytestmark = pytest.mark.numeric

CORE = """
ADV_ESTIMATOR_REGISTRY = {}

def register_adv_est(name_or_enum):
    def decorator(fn):
        if ADV_ESTIMATOR_REGISTRY.get(name_or_enum, fn) != fn:
            raise ValueError("registered already")
        ADV_ESTIMATOR_REGISTRY[name_or_enum] = fn
        return fn
    return decorator

def get_adv_estimator_fn(name_or_enum):
    return ADV_ESTIMATOR_REGISTRY[name_or_enum]
"""
PACKAGE = """
import importlib, os
for name in filter(None, os.getenv("VERL_USE_EXTERNAL_MODULES", "").split(",")):
    importlib.import_module(name)
"""
UID = np.array(["p", "q", "p", "q", "p", "q"], dtype=object)
SCORES, LENGTHS = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0], [2, 5, 4, 1, 3, 5]


@pytest.fixture
def core(monkeypatch):
    """verl's registry with the adapter's estimators in it."""
    names = ["verl", "verl.trainer", "verl.trainer.ppo", "verl.trainer.ppo.core_algos"]
    for name in names:
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    exec(CORE, vars(module))
    verl.register()
    return module


@pytest.fixture
def batch():
    """As verl has it: right-padded responses, the reward at the last token."""
    mask = torch.tensor([[int(t < n) for t in range(5)] for n in LENGTHS])
    rewards = torch.zeros(6, 5)
    rewards[torch.arange(6), torch.tensor(LENGTHS) - 1] = torch.tensor(SCORES)
    return {"token_level_rewards": rewards, "response_mask": mask, "index": UID}


@pytest.mark.parametrize("mode", ["grpo", "grpo_std", "maxrl", "rloo", "grpo_lp", "dca", "dca_grpo", "dca_rloo"])
def test_an_estimator_is_the_advantage_at_every_token(core, batch, mode):
    advantages, returns = core.get_adv_estimator_fn(f"retrain_{mode}")(**batch, config=None, reward_baselines=None)
    expected = compute_advantage(SCORES, LENGTHS, UID, mode)
    assert torch.equal(advantages, expected[:, None] * batch["response_mask"])
    assert torch.equal(returns, advantages)
    assert advantages[0, 2:].abs().sum() == 0


def test_parameters_come_from_the_algorithm_section(core, batch):
    estimator = core.get_adv_estimator_fn("retrain_dca")
    half, _ = estimator(**batch, config={"adv_estimator": "retrain_dca", "retrain": {"beta": 0.5}})
    assert torch.equal(half, compute_advantage_for_verl(**batch, beta=0.5)[0])
    default, _ = estimator(**batch, config={"adv_estimator": "retrain_dca"})
    assert not torch.equal(half, default)


def test_registering_twice_changes_nothing(core):
    before = dict(core.ADV_ESTIMATOR_REGISTRY)
    assert verl.register() == sorted(before)
    runpy.run_path(verl.__file__)  # as verl does for a reward function that is given by file
    assert before == core.ADV_ESTIMATOR_REGISTRY


def test_verl_loads_the_adapter_by_its_environment_variable(tmp_path):
    ppo = tmp_path / "verl" / "trainer" / "ppo"
    ppo.mkdir(parents=True)
    (ppo / "core_algos.py").write_text(CORE)
    (tmp_path / "verl" / "__init__.py").write_text(PACKAGE)
    script = "import verl, verl.trainer.ppo.core_algos as core; print(sorted(core.ADV_ESTIMATOR_REGISTRY))"
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)]),
        "VERL_USE_EXTERNAL_MODULES": "retrain.adapters.verl",
    }
    done = subprocess.run([PYTHON, "-c", script], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert "'retrain_dca'" in done.stdout, done.stderr
    assert "'retrain_maxrl'" in done.stdout


@pytest.mark.parametrize(
    ("solution", "expected"),
    [(r"\boxed{12}", {"score": 1.0, "acc": 1.0, "failed": 0.0}), ("12", {"score": 0.0, "acc": 0.0, "failed": 0.0})],
)
def test_the_reward_is_called_as_verl_calls_it(solution, expected):
    found = reward_for_verl(
        data_source="math",
        solution_str=solution,
        ground_truth="12",
        extra_info={"num_turns": None},
        reward="boxed_math",
        params={"equivalence": "simple"},
    )
    assert found == expected


def test_a_reward_that_fails_says_so():
    found = reward_for_verl("x", "1", "no number", reward="number")
    assert found == {"score": 0.0, "acc": 0.0, "failed": 1.0}
