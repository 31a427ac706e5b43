"""`[expert]`, `[mix]` and the loss terms must fit each other, and mistakes are found before anything loads."""

import json

import pytest

from retrain.config.resolve import division
from retrain.config.schema import Config
from retrain.errors import ConfigError
from retrain.run.before.data_checks import unreadable_sources
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


def test_a_term_that_needs_an_expert_and_has_no_file(loaded):
    found = problem(loaded, TERMS)
    assert (found.line, found.key) == (4, "[[loss]] name")
    assert found.problem == '"sft" trains on expert rows, and no file of them is set'
    assert "[expert] path" in found.fix


@pytest.mark.parametrize(
    ("path", "why"),
    [("nowhere.jsonl", 'there is no file "nowhere.jsonl"'), ("run.toml", "neither .jsonl nor .parquet")],
)
def test_a_file_that_cannot_be_it(loaded, path, why):
    found = problem(loaded, f'{TERMS}[expert]\npath = "{path}"\n')
    assert (found.line, found.key) == (6, "[expert] path")
    assert why in found.problem


def test_a_chat_and_a_model_without_a_chat_template(loaded, tmp_path):
    messages = [{"role": role, "content": "1+1?"} for role in ("system", "user", "assistant")]
    for rows, valid in ((messages, False), (messages[1:], True)):
        (tmp_path / "expert.jsonl").write_text(json.dumps({"messages": rows}) + "\n")
        config = loaded(TERMS + '[expert]\npath = "expert.jsonl"\n[model]\npath = "builtin:tiny"\n')
        found = [str(error) for _, error in unreadable_sources(config)]
        assert (found == []) == valid
    assert valid or "the row is a chat, and builtin:tiny renders none" in found[0]


def test_a_term_of_weight_0_needs_no_rows(loaded):
    off = loaded(TERMS + '[expert]\npath = "expert.jsonl"\n', "loss.1.weight=0.0")
    assert (off.warnings, off.division) == ((), (16, 0))


def test_there_must_be_room_for_a_prompt(loaded):
    text = TERMS + '[expert]\npath = "expert.jsonl"\nratio = 0.95\n'
    found = problem(loaded, text)
    assert (found.line, found.key) == (7, "[expert] ratio")
    assert found.problem == "122 of 128 rows are expert rows: no room for a prompt with 8 completions"
    assert found.fix == "use a ratio of at most 0.937"
    assert loaded(text, "expert.ratio=0.937").division == (1, 120)
    assert problem(loaded, text, "training.batch_size=1").fix == "raise [training] batch_size"
    for bound in ("0.0", "1.0"):
        assert "out of range" in problem(loaded, text, f"expert.ratio={bound}").problem


@pytest.mark.parametrize("case", [case for case in MIX["expert_batch"] if 0 < case["ratio"] < 1])
def test_published_division_of_a_batch(case):
    config = Config.model_validate(
        {
            "training": {"batch_size": case["train_batch_size"], "group_size": 1},
            "expert": {"ratio": case["ratio"]},
        }
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
    assert loaded(expert + '"halved.mean"\n').components.all("reduction")[-1].name == "halved.mean"
    assert problem(loaded, expert + "3\n").problem == "must be a string in quotes, not 3"
