"""Words of other trainers are answered with what they are called here, and that is a key that exists."""

from __future__ import annotations

import re

import pytest
import tomli

from retrain.config.load import load
from retrain.config.sections.synonyms import WORDS, translated
from retrain.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("[training]\nnum_generations = 8", "is another trainer's word; write [training] group_size = 8"),
        ("[training]\nlearning_rate = 1e-5", "write [optimizer] lr = 1e-05"),
        ("[algorithm]\nbeta = 0.04", "write [kl] weight = 0.04"),
        ("[training]\nper_device_train_batch_size = 8", "batch_size counts prompts"),
        ('[algorithm]\nloss_type = "dr_grpo"', 'write [algorithm] algorithm_mode = "dr_grpo"'),
        ("[algorithm]\nscale_rewards = false", 'write [algorithm] advantage_mode = "grpo"'),
        ('[logging]\nreport_to = "wandb"', 'write [logging] trackers = ["wandb"]'),
        ("[ppo_clip]\nepsilon_high = 0.28", "write [ppo_clip] eps_high = 0.28"),
        ("[model.lora]\nrank = 8", "write [model.lora] r = 8"),
        ('[algorithm]\nadv_estimator = "grpo"', 'write [algorithm] advantage_mode = "grpo_std"'),
        ("num_generations = 8", "write [training] group_size = 8"),
    ],
)  # fmt: skip
def test_a_word_of_another_trainer_gets_the_key_and_the_value(tmp_path, written, says):
    file = tmp_path / "run.toml"
    file.write_text(written + "\n")
    with pytest.raises(ConfigError, match=re.escape(says)):
        load(file)


SAMPLES = {"schedule": '"cosine"', "path": '"builtin:tiny"', "name": '"x"', "dir": '"runs"', "mask_truncated": "true"}


@pytest.mark.parametrize("word", WORDS)
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
            assert not re.search("unknown|no [a-z]+ named|none of its values", said), said


def load_text(folder, text):
    file = folder / "run.toml"
    file.write_text(text)
    return load(file)
