import json
import re

import pytest

from retrain.config.load import load
from retrain.run.before.explain import TINY, explain
from retrain.training.memory import ModelShape
from tests.commands import invoke
from tests.small_runs import TOML

SERVERS = '[rollout]\nengine = "vllm-server"\n[vllm]\nurls = ["http://127.0.0.1:8000"]\n'


def facts(tmp_path, text):
    file = tmp_path / "run.toml"
    file.write_text(text)
    return explain(load(file, ["training.seed=4"]))


def test_the_default_run_is_explained(tmp_path):
    found = facts(tmp_path, "")
    assert found["run_directory"] == "runs/run"
    assert found["engine"]["name"] == "torch"
    assert found["batch"]["completions_per_step"] == "16 prompts x 8 = 128"
    assert 1.3e6 < found["model"]["parameters"] < 1.5e6
    assert found["batch"]["completions_in_all"] == 128 * 200
    assert found["batch"]["response_tokens_per_step_at_most"] == 128 * 64
    assert found["loss"]["terms"] == [{"term": "ppo_clip", "weight": 1.0}]
    assert found["loss"]["switched_off"] == ["kl", "entropy"]
    assert found["evaluation"]["evaluations"] == 11
    assert found["overrides"] == ["--set training.seed=4"]
    assert all(result.startswith("ok") for result in found["probe"].values()), found["probe"]
    json.dumps(found)


@pytest.mark.slow
def test_the_learning_rate_and_where_it_comes_from_are_named(tmp_path):
    def rate(text):
        return facts(tmp_path, text)["learning_rate"]

    assert rate("") == "0.0002, the default for a random model"
    real = '[model]\npath = "a/b"\n'
    assert rate(real) == "1e-06, the default for all weights of a pretrained model"
    assert rate(f"{real}[model.lora]\n") == "0.0001, the default for LoRA adapters of a pretrained model"
    assert rate(f"{real}[training]\nlr = 3e-6\n") == f"3e-06, {tmp_path / 'run.toml'} line 4"


@pytest.mark.slow
def test_keys_that_nothing_reads_are_listed(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(SERVERS)
    assert explain(load(file, ["rollout.engine=torch"]))["keys_that_nothing_reads"] == ["[vllm] urls"]
    assert facts(tmp_path, "")["keys_that_nothing_reads"] == []


def test_the_graph_shows_what_each_stage_reads_and_writes(tmp_path):
    stages = facts(tmp_path, '[algorithm]\ntransform_mode = "gtpo_sepa"\n')["pipeline"]["stages"]
    by_name = {next(iter(stage.values())): stage for stage in stages}
    assert by_name["sepa"]["writes"] == "uncertainty"
    assert "uncertainty" in by_name["gtpo"]["reads"]
    assert list(by_name).index("planning_mask") < list(by_name).index("sepa") < list(by_name).index("gtpo")


def test_rewards_that_change_no_advantage_are_listed(tmp_path):
    rewards = '[[rewards]]\nname = "exact"\n[[rewards]]\nname = "overlong"\n'
    (idle,) = facts(tmp_path, f'[algorithm]\nadvantage_mode = "dca"\n{rewards}')["pipeline"][
        "rewards_that_train_nothing"
    ]
    assert idle.startswith('overlong: "dca" does not read the sum of rewards')
    assert facts(tmp_path, rewards)["pipeline"]["rewards_that_train_nothing"] == []


@pytest.mark.parametrize(
    ("text", "name", "correction"),
    [
        ("", "torch", None),
        ('[rollout]\nengine = "transformers"', "transformers", "tis"),
        ('[model]\npath = "some/model"', "auto", "tis, unless the engine's log-probs equal the trainer's"),
        ('[model]\npath = "some/model"\n[algorithm]\ntransform_mode = ["gtpo", "mis"]', "auto", "mis"),
    ],
)
def test_the_engine_decides_about_the_mismatch_correction(tmp_path, text, name, correction):
    found = facts(tmp_path, text)
    assert found["engine"]["name"] == name
    assert found["pipeline"]["correction_in_the_update"] == correction
    assert found["pipeline"]["columns_from_the_policy"] == []


def test_the_builtin_model_has_the_shape_that_explain_says():
    from retrain.training.model.builtin_model import build_model, build_tokenizer

    config = build_model(build_tokenizer(["1+1?", "2"])).config
    assert ModelShape.of(config.to_dict()) == TINY


def test_a_local_model_is_measured_from_its_config(tmp_path):
    shape = {"hidden_size": 512, "num_attention_heads": 2, "vocab_size": 1000, "num_hidden_layers": 1}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape | {"intermediate_size": 1024}))
    found = facts(tmp_path, f'[model]\npath = "{tmp_path / "model"}"\ndtype = "bfloat16"\n[model.lora]\nr = 2\n')[
        "model"
    ]
    assert found["parameters"] == 2 * 1000 * 512 + 4 * 512 * 512 + 3 * 512 * 1024
    assert found["memory_mb_without_prompts_about"]["weights"] > 0


