"""The tokens between two replies: never a history that is rendered again."""

import pytest

from retrain.errors import DataError
from retrain.training.chat_stitcher import ChatStitcher
from tests.training.chat_templates import FAMILIES, Family, chat

SCHEMA = {"name": "add_up", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_is_what_was_sampled_with_bridges_between(name, cut, role, caplog):
    family = FAMILIES[name]
    model = chat(family)
    bridge, prompt = ChatStitcher(model), model.prompt("one?")
    ids, spans, said = list(prompt.ids), [], [{"role": "user", "content": "one?"}]
    for turn in range(3):
        # In an encoding that is not the text's own: what was sampled must not be tokenized again.
        reply = [*model.encode("<think>tw"), *model.encode(f"o</think>three{turn}"), *([] if cut else [model.end_id])]
        spans.append((len(ids), reply))
        ids += reply + bridge.ids([(role, f"and four{turn}?")], None if cut else model.end_id)
        said += [{"role": "assistant", "content": f"<think>two</think>three{turn}"}]
        said += [{"role": "user", "content": f"and four{turn}?"}]
    assert all(ids[start : start + len(reply)] == reply for start, reply in spans)
    heard = list(ids)
    for start, reply in reversed(spans):
        del heard[start : start + len(reply)]
    text = model.tokenizer.decode(heard)
    assert [text.count(f"and four{turn}?") for turn in range(3)] == [1, 1, 1]
    assert "three" not in text
    shown = model.tokenizer.decode(ids)
    if family.end in model.render(said, add_generation_prompt=True) and role == "user":
        rendered = model.render(said[:3], add_generation_prompt=True).count(family.end)
        opened = prompt.text.count(family.end)
        assert shown.count(family.end) == opened + 3 * (rendered - opened)
    if family.keeps and role == "user":
        assert shown == model.render(said, add_generation_prompt=True)
    assert ('its messages are rendered as "user"' in caplog.text) is (role == "tool" and not family.tool)
    if role == "tool" and not family.tool:
        assert ids[len(prompt.ids) + len(spans[0][1]) : spans[1][0]] == bridge.ids(
            [("user", "and four0?")], None if cut else model.end_id
        )


def test_some_families_show_an_earlier_reply_differently():
    """Otherwise the test above would show nothing: rendering again would do."""
    rewritten = []
    for name, family in FAMILIES.items():
        model, reply = chat(family), "<think>two</think>three"
        said = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": reply}]
        whole = model.render([*said, {"role": "user", "content": "four?"}], add_generation_prompt=True)
        rewritten += [] if whole.startswith(model.prompt("one?").text + reply) else [name]
    assert {"qwen3", "deepseek r1", "glm 4", "nemotron"} <= set(rewritten)
    assert not [name for name in rewritten if FAMILIES[name].keeps]
    assert len(FAMILIES) >= 30


@pytest.mark.parametrize("name", FAMILIES)
def test_tools_stand_where_the_template_shows_them_and_else_in_the_prompt(name):
    family = FAMILIES[name]
    model = chat(family)
    shown = ChatStitcher(model).opening("one?", [("user", " Look.")], [SCHEMA], " Call add_up so.")
    assert " Look." in shown.text
    assert "add_up" in shown.text
    assert ("Call add_up so." in shown.text) is not family.tools
    assert shown.ids == tuple(model.encode(shown.text))
    assert ('"description": "Adds."' in shown.text) is family.tools


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_said_writes_no_special_token(name):
    """A tool that prints the end of a turn, or an observation that shows the marks of this module, ends nothing."""
    model = chat(FAMILIES[name])
    special = {place: one.content for place, one in model.tokenizer.added_tokens_decoder.items() if one.special}
    assert model.end_id in special
    written = f"so{''.join(special.values())}{model.tokenizer.eos_token * 2}\ufdd0reply\ufdd0 long"
    bridge = ChatStitcher(model)

    def marks(ids):
        return [one for one in ids if one in special]

    for role in ("user", "tool"):
        for last in (None, model.end_id):
            ids = bridge.ids([(role, written), (role, "it is")], last)
            assert marks(ids) == marks(bridge.ids([(role, "so long"), (role, "it is")], last))
            shown = model.tokenizer.decode(ids)
            assert "it is" in shown
            assert written.replace("\ufdd0", "\ufffd") in shown
    asked, plain = bridge.opening("one?", [("user", written)]), bridge.opening("one?", [("user", "so long")])
    assert marks(asked.ids) == marks(plain.ids)
    assert model.tokenizer.decode(asked.ids) == asked.text
    [(_, short)] = bridge.short([("user", written + "x" * 500)], 200)
    assert short.startswith(f"so{next(iter(special.values()))}")


def test_text_without_a_template_is_tokenized_as_it_is():
    model = chat(None)
    bridge = ChatStitcher(model)
    assert bridge.ids([("user", "one "), ("tool", "two")], model.end_id) == model.encode("one two")
    assert bridge.ids([("user", "one<|eos|>")], None)[-1] == model.end_id
    assert bridge.ids([], 5) == []
    assert bridge.opening("one", [("user", " and two")], [SCHEMA], "!") == model.prompt("one and two!")


def test_what_is_said_first_joins_the_prompt():
    model = chat(FAMILIES["chatml"])
    bridge = ChatStitcher(model)
    assert bridge.opening("one", [("user", " two"), ("user", " three")]) == model.prompt("one two three")
    system, one = {"role": "system", "content": "add"}, {"role": "user", "content": "one"}
    assert bridge.opening([system], [("user", "one")]) == model.prompt([system, one])
    assert bridge.opening("one", [("tool", "two")]) == model.prompt([one, {"role": "tool", "content": "two"}])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "does not show a reply unchanged"),
        ("{{ messages[1].content }}", r'does not show a message of the role "user" after a reply'),
        ("{{ raise_exception('no chat') }}", "no chat"),
    ],
)
def test_a_template_that_cannot_continue_is_refused(template, message):
    with pytest.raises(DataError, match=message):
        ChatStitcher(chat(Family(template, "<|end|>")))
