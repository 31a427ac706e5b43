"""Prompts as a model sees them, and worked answers exactly as sampling them would have given."""

from dataclasses import replace

import pytest

from retrain.errors import DataError
from retrain.rewards.text import format_matches
from retrain.training.chat import Chat
from retrain.training.chat_stitcher import ChatStitcher
from retrain.types import Problem
from tests.make_checkpoint import make_tokenizer

USER, MORE = {"role": "user", "content": "one and two?"}, {"role": "user", "content": "and three?"}
SAID = {"role": "assistant", "content": "three"}


MESSAGES = [{"role": "system", "content": "be short"}, {"role": "user", "content": "1+2?"}]


def loaded(chat=True, mode="auto"):
    tokenizer = make_tokenizer(chat)
    return Chat(tokenizer, tokenizer.eos_token_id, mode)


def texts(model, row):
    return [model.tokenizer.decode(row.ids[start:end]) for start, end in row.spans]


SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALLING = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% if terse %}short{% endif %}{% for m in messages %}"
    "<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_tools_and_template_variables_of_a_row_are_rendered():
    model = loaded()
    model.tokenizer.chat_template = CALLING
    plain, row = Problem("f:1", [USER], ""), Problem("f:2", [USER], "", template={"tools": [SCHEMA], "terse": True})
    assert model.prompt_of(plain).text == "<|user|>one and two?<|end|><|assistant|>"
    shown = model.prompt_of(row).text
    assert '"name": "add"' in shown
    assert shown.endswith("short<|user|>one and two?<|end|><|assistant|>")
    assert shown == ChatStitcher(model).of(row).opening(row.prompt, ()).text
    assert "tools" in ChatStitcher(model).of(row)._chat.params


@pytest.mark.parametrize(("chat", "why"), [(True, "the chat template renders no tools"), (False, "no chat template")])
def test_tools_that_the_prompt_would_not_show_are_refused(chat, why):
    with pytest.raises(DataError, match=rf"d.jsonl:3: the prompt does not show the row's tool add, because .*{why}"):
        loaded(chat).prompt_of(Problem("7", "1+2?", "", template={"tools": [SCHEMA]}, place="d.jsonl:3"))


def test_calls_are_imitated_and_their_results_are_not():
    model = loaded()
    model.tokenizer.chat_template = CALLING
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    prompt = [USER, call, {"role": "tool", "content": "3"}]
    row = model.conversation(Problem("f:1", prompt, "", "three"), all_turns=True)
    assert texts(model, row) == ['<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|end|>', "three<|end|>"]
    assert "<|tool|>3<|end|><|assistant|>three<|end|>" in model.tokenizer.decode(row.ids)


def test_the_last_turn_alone_is_imitated():
    model = loaded()
    row = model.conversation(Problem("f:1", [USER, SAID, MORE], "", "six"))
    assert texts(model, row) == ["six<|end|>"]
    assert list(row.prompt_ids) == list(model.prompt([USER, SAID, MORE]).ids)
    assert row.spans[0][1] == len(row.ids)


def test_all_turns_are_imitated_as_one_row_that_reads_like_the_template():
    model = loaded()
    row = model.conversation(Problem("f:1", [USER, SAID, MORE], "", "six"), all_turns=True)
    assert texts(model, row) == ["three<|end|>", "six<|end|>"]
    whole = model.tokenizer.apply_chat_template(
        [USER, SAID, MORE, {"role": "assistant", "content": "six"}], tokenize=False
    )
    assert model.tokenizer.decode(row.ids) == whole
    assert list(row.prompt_ids) == list(model.prompt([USER]).ids)
    assert row.ids == model.conversation(Problem("f:1", [USER, SAID, MORE], "", "six")).ids


def test_without_a_template_one_turn_of_the_user_is_a_text_prompt():
    model = loaded(chat=False)
    plain = model.conversation(Problem("f:1", USER["content"], "", "three"))
    assert model.conversation(Problem("f:1", [USER], "", "three")) == plain
    assert model.conversation(Problem("f:1", [USER], "", "three"), all_turns=True) == plain
    assert model.tokenizer.decode(plain.ids) == "one and two?three<|eos|>"


def test_a_template_that_refuses_messages_is_an_error_of_the_data():
    model = loaded()
    model.tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(DataError, match=r"does not render messages of system, user: System role not supported"):
        model.prompt(MESSAGES)


