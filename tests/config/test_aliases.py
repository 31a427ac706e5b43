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
        ("[training]\nnum_generation = 8", '"num_generations" of another trainer? write [training] group_size = 8'),
        ("[training]\nmax_stepss = 8", 'did you mean "max_steps"?'),
        ("[algorithm]\nbeta = 0.04", "write [kl] weight = 0.04"),
        ("[training]\nper_device_train_batch_size = 8", "batch_size counts prompts"),
        ('[algorithm]\nloss_type = "dr_grpo"', 'write [algorithm] algorithm_mode = "dr_grpo"'),
        ('[algorithm]\nloss_agg_mode = "seq-mean-token-sum"', 'reduction = "sequence_sum"'),
        ('[algorithm]\nalgorithm_type = "mix"', 'write [algorithm] algorithm_mode = "mix"'),
        ("[algorithm.sample_strategy_args]\nexpert_data_ratio = 0.25", "here [expert] ratio = 0.25"),
        ('[rollout]\nstop = ["###"]', "stop strings are not supported: a completion ends at max_tokens or at a token"),
        ("[actor_rollout_ref]\nactor.optim.lr = 1e-6", "is a key of another trainer; here [optimizer] lr = 1e-06"),
        (
            "[actor_rollout_ref]\nmodel.path = 'M'\nrollout.n = 8\nactor.ppo_epochs = 2",
            'here [model] path = "M"; [training] group_size = 8; [training] epochs = 2',
        ),
        ("[model]\nchat_template_kwargs = { a = 1 }", "here variables of the chat template are [model] chat_params"),
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
        ("[actor_rollout_ref]\nx = 1\n", "retrain help from-verl"),
        ("[trainer]\nx = 3\n", "[checkpoint]"),
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
