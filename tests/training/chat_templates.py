"""Small copies of thirty families' chat templates: what each puts around messages, and the token that ends a reply.

Each keeps what makes a conversation hard to continue: whitespace that is trimmed, roles that must alternate, tool
results in a place of their own, thinking that is left out of earlier replies, prompts that open the thinking.
"""

from pathlib import Path
from typing import NamedTuple

import tomli

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


TEMPLATES = tomli.loads(Path(__file__).with_suffix(".toml").read_text())
FAMILIES = {name: Family(**row) for name, row in TEMPLATES["families"].items()}


def chat(family: Family | None) -> Chat:
    """A small tokenizer with this template and end of replies, or without a template."""
    if family is None:
        tokenizer = make_tokenizer()
        return Chat(tokenizer, int(tokenizer.eos_token_id or 0))
    tokenizer = make_tokenizer(True)
    tokenizer.add_special_tokens({"eos_token": family.end})
    tokenizer.chat_template = family.template
    return Chat(tokenizer, int(tokenizer.eos_token_id or 0))
