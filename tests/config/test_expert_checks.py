"""`[expert]`, `[mix]` and the loss terms must fit each other, and mistakes are found before anything loads."""

import pytest

from retrain.config.loaded_config import division
from retrain.config.schema import Config
from retrain.errors import ConfigError
from retrain.run.before.explain import explain
from tests.algorithms.test_mix import MIX

TERMS = '[[loss]]\nname = "ppo_clip"\n[[loss]]\nname = "sft"\n'


@pytest.fixture(autouse=True)
def expert(tmp_path):
    (tmp_path / "expert.jsonl").write_text('{"prompt": "1+1?", "completion": "so 2"}\n')


def problem(loaded, text, *overrides):
    with pytest.raises(ConfigError, match=r"run\.toml:|--set") as caught:
        loaded(text, *overrides)
    (found,) = caught.value.problems
    return found


@pytest.mark.parametrize("case", [case for case in MIX["expert_batch"] if 0 < case["ratio"] < 1])
def test_published_division_of_a_batch(case):
    config = Config.model_validate(
        {"training": {"batch_size": case["train_batch_size"], "group_size": 1}, "expert": {"ratio": case["ratio"]}}
    )
    assert division(config, [case["ratio"]]) == (case["usual"], [case["expert"]])
    assert division(config, []) == (case["train_batch_size"], [])


def test_a_share_that_binary_fractions_overshoot():
    config = Config.model_validate({"training": {"batch_size": 10, "group_size": 10}})
    assert division(config, [0.07]) == (9, [7])
    assert [one.ratio for one in Config().experts] == [0.5]


def test_the_expert_may_have_a_reduction_of_its_own(loaded, tmp_path):
    expert = TERMS + '[expert]\npath = "expert.jsonl"\n[mix]\nsft_reduction = '
    facts = explain(loaded(expert + '"sequence_mean"\n'))
    assert (facts["loss"]["reduction"], facts["loss"]["sft_reduction"]) == ("token_mean", "sequence_mean")
    assert facts["probe"]["credit and loss"].startswith("ok")
    found = problem(loaded, expert + '"sequence_men"\n')
    assert (found.line, found.key) == (8, "[mix] sft_reduction")
    assert found.fix == 'did you mean "sequence_mean"?'
    (tmp_path / "halved.py").write_text("def mean(mask):\n    return mask / (2 * mask.sum())\n")
    assert loaded(expert + '"halved.mean"\n').all("reduction")[-1].name == "halved.mean"
    assert problem(loaded, expert + "3\n").problem == "must be a string in quotes, not 3"
