"""Expert rows as tokens: exactly what sampling the answers would have given."""

import pytest

from retrain.errors import DataError
from retrain.training.expert_tokens import expert_row
from retrain.training.model.loading import Loaded, render
from retrain.types import Problem
from tests.make_checkpoint import make_tokenizer

USER, MORE = {"role": "user", "content": "one and two?"}, {"role": "user", "content": "and three?"}
SAID = {"role": "assistant", "content": "three"}


def loaded(chat=True):
    tokenizer = make_tokenizer(chat)
    return Loaded(None, tokenizer, (tokenizer.eos_token_id,), "test")  # pyright: ignore[reportArgumentType]


def texts(model, row):
    return [model.tokenizer.decode(row.ids[start:end]) for start, end in row.spans]


def test_the_last_turn_alone_is_imitated():
    model = loaded()
    row = expert_row(model, Problem("f:1", [USER, SAID, MORE], "", "six"))
    assert texts(model, row) == ["six<|end|>"]
    assert list(row.prompt_ids) == render(model.tokenizer, [USER, SAID, MORE])[1]
    assert row.spans[0][1] == len(row.ids)


def test_all_turns_are_imitated_as_one_row_that_reads_like_the_template():
    model = loaded()
    row = expert_row(model, Problem("f:1", [USER, SAID, MORE], "", "six"), all_turns=True)
    assert texts(model, row) == ["three<|end|>", "six<|end|>"]
    whole = model.tokenizer.apply_chat_template(
        [USER, SAID, MORE, {"role": "assistant", "content": "six"}], tokenize=False
    )
    assert model.tokenizer.decode(row.ids) == whole
    assert list(row.prompt_ids) == render(model.tokenizer, [USER])[1]
    assert row.ids == expert_row(model, Problem("f:1", [USER, SAID, MORE], "", "six")).ids


def test_a_greeting_is_no_answer():
    row = expert_row(loaded(), Problem("f:1", [SAID, USER], "", "three"), all_turns=True)
    assert len(row.spans) == 1


def test_without_a_template_one_turn_of_the_user_is_a_text_prompt():
    model = loaded(chat=False)
    plain = expert_row(model, Problem("f:1", USER["content"], "", "three"))
    assert expert_row(model, Problem("f:1", [USER], "", "three")) == plain
    assert expert_row(model, Problem("f:1", [USER], "", "three"), all_turns=True) == plain
    assert model.tokenizer.decode(plain.ids) == "one and two?three<|eos|>"


@pytest.mark.parametrize("prompt", [[USER, SAID, MORE], [{"role": "system", "content": "add"}, USER]])
def test_other_messages_need_a_template(prompt):
    with pytest.raises(DataError, match=r"f:7: .*there is no chat template"):
        expert_row(loaded(chat=False), Problem("f:7", prompt, "", "six"))


def test_what_a_template_refuses_is_named_with_its_line():
    model = loaded()
    model.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"f:3: .*roles must alternate"):
        expert_row(model, Problem("f:3", [USER], "", "six"))


def test_a_template_that_rewrites_history_makes_no_row_of_all_turns():
    model = loaded()
    model.tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    problem = Problem("f:2", [USER, SAID, MORE], "", "six")
    assert len(expert_row(model, problem).spans) == 1
    with pytest.raises(DataError, match=r"f:2: the chat template renders an earlier turn differently"):
        expert_row(model, problem, all_turns=True)
