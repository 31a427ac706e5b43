"""Prompt, stop tokens, text for rewards and solution tokens of chat templates in their public form."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli

from retrain.functional.numbers import last_number
from retrain.training.chat import Chat
from retrain.training.model.loading import Loaded
from retrain.types import Problem
from tests.make_checkpoint import make_tokenizer
from tests.training.chat_templates import TEMPLATES
from tests.training.small_models import make_model

BEGINS = ("<|begin_of_text|>", "<bos>", "<s>", "<|begin▁of▁sentence|>")
FAMILIES = tomli.loads(Path(__file__).with_name("chat_families.toml").read_text())


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_stops_text_and_solution_are_those_of_the_template(name):
    family, tokenizer = SimpleNamespace(**{"params": {}, **FAMILIES[name]}), make_tokenizer()
    tokenizer.add_special_tokens({"eos_token": family.eos, "additional_special_tokens": family.special})
    tokenizer.add_tokens(family.words)
    tokenizer.bos_token = next((token for token in family.special if token in BEGINS), None)
    tokenizer.chat_template = TEMPLATES["public"][family.template]
    loaded = Loaded(make_model(), tokenizer, (tokenizer.eos_token_id,), "small", chat_params=family.params)
    chat: Chat = loaded.chat
    assert chat.prompt("1+2?").text == family.prompt
    assert {tokenizer.convert_ids_to_tokens(token) for token in loaded.stop_ids} == {*family.stops}
    assert chat.decode(chat.encode(family.sampled)) == family.seen
    row = chat.conversation(Problem("f:1", "1+2?", "3", "3"))
    assert tokenizer.decode(row.ids[slice(*row.spans[-1])]) == family.solution
    assert tokenizer.decode(row.ids) == family.prompt + family.solution
    if "cut" not in name:
        assert last_number(family.seen) == "3"