@pytest.mark.parametrize("prompt", [[USER, SAID, MORE], [{"role": "system", "content": "add"}, USER]])
def test_other_messages_need_a_template(prompt):
    with pytest.raises(DataError, match=r"f:7: .*there is no chat template"):
        loaded(chat=False).conversation(Problem("f:7", prompt, "", "six"))


def test_a_template_that_rewrites_history_makes_no_row_of_all_turns():
    model = loaded()
    model.tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    problem = Problem("f:2", [USER, SAID, MORE], "", "six")
    assert len(model.conversation(problem).spans) == 1
    with pytest.raises(DataError, match=r"f:2: the chat template renders an earlier turn differently"):
        model.conversation(problem, all_turns=True)


def test_a_text_that_begins_with_the_first_token_has_it_once():
    from tokenizers.processors import TemplateProcessing

    chat = loaded(chat=False)
    chat.tokenizer.bos_token = "<|user|>"
    chat.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|user|> $A", special_tokens=[("<|user|>", 3)]
    )
    assert chat.prompt("<|user|>hi").ids == chat.prompt("hi").ids


def test_variables_reach_the_template_in_every_rendering():
    chat = replace(loaded(), params={"enable_thinking": False})
    end = "{% if add_generation_prompt %}:{{ enable_thinking }}{% endif %}"
    chat.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}" + end
    assert chat.prompt("1+2?").text == "1+2?:False"
    assert chat.conversation(Problem("f:1", [USER], "", "six")).prompt_ids == tuple(chat.prompt([USER]).ids)


def test_prompt_stays_open_when_a_tokenizer_closes_every_text():
    from tokenizers.processors import TemplateProcessing

    chat = loaded(chat=False)
    chat.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|user|> $A <|eos|>", special_tokens=[("<|user|>", 3), ("<|eos|>", 1)]
    )
    assert chat.tokenizer("hi")["input_ids"][-1] == 1
    assert list(chat.prompt("hi").ids) == chat.tokenizer("hi")["input_ids"][:-1]


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_special_tokens_that_are_text_can_be_read_by_a_reward(mode):
    chat = loaded(mode=mode)
    chat.tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    ids = chat.encode("<think>so</think>7<|end|>")
    assert len(ids) == 6
    assert chat.decode(ids).removesuffix("<|end|>" if mode == "off" else "") == "<think>so</think>7"
    assert format_matches(chat.decode(ids), pattern="^<think>.*</think>") == 1
    if mode == "auto":
        assert chat.decode(chat.prompt("1+2?").ids) == "1+2?"


def test_chat_template_renders_text_and_messages():
    chat = loaded()
    prompt = chat.prompt("1+2?")
    assert prompt.text == "<|user|>1+2?<|end|><|assistant|>"
    assert prompt.ids[0] == 3
    assert prompt.ids[-2:] == (2, 4)
    assert chat.tokenizer.decode(prompt.ids) == prompt.text
    assert loaded(mode="on").prompt(MESSAGES).text == "<|system|>be short<|end|>" + prompt.text
    assert loaded(mode="off").prompt("1+2?").text == "1+2?"


@pytest.mark.parametrize(
    ("template", "prompt", "mode"), [(False, MESSAGES, "auto"), (True, MESSAGES, "off"), (False, "1+2?", "on")]
)
def test_chat_without_a_template_is_explained(template, prompt, mode):
    with pytest.raises(DataError, match="no chat template"):
        loaded(template, mode).prompt(prompt)


def test_template_that_rewrites_the_prompt_is_noticed():
    chat = loaded()
    assert chat.warning(MESSAGES) is None
    assert loaded(mode="off").warning("1+2?") is None
    assert loaded(chat=False).warning("1+2?") is None
    chat.tokenizer.chat_template = "{{ messages | length }}: {{ messages[0]['content'] }}"
    assert "'1: 1+2?' becomes '2: 1+2?'" in (chat.warning("1+2?") or "")


def test_what_the_template_writes_is_known_and_hidden_from_rewards():
    chat = loaded()
    assert set(chat.written.values()) == {"<|user|>", "<|assistant|>", "<|end|>"}
    assert set(chat.written.values()) <= chat.hidden
    assert loaded(mode="off").written == {}
