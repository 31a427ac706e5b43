"""Words of other trainers are answered with what they are called here, and that is a key that exists."""

from __future__ import annotations

import re

import pytest
import tomli

from retrain.config.load import load
from retrain.config.mistakes import advice_by_key, translated
from retrain.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("[training]\nnum_generations = 8", "is a key of another trainer; write [training] group_size = 8"),
        ("[training]\nlearning_rate = 1e-5", "write [optimizer] lr = 1e-05"),
        ("[algorithm]\nbeta = 0.04", "write [kl] weight = 0.04"),
        ("[training]\nper_device_train_batch_size = 8", "batch_size counts prompts"),
        ('[algorithm]\nloss_type = "dr_grpo"', 'write [algorithm] algorithm_mode = "dr_grpo"'),
        ("[algorithm]\nscale_rewards = false", 'write [algorithm] advantage_mode = "grpo"'),
        ('[logging]\nreport_to = "wandb"', 'write [logging] trackers = ["wandb"]'),
        ("[ppo_clip]\nepsilon_high = 0.28", "write [ppo_clip] eps_high = 0.28"),
        ("[model.lora]\nrank = 8", "write [model.lora] r = 8"),
        ('[algorithm]\nadv_estimator = "gae"', 'write [algorithm] algorithm_mode = "ppo"'),
        ('[algorithm]\nadv_estimator = "grpo_passk"', 'write [algorithm] advantage_mode = "pkpo"'),
        ('[algorithm]\nloss_mode = "geo_mean"', 'write [[loss]] name = "gmpo"'),
        ('[algorithm]\nloss_type = "luspo"', 'write [algorithm] algorithm_mode = "luspo"'),
        ("[sapo]\nsapo_temperature_pos = 1.1", "write [sapo] tau_pos = 1.1"),
        ("[clip_cov]\nclip_cov_ratio = 0.001", "write [clip_cov] rate = 0.001"),
        ("[opd]\nopd_kl_coef = 0.5", "write [opd] coef = 0.5"),
        ('[algorithm]\nmulti_objective_aggregation = "normalize_then_sum"', 'algorithm_mode = "gdpo"'),
        ('[algorithm]\nloss_agg_mode = "seq-mean-token-sum"', 'reduction = "sequence_sum"'),
        ('[algorithm]\nscale_rewards = "batch"', 'write [algorithm] advantage_mode = "lite_ppo"'),
        ('[algorithm]\nadv_estimator = "grpo"', 'write [algorithm] advantage_mode = "grpo_std"'),
        ("num_generations = 8", "write [training] group_size = 8"),
        ("[hicra]\nhicra_alpha = 0.2", "write [hicra] alpha = 0.2"),
        ("[hicra]\nhicra_entropy_topk = 0.3", "write [hicra] entropy_topk = 0.3"),
        ("[algorithm]\nuse_hicra = false", 'write [algorithm] algorithm_mode = "grpo"'),
        ("[planning]\nuse_planning_tokens = true", 'write [algorithm] algorithm_mode = "hicra" for planning tokens'),
        ('[algorithm]\nalgorithm_type = "mix"', 'write [algorithm] algorithm_mode = "mix"'),
        ("[algorithm]\nrepeat_times = 8", "write [training] group_size = 8"),
        ("[algorithm.sample_strategy_args]\nexpert_data_ratio = 0.25", "here [expert] ratio = 0.25"),
        ("[algorithm.policy_loss_fn_args]\nmu = 0.1\nclip_range = 0.2", "[mix] mu = 0.1; [ppo_clip] eps_low = 0.2"),
        ('[mix]\nsft_loss_agg_mode = "token-mean"', 'write [mix] sft_reduction = "token_mean"'),
        ('[algorithm]\ngrpo_loss_agg_mode = "seq-mean-token-mean"', 'reduction = "sequence_mean"'),
        ("[expert]\ntrain_batch_size_expert = 64", "[expert] ratio is the expert's share"),
        ('[rollout]\nstop = ["###"]', "stop strings are not supported: a completion ends at max_tokens or at a token"),
        ("[model]\nenable_thinking = false", "write [model] chat_params = { enable_thinking = false }"),
        ("[kl]\nkl_tau = 0.1", "[kl] weight reads a reference model"),
        ("[buffer]\nbatch_size = 32", "[training] batch_size counts prompts"),
        ("[actor_rollout_ref]\nactor.optim.lr = 1e-6", "is a key of another trainer; here [optimizer] lr = 1e-06"),
        (
            "[actor_rollout_ref]\nmodel.path = 'M'\nrollout.n = 8\nactor.ppo_epochs = 2",
            'here [model] path = "M"; [training] group_size = 8; [training] epochs = 2',
        ),
        ("[data]\nmax_prompt_length = 512\nseed = 1", "here [training] max_prompt_tokens = 512"),
        ("[trainer]\ntest_freq = 5", "here [eval] every = 5"),
        ("[custom_reward_function]\nname = 'f'", '[[rewards]] name = "module.function"'),
    ],
)  # fmt: skip
def test_a_word_of_another_trainer_gets_the_key_and_the_value(tmp_path, written, says):
    file = tmp_path / "run.toml"
    file.write_text(written + "\n")
    with pytest.raises(ConfigError, match=re.escape(says)):
        load(file)


