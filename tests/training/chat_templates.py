"""Small copies of thirty families' chat templates: what each puts around messages, and the token that ends a reply.

Each keeps what makes a conversation hard to continue: whitespace that is trimmed, roles that must alternate, tool
results in a place of their own, thinking that is left out of earlier replies, prompts that open the thinking.
"""

from typing import NamedTuple

from retrain.training.chat import Chat
from tests.make_checkpoint import make_tokenizer


class Family(NamedTuple):
    """A chat template.

    Attributes:
        template: its Jinja source. end: the token with which a reply ends.
        keeps: what it renders of earlier replies is what they were, thinking included.
        tool: what a tool says is shown in a place of its own.
        tools: the schemas of tools are shown.
    """

    template: str
    end: str
    keeps: bool = True
    tool: bool = True
    tools: bool = False


def _each(body: str, generation: str = "") -> str:
    asked = "{% if add_generation_prompt %}" + generation + "{% endif %}" if generation else ""
    return "{% for m in messages %}" + body + "{% endfor %}" + asked


def _roles(user: str, assistant: str, tool: str = "", system: str = "{{ m.content }}") -> str:
    return (
        "{% if m.role == 'user' %}"
        + user
        + "{% elif m.role == 'assistant' %}"
        + assistant
        + ("{% elif m.role == 'tool' %}" + tool if tool else "")
        + "{% elif m.role == 'system' %}"
        + system
        + "{% endif %}"
    )


_IM = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_ANSWERS = "<|im_start|>assistant\n"
_SCHEMAS = "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
_ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
)
_SAID = "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
_RESPONSE = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
_LAST_USER = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
_HEADER = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
_TURN = "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
_TURN_TOKEN = "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>{{{{ m.content }}}}<|END_OF_TURN_TOKEN|>"

