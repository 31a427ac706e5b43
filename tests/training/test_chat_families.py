"""Prompt, stop tokens, text for rewards and solution tokens of chat templates in their public form."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest

from retrain.functional.numbers import last_number
from retrain.training.chat import Chat
from retrain.training.model.loading import Loaded
from retrain.types import Problem
from tests.make_checkpoint import make_tokenizer
from tests.training.small_models import make_model

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% endif %}{% endfor %}"
)
QWEN_3 = (
    "{%- set ns = namespace(last_query_index=messages|length - 1) %}{%- for message in messages[::-1] %}"
    "{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if message.role == 'user' and ns.last_query_index == "
    "messages|length - 1 %}{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- if message.role != 'assistant' %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}{%- else %}"
    "{%- set content = message.content.split('</think>')[-1].lstrip('\n') %}{%- set reasoning_content = '' %}"
    "{%- if loop.index0 > ns.last_query_index and loop.last %}"
    "{{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>"
    "\n\n' + content }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + content }}{%- endif %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and "
    "enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
GPT_OSS = (
    "{{- '<|start|>system<|message|>You are ChatGPT.<|end|>' }}{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}{%- if loop.last and not add_generation_prompt %}"
    "{%- if 'thinking' in message %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"
    "{%- endif %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}"
    "{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- endif %}"
    "{%- elif message.role == 'user' -%}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}"
    "{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{'<|User|>' + message['content']}}"
    "{% elif message['role'] == 'assistant' %}{% set content = message['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{'<|Assistant|>' + content + '<|end▁of▁sentence|>'}}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{'<|Assistant|><think>\n'}}{% endif %}"
)


class Family(NamedTuple):
    """A template and what is right for it.

    Attributes:
        template: its Jinja source. eos: the tokenizer's end of text.
        special: special tokens of the tokenizer beside `eos`; words: other added tokens.
        prompt: the rendering of "1+2?". stops: tokens that end a completion.
        sampled: what a model samples. seen: what rewards read of it.
        solution: the worked solution "3" as tokens behind the prompt.
        params: variables of the template.
    """

    template: str
    eos: str
    special: tuple[str, ...]
    words: tuple[str, ...]
    prompt: str
    stops: set[str]
    sampled: str
    seen: str
    solution: str
    params: Mapping[str, bool] = MappingProxyType({})


BEGINS = ("<|begin_of_text|>", "<bos>", "<s>", "<|begin▁of▁sentence|>")
THINK = ("<think>", "</think>")
IM = ("<|im_start|>", "<|im_end|>")
IM_PROMPT = "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n"
FAMILIES = {
    "ChatML on a base model": Family(
        CHATML, "<|endoftext|>", IM, (), IM_PROMPT, {"<|endoftext|>", "<|im_end|>"},
        "It is 3.<|im_end|>", "It is 3.", "3<|im_end|>",
    ),
    "Llama 3": Family(
        LLAMA_3, "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"), (),
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        {"<|eot_id|>"}, "It is 3.<|eot_id|>", "It is 3.", "3<|eot_id|>",
    ),
    "Gemma": Family(
        GEMMA, "<eos>", ("<start_of_turn>", "<end_of_turn>", "<bos>"), (),
        "<bos><start_of_turn>user\n1+2?<end_of_turn>\n<start_of_turn>model\n",
        {"<eos>", "<end_of_turn>"}, "It is 3.<end_of_turn>", "It is 3.", "3<end_of_turn>",
    ),
    "Mistral": Family(
        MISTRAL, "</s>", ("<s>",), (), "<s>[INST] 1+2? [/INST]", {"</s>"}, " It is 3.</s>", " It is 3.", "3</s>",
    ),
    "Qwen3 that thinks": Family(
        QWEN_3, "<|im_end|>", ("<|im_start|>", "<|endoftext|>"), THINK, IM_PROMPT, {"<|im_end|>"},
        "<think>\n4?\n</think>\n\n3<|im_end|>", "<think>\n4?\n</think>\n\n3", "3<|im_end|>",
    ),
    "Qwen3 without thinking": Family(
        QWEN_3, "<|im_end|>", ("<|im_start|>", "<|endoftext|>"), THINK, f"{IM_PROMPT}<think>\n\n</think>\n\n",
        {"<|im_end|>"}, "3<|im_end|>", "3", "3<|im_end|>", {"enable_thinking": False},
    ),
    "gpt-oss": Family(
        GPT_OSS, "<|return|>", ("<|start|>", "<|end|>", "<|message|>", "<|channel|>"), (),
        "<|start|>system<|message|>You are ChatGPT.<|end|><|start|>user<|message|>1+2?<|end|><|start|>assistant",
        {"<|return|>"},
        "<|channel|>analysis<|message|>1+2 is 4?<|end|><|start|>assistant<|channel|>final<|message|>3<|return|>",
        "3", "<|channel|>final<|message|>3<|return|>",
    ),
    "gpt-oss cut in its analysis": Family(
        GPT_OSS, "<|return|>", ("<|start|>", "<|end|>", "<|message|>", "<|channel|>"), (),
        "<|start|>system<|message|>You are ChatGPT.<|end|><|start|>user<|message|>1+2?<|end|><|start|>assistant",
        {"<|return|>"}, "<|channel|>analysis<|message|>1+2 is<|end|><|start|>assistant",
        "analysis\n1+2 is\nassistant", "<|channel|>final<|message|>3<|return|>",
    ),
    "DeepSeek R1": Family(
        DEEPSEEK, "<|end▁of▁sentence|>", ("<|User|>", "<|Assistant|>", "<|begin▁of▁sentence|>"), THINK,
        "<|begin▁of▁sentence|><|User|>1+2?<|Assistant|><think>\n", {"<|end▁of▁sentence|>"},
        "4?</think>\n\n3<|end▁of▁sentence|>", "4?</think>\n\n3", "3<|end▁of▁sentence|>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_stops_text_and_solution_are_those_of_the_template(name):
    family, tokenizer = FAMILIES[name], make_tokenizer()
    tokenizer.add_special_tokens({"eos_token": family.eos, "additional_special_tokens": list(family.special)})
    tokenizer.add_tokens(list(family.words))
    tokenizer.bos_token = next((token for token in family.special if token in BEGINS), None)
    tokenizer.chat_template = family.template
    loaded = Loaded(make_model(), tokenizer, (tokenizer.eos_token_id,), "small", chat_params=family.params)
    chat: Chat = loaded.chat
    assert chat.prompt("1+2?").text == family.prompt
    assert {tokenizer.convert_ids_to_tokens(token) for token in loaded.stop_ids} == family.stops
    assert chat.decode(chat.encode(family.sampled)) == family.seen
    row = chat.conversation(Problem("f:1", "1+2?", "3", "3"))
    assert tokenizer.decode(row.ids[slice(*row.spans[-1])]) == family.solution
    assert tokenizer.decode(row.ids) == family.prompt + family.solution
    if "cut" not in name:
        assert last_number(family.seen) == "3"
