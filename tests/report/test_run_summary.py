"""What the command line and the pages say of a run."""

import json

import pytest

from retrain.config.schema import Config
from retrain.errors import ConfigError
from retrain.report.run_summary import recipe, status, summary
from tests.report.test_run_page import evaluation, run

__all__ = ["run"]


def test_status_of_a_finished_run(run):
    found = status(run)
    assert found["state"] == "finished"
    assert (found["steps"], found["max_steps"], found["eval_step"]) == (30, 30, 30)
    assert found["accuracy"] == 0.8
    assert found["checkpoint"] == "step-000030"
    assert found["eta_s"] is None
    assert found["owner"] is None
    json.dumps(found)


def test_recipe_names_the_ingredients_that_the_configuration_holds():
    config = Config().model_dump(mode="json")
    config["algorithm"] |= {"advantage_mode": "maxrl", "transform_mode": ["gtpo", "my.own"]}
    sizes = "16 prompts x 8 completions x at most 64 tokens per step"
    assert recipe(config) == f"builtin:tiny on addition; maxrl + gtpo + my.own; {sizes}; seed 0"
    config["algorithm"]["algorithm_mode"] = "my.algorithm"
    assert recipe(config) == f"builtin:tiny on addition; my.algorithm + gtpo + my.own; {sizes}; seed 0"
    assert recipe({"training": {"max_steps": 3}}) == ""


def test_no_run_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="contains no run"):
        status(tmp_path)


def test_summary_says_what_the_numbers_say():
    assert summary([], []) == "0 steps; no evaluation yet."
    assert summary([{}], []) == "1 step; no evaluation yet."
    assert summary([], [evaluation(0, 0.5)]).startswith("Held-out accuracy is 50.0% (95% interval 45.0% to 55.0%)")
    assert "accuracy fell from 80.0% to 20.0% (-60.0 points" in summary([], [evaluation(0, 0.8), evaluation(9, 0.2)])
    assert "Greedy: from 50.0% to 90.0%." in summary([], [evaluation(0, 0.8), evaluation(9, 0.8, greedy_accuracy=0.9)])
    assert summary([], [evaluation(0, 0.5), evaluation(9, 0.55)]) == (
        "No significant change of held-out accuracy, from 50.0% to 55.0% (+5.0 points, 95% interval -2.1 to +12.1), "
        "on 256 problems in 9 steps. Greedy: from 50.0% to 50.0%."
    )
    assert summary([], [evaluation(0, 0.5), evaluation(9, 0.58)]).startswith("Held-out accuracy rose from 50.0% to")
