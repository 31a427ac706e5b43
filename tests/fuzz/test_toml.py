"""Any TOML file is a configuration or a list of its mistakes: never a traceback, never a wait.

`RETRAIN_FUZZ=10000 python -m pytest tests/fuzz` tries as many mutants; the suite tries a few hundred.
"""

import os
import random
import time
from collections import Counter

import pytest

from retrain.campaign.plan.load_campaign import is_campaign, load_campaign
from retrain.config.load import load
from retrain.errors import ConfigError
from tests.fuzz.mutations import KEYS, ROOT, SHIPPED, VALUES, mutate

COUNT = int(os.environ.get("RETRAIN_FUZZ", "300"))
PORTIONS = 10


def verdict(file, overrides=()):
    """ "valid", or "refused" with mistakes that are described; whatever else is raised fails the test."""
    try:
        (load_campaign if is_campaign(file) else load)(file, overrides)
    except ConfigError as error:
        described = error.exit_code == 2 and error.problems and all(problem.problem for problem in error.problems)
        return "refused" if described else "refused without a reason"
    return "valid"


@pytest.mark.parametrize("portion", range(PORTIONS))
def test_a_mutant_is_valid_or_its_mistakes_are_listed(portion, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    rng, outcomes = random.Random(portion), Counter()
    for number in range(COUNT // PORTIONS):
        source = rng.choice(SHIPPED)
        file = tmp_path / "mutant.toml"
        text = mutate(source.read_text(encoding="utf-8"), rng)
        file.write_text(text.replace('base = "../', f'base = "{source.parent.parent}/'), encoding="utf-8", newline="")
        began = time.process_time()
        try:
            outcomes[verdict(file)] += 1
        except BaseException:
            print(f"mutant {number} of portion {portion} ({source.name}):\n{text[:4000]}")
            raise
        assert time.process_time() - began < 5, f"mutant {number} of portion {portion} takes long"
    assert set(outcomes) <= {"valid", "refused"}
    assert outcomes["refused"] > COUNT // PORTIONS // 4


def test_any_override_is_taken_or_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    rng = random.Random(0)
    names = [
        "training.lr",
        "rewards.0.weight",
        "rewards.9.weight",
        "task.name",
        "algorithm",
        "training",
        "",
        ".",
        "a..b",
    ]
    for _ in range(COUNT // 3):
        key = rng.choice([*names, *KEYS, ".".join(rng.choices(("training", "lr", "0", "x"), k=rng.randint(1, 5)))])
        assert verdict(ROOT / "configs/quickstart.toml", [f"{key}={rng.choice(VALUES)}"]) in ("valid", "refused")
