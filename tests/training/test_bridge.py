"""The tokens between two replies: never a history that is rendered again."""

import pytest

from retrain.errors import DataError
from retrain.training.bridge import Bridge
from retrain.training.chat import Chat
from tests.make_checkpoint import make_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPS_THINKING = (
    "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must') }}"
    "{% endif %}[{{ m.role }}] {{ m.content | trim }}{% if m.role == 'assistant' %} <|end|>{% endif %}{% endfor %}"
)
NO_TOOLS = (
    "{% for m in messages %}{% if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "strips thinking": STRIPS_THINKING, "alternates": ALTERNATES, "no tools": NO_TOOLS}


def chat(template):
    tokenizer = make_tokenizer(template is not None)
    if template is not None:
        tokenizer.chat_template = template
    return Chat(tokenizer, tokenizer.eos_token_id if template is None else tokenizer.convert_tokens_to_ids("<|end|>"))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("cut", [False, True])
def test_a_conversation_is_what_was_sampled_with_bridges_between(name, cut):
    model = chat(TEMPLATES[name])
    bridge, ids, texts = Bridge(model), list(model.prompt("one?").ids), ["one?"]
    for turn in range(3):
        reply = model.encode(f"<think>two</think>three{turn}") + ([] if cut else [model.end_id])
        new = bridge.ids([("user", f"and four{turn}?")], None if cut else model.end_id)
        ids += reply + new
        texts += [f"<think>two</think>three{turn}", f"and four{turn}?"]
    shown = model.tokenizer.decode(ids)
    for text in texts:
        assert text in shown
    assert shown.count("<|end|>") == model.tokenizer.decode(model.prompt("one?").ids).count("<|end|>") + 3 * (
        2 if name in ("chatml", "strips thinking", "no tools") else 1
    )
    if name == "chatml":
        roles = ["user", "assistant"] * 4
        said = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        whole = model.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        assert shown == whole


def test_text_without_a_template_is_tokenized_as_it_is():
    model = chat(None)
    bridge = Bridge(model)
    assert bridge.ids([("user", "one "), ("tool", "two")], model.end_id) == model.encode("one two")
    assert bridge.ids([], 5) == []
    assert bridge.opening("one", [("user", " and two")]) == "one and two"


def test_a_role_that_the_template_hides_is_shown_as_the_users():
    model = chat(NO_TOOLS)
    assert (
        model.tokenizer.decode(Bridge(model).ids([("tool", "seven")], model.end_id)) == "<user>seven<|end|><assistant>"
    )
    model = chat(CHATML)
    assert "tool\nseven" in model.tokenizer.decode(Bridge(model).ids([("tool", "seven")], model.end_id))


def test_what_is_said_first_joins_the_prompt():
    bridge = Bridge(chat(CHATML))
    assert bridge.opening("one", [("user", " two"), ("user", " three")]) == "one two three"
    system = [{"role": "system", "content": "add"}]
    assert bridge.opening(system, [("user", "one")]) == [*system, {"role": "user", "content": "one"}]
    assert bridge.opening("one", [("tool", "two")]) == [
        {"role": "user", "content": "one"},
        {"role": "tool", "content": "two"},
    ]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "does not show the reply as it is"),
        ("{{ messages[1].content }}", "does not show what the user says next"),
        ("{{ raise_exception('no chat') }}", "no chat"),
    ],
)
def test_a_template_that_cannot_continue_is_refused(template, message):
    with pytest.raises(DataError, match=message):
        Bridge(chat(template))
