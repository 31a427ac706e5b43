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
from tests.training.chat_templates import TEMPLATES
from tests.training.small_models import make_model

PUBLIC = TEMPLATES["public"]


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
        PUBLIC["CHATML"], "<|endoftext|>", IM, (), IM_PROMPT, {"<|endoftext|>", "<|im_end|>"},
        "It is 3.<|im_end|>", "It is 3.", "3<|im_end|>",
    ),
    "Llama 3": Family(
        PUBLIC["LLAMA_3"], "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"), (),
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        {"<|eot_id|>"}, "It is 3.<|eot_id|>", "It is 3.", "3<|eot_id|>",
    ),
    "Gemma": Family(
        PUBLIC["GEMMA"], "<eos>", ("<start_of_turn>", "<end_of_turn>", "<bos>"), (),
        "<bos><start_of_turn>user\n1+2?<end_of_turn>\n<start_of_turn>model\n",
        {"<eos>", "<end_of_turn>"}, "It is 3.<end_of_turn>", "It is 3.", "3<end_of_turn>",
    ),
    "Mistral": Family(
        PUBLIC["MISTRAL"], "</s>", ("<s>",), (), "<s>[INST] 1+2? [/INST]", {"</s>"},
        " It is 3.</s>", " It is 3.", "3</s>",
    ),
    "Qwen3 that thinks": Family(
        PUBLIC["QWEN_3"], "<|im_end|>", ("<|im_start|>", "<|endoftext|>"), THINK, IM_PROMPT, {"<|im_end|>"},
        "<think>\n4?\n</think>\n\n3<|im_end|>", "<think>\n4?\n</think>\n\n3", "3<|im_end|>",
    ),
    "Qwen3 without thinking": Family(
        PUBLIC["QWEN_3"], "<|im_end|>", ("<|im_start|>", "<|endoftext|>"), THINK, f"{IM_PROMPT}<think>\n\n</think>\n\n",
        {"<|im_end|>"}, "3<|im_end|>", "3", "3<|im_end|>", {"enable_thinking": False},
    ),
    "gpt-oss": Family(
        PUBLIC["GPT_OSS"], "<|return|>", ("<|start|>", "<|end|>", "<|message|>", "<|channel|>"), (),
        "<|start|>system<|message|>You are ChatGPT.<|end|><|start|>user<|message|>1+2?<|end|><|start|>assistant",
        {"<|return|>"},
        "<|channel|>analysis<|message|>1+2 is 4?<|end|><|start|>assistant<|channel|>final<|message|>3<|return|>",
        "3", "<|channel|>final<|message|>3<|return|>",
    ),
    "gpt-oss cut in its analysis": Family(
        PUBLIC["GPT_OSS"], "<|return|>", ("<|start|>", "<|end|>", "<|message|>", "<|channel|>"), (),
        "<|start|>system<|message|>You are ChatGPT.<|end|><|start|>user<|message|>1+2?<|end|><|start|>assistant",
        {"<|return|>"}, "<|channel|>analysis<|message|>1+2 is<|end|><|start|>assistant",
        "analysis\n1+2 is\nassistant", "<|channel|>final<|message|>3<|return|>",
    ),
    "DeepSeek R1": Family(
        PUBLIC["DEEPSEEK"], "<|end▁of▁sentence|>", ("<|User|>", "<|Assistant|>", "<|begin▁of▁sentence|>"), THINK,
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