PLUGINS = """
import torch

def advantage(rewards):
    return [r - sum(rewards) / len(rewards) for r in rewards]

def broken(rewards):
    return rewards[1:]

def reward(completion, answer):
    return 0.0
"""


@pytest.mark.slow
def test_code_of_the_user_is_named_and_tried(cwd):
    (cwd / "explained_code.py").write_text(PLUGINS)
    text = '[algorithm]\nadvantage_mode = "explained_code.advantage"\n[[rewards]]\nname = "explained_code.reward"\n'
    found = facts(cwd, text)
    (reward,) = (row for row in found["components"] if row.get("reward") == "explained_code.reward")
    assert reward["from"].endswith("explained_code.py (dotted path)")
    row = next(row for row in found["components"] if row.get("advantage"))
    assert row["from"] == f"{cwd / 'explained_code.py'} (dotted path)"
    assert found["probe"]["credit and loss"].startswith("ok")


def test_a_failing_component_is_shown_not_raised(cwd):
    (cwd / "failing_code.py").write_text(PLUGINS)
    probe = facts(cwd, '[algorithm]\nadvantage_mode = "failing_code.broken"\n')["probe"]
    assert probe["credit and loss"].startswith("failed: ")
    assert "broken" in probe["credit and loss"]


def test_sampling_ahead_is_said_with_its_correction(tmp_path):
    found = facts(tmp_path, "[rollout]\noverlap = 1\n")
    assert "the batch of step t + 1 is sampled" in found["overlap"]
    assert found["pipeline"]["correction_in_the_update"] == "tis"
    assert facts(tmp_path, "")["overlap"] is None


@pytest.mark.slow
def test_two_steps_tell_time_and_memory(tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text(TOML)
    monkeypatch.chdir(tmp_path)
    text = " ".join(invoke("explain", "run.toml", "--measure", code=0).stdout.split())
    assert "file: run.toml" in text
    assert "advantage: grpo from: built-in key: [algorithm]" in text
    assert "credit and loss: ok: loss " in text
    assert re.search(
        r"run: about [\d.]+ (s|min|h), without the warm start: [\d.]+ (s|min|h) start, [\d.]+ s per step", text
    )
    assert re.search(r"memory: [\d,]{3,} MB at the peak of the largest process", text)
    assert not (tmp_path / "runs").exists()


def test_memory_of_ranks_follows_the_gpu_that_there_is(tmp_path, monkeypatch):
    def model(extra, memory):
        monkeypatch.setattr("retrain.run.before.explain._gpu_memory", lambda device: memory)
        (tmp_path / "run.toml").write_text(extra)
        return explain(load(tmp_path / "run.toml"), ranks=8)["model"]

    lora = "\n[model.lora]\nr = 4\n"
    spread, whole, full = model(lora, 0), model(lora, 10**12), model("", 10**12)
    assert [found["memory_is_of"][-6:] for found in (spread, whole, full)] == ['"full"', '"none"', '"full"']
    sizes, larger = (found["memory_mb_without_prompts_about"] for found in (spread, whole))
    assert larger["weights"] > 3 * sizes["weights"]
    assert set(sizes) - set(larger) == {"gathered"}
    assert spread["memory_mb_of_python_and_libraries_about"] == 400


def test_a_run_without_steps_is_evaluated_once(tmp_path):
    assert facts(tmp_path, "[training]\nmax_steps = 0\n")["evaluation"]["evaluations"] == 1