FAMILIES = {
    "chatml": Family(_each(_IM, _ANSWERS), "<|im_end|>"),
    "qwen2.5": Family(
        _SCHEMAS + _each("{% if m.role == 'tool' %}" + _RESPONSE + "{% else %}" + _IM + "{% endif %}", _ANSWERS),
        "<|im_end|>",
        tools=True,
    ),
    "qwen3": Family(
        _SCHEMAS
        + _LAST_USER
        + _each(
            "{% if m.role == 'tool' %}" + _RESPONSE + "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
            "{% if loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}" + _SAID + "<|im_end|>\n"
            "{% else %}" + _IM + "{% endif %}",
            _ANSWERS,
        ),
        "<|im_end|>",
        keeps=False,
        tools=True,
    ),
    "qwen3 that opens the thinking": Family(
        _each(_roles(_IM, _ANSWERS + _SAID + "<|im_end|>\n", _RESPONSE), _ANSWERS + "<think>\n"),
        "<|im_end|>",
        keeps=False,
    ),
    "smollm3": Family(
        _each(_roles(_IM, _ANSWERS + "{{ m.content }}<|im_end|>\n", _RESPONSE), _ANSWERS + "<think>\n\n</think>\n"),
        "<|im_end|>",
        keeps=False,
    ),
    "yi": Family(_each("{% if m.role != 'tool' %}" + _IM + "{% endif %}", _ANSWERS), "<|im_end|>", tool=False),
    "llama 2": Family(
        _each(_ALTERNATE + _roles("<s>[INST] {{ m.content.strip() }} [/INST]", " {{ m.content.strip() }} </s>")),
        "</s>",
        keeps=False,
        tool=False,
    ),
    "llama 3": Family(
        _each(_HEADER, "<|start_header_id|>assistant<|end_header_id|>\n\n"),
        "<|eot_id|>",
    ),
    "llama 3.1": Family(
        "<|begin_of_text|>"
        + _SCHEMAS
        + _each(
            "{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
            "{% else %}" + _HEADER + "{% endif %}",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        "<|eot_id|>",
        tools=True,
    ),
    "mistral 0.1": Family(
        "<s>" + _each(_ALTERNATE + _roles("[INST] {{ m.content }} [/INST]", "{{ m.content }}</s>")), "</s>", tool=False
    ),
    "mistral 0.3": Family(
        "<s>"
        + _each(
            "{% if m.role == 'user' %}{% if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}"
            "[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]{% elif m.role == 'assistant' %}"
            " {{ m.content }}</s>{% elif m.role == 'tool' %}"
            "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
            '[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% endif %}'
        ),
        "</s>",
        keeps=False,
        tools=True,
    ),
    "gemma": Family("<bos>" + _each(_ALTERNATE + _TURN, "<start_of_turn>model\n"), "<end_of_turn>", tool=False),
    "gemma 3": Family(
        "<bos>"
        + _each(
            "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + _TURN, "<start_of_turn>model\n"
        ),
        "<end_of_turn>",
        tool=False,
    ),
    "phi 3": Family(
        _each("{% if m.role != 'tool' %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endif %}", "<|assistant|>\n"),
        "<|end|>",
        tool=False,
    ),
    "phi 4": Family(
        _each("<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
        "<|im_end|>",
    ),
    "zephyr": Family(
        _each(_roles(*(f"<|{role}|>\n{{{{ m.content }}}}</s>\n" for role in ("user", "assistant", "tool"))))
        + "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        "</s>",
    ),
    "vicuna": Family(
        _each(_roles("USER: {{ m.content }} ", "ASSISTANT: {{ m.content }}</s>"), "ASSISTANT: "), "</s>", tool=False
    ),
    "alpaca": Family(
        _each(_roles("### Instruction:\n{{ m.content }}\n\n", "### Response:\n{{ m.content }}</s>"), "### Response:\n"),
        "</s>",
        tool=False,
    ),
    "deepseek 2": Family(
        "<bos>" + _each(_roles("User: {{ m.content }}\n\n", "Assistant: {{ m.content }}<eos>"), "Assistant: "),
        "<eos>",
        tool=False,
    ),
    "deepseek r1": Family(
        "<bos>"
        + _each(
            _roles("<|User|>{{ m.content }}", "<|Assistant|>" + _SAID + "<eos>", "<|tool_output|>{{ m.content }}"),
            "<|Assistant|><think>\n",
        ),
        "<eos>",
        keeps=False,
    ),
    "command r": Family(
        "<bos>"
        + _each(
            _roles(*(_TURN_TOKEN.format(role) for role in ("USER", "CHATBOT"))),
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        ),
        "<|END_OF_TURN_TOKEN|>",
        tool=False,
    ),
    "granite": Family(
        _SCHEMAS
        + _each(
            "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<eos>\n",
            "<|start_of_role|>assistant<|end_of_role|>",
        ),
        "<eos>",
        tools=True,
    ),
    "tulu": Family(
        _each(
            _roles(
                "<|user|>\n{{ m.content }}\n",
                "<|assistant|>\n{{ m.content }}{{ '<eos>\n' if not loop.last else '<eos>' }}",
            ),
            "<|assistant|>\n",
        ),
        "<eos>",
        tool=False,
    ),
    "glm 4": Family(
        "[gMASK]<sop>"
        + _each(
            _roles(
                "<|user|>\n{{ m.content }}", "<|assistant|>\n" + _SAID + "<eos>", "<|observation|>\n{{ m.content }}"
            ),
            "<|assistant|>\n",
        ),
        "<eos>",
        keeps=False,
    ),
    "nemotron": Family(
        _each(
            _roles(
                "<extra_id_1>User\n{{ m.content }}\n",
                "<extra_id_1>Assistant\n" + _SAID + "<eos>\n",
                "<extra_id_1>Tool\n{{ m.content }}\n",
            ),
            "<extra_id_1>Assistant\n",
        ),
        "<eos>",
        keeps=False,
    ),
    "gpt-oss": Family(
        _each(
            _roles(
                "<|start|>user<|message|>{{ m.content }}<|end|>",
                "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>",
                "<|start|>functions.{{ m.name }} to=assistant<|message|>{{ m.content | tojson }}<|end|>",
            ),
            "<|start|>assistant",
        ),
        "<|return|>",
        keeps=False,
    ),
    "openchat": Family(
        _each(
            _roles("GPT4 Correct User: {{ m.content }}<|end|>", "GPT4 Correct Assistant: {{ m.content }}<|end|>"),
            "GPT4 Correct Assistant: ",
        ),
        "<|end|>",
        tool=False,
    ),
    "falcon": Family(
        _each("{% if not loop.first %}\n{% endif %}{{ m.role | capitalize }}: {{ m.content }}", "\nAssistant: "),
        "<eos>",
        keeps=False,
    ),
    "exaone": Family(
        _each(_roles("[|user|]{{ m.content }}\n", "[|assistant|]{{ m.content }}[|endofturn|]\n"), "[|assistant|]"),
        "[|endofturn|]",
        tool=False,
    ),
    "hermes": Family(
        _SCHEMAS
        + _each(
            "{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>tool{% endif %}\n"
            "<tool_response>\n{{ m.content }}\n</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}"
            "<|im_end|>\n{% endif %}{% else %}" + _IM + "{% endif %}",
            _ANSWERS,
        ),
        "<|im_end|>",
        tools=True,
    ),
    "a list of parts": Family(
        _each(
            "<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
            "{{ p.text }}{% endfor %}{% endif %}<|im_end|>\n",
            _ANSWERS,
        ),
        "<|im_end|>",
    ),
}


def chat(family: Family | None) -> Chat:
    """A small tokenizer with this template and end of replies, or without a template."""
    if family is None:
        tokenizer = make_tokenizer()
        return Chat(tokenizer, int(tokenizer.eos_token_id or 0))
    tokenizer = make_tokenizer(True)
    tokenizer.add_special_tokens({"eos_token": family.end})
    tokenizer.chat_template = family.template
    return Chat(tokenizer, int(tokenizer.eos_token_id or 0))