SAMPLES = {"schedule": '"cosine"', "path": '"builtin:tiny"', "name": '"x"', "dir": '"runs"', "mask_truncated": "true"}


@pytest.mark.parametrize("word", advice_by_key())
def test_what_is_said_can_be_written(tmp_path, word):
    """Every `[table] key = value` in an answer is accepted, for one sensible value of the key."""
    for table, key, value in re.findall(r'\[([\w.]+)\] (\w+) = (\[[^]]*\]|"[^"]*"|[\w.-]+)', translated(word, 2)):
        if table == "jsonl":
            continue  # its file is the reader's
        value = SAMPLES.get(key, value)
        extra = "group_size = 2\n" if table != "training" else ""
        text = f"[{table}]\n{key} = {value}\n" + (f"[training]\n{extra}" if extra else "")
        tomli.loads(text)
        try:
            load_text(tmp_path, text)
        except ConfigError as error:
            said = str(error)
            assert not re.search("unknown|no [a-z]+ named|not a valid value", said), said


def load_text(folder, text):
    file = folder / "run.toml"
    file.write_text(text)
    return load(file)


@pytest.mark.parametrize(
    ("written", "table"),
    [
        ('advantage_mode = "dca"\nbeta = 0.3', "dca"),
        ('transform_mode = "gtpo"\nbeta = 0.3', "gtpo"),
        ('transform_mode = "opsm"\ndelta = 0.3', "opsm"),
        ('transform_mode = ["gae"]\nlam = 0.9', "gae"),
    ],
)
def test_a_parameter_of_a_component_of_the_file_belongs_in_its_own_table(tmp_path, written, table):
    """`beta` of dca is not the KL weight that TRL calls beta: that advice would be accepted and train another loss."""
    with pytest.raises(ConfigError, match=rf"belongs in .*\[{table}\]"):
        load_text(tmp_path, f"[algorithm]\n{written}\n")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("[actor_rollout_ref]\nx = 1\n", "docs/from-verl.md"),
        ("[trainer]\nx = 3\n", "[checkpoint]"),
        ("[orchestrator]\nbatch_size = 8\n", "[rollout]"),
        ("[frobnicate]\nx = 1\n", "sections: "),
        ('[model]\nname = "some/model"\n', 'write [model] path = "some/model"'),
    ],
)
def test_a_table_of_another_trainer_is_answered_with_the_sections_here(tmp_path, text, answer):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(answer)) as refused:
        load(file)
    [problem] = refused.value.problems
    assert len(str(problem)) < 600, "not every table of every component"


def test_a_component_that_does_not_exist_is_one_mistake_with_its_table(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[[loss]]\nname = "plane"\n[plane]\nx = 1\n')
    with pytest.raises(ConfigError, match='no loss named "plane"') as refused:
        load(file)
    assert len(refused.value.problems) == 1
