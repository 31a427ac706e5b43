"""All rendering: prompts, messages and answers to token ids, and token ids to text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from retrain.algorithms.planning.token_text import TokenText
from retrain.errors import DataError
from retrain.types import ExpertRow, Problem, Rollout, Turn

TemplateMode = Literal["auto", "on", "off"]
Messages = list[dict[str, str]]
_PromptAndAnswer = tuple[str | Messages, str]

OWN = "\ufdd0"
"""A character that Unicode keeps for a program's own use. Between two parts of a text: they are tokenized apart."""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as the model sees it: its text with the template's, and token ids."""

    text: str
    ids: tuple[int, ...]


RenderedPrompt = tuple[Problem, TokenizedPrompt]
"""A problem with its prompt as the model sees it."""


@dataclass(frozen=True)
class Chat:
    """Renders what a model is shown, once: tokens that were sampled are never tokenized again.

    Attributes:
        tokenizer: of the model.
        end_id: ends an answer.
        mode: "auto" uses the chat template if the tokenizer has one, "on" demands it, "off" forbids it.
    """

    tokenizer: Any
    end_id: int
    mode: TemplateMode = "auto"

    def prompt(self, prompt: str | Messages, tools: Sequence[Mapping[str, Any]] | None = None) -> TokenizedPrompt:
        """A prompt, open for an answer.

        With a template a text becomes the one user message; without one it is tokenized as it is.

        Args:
            prompt: a text, or messages.
            tools: for templates that show what may be called.

        Raises:
            DataError: messages without a chat template to render them or that it refuses, or mode "on" without one.
        """
        if not self.templated:
            if not isinstance(prompt, str) or self.mode == "on":
                raise DataError(
                    f"the prompt is to be rendered as a chat and there is no chat template (chat = {self.mode!r}); "
                    'use an instruct model, or text prompts with [model] chat = "auto"'
                )
            ids: list[int] = self.tokenizer(prompt)["input_ids"]
            # A few tokenizers close every text; the prompt of a completion stays open.
            return TokenizedPrompt(prompt, tuple(ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids))
        text = self.render(_messages(prompt), add_generation_prompt=True, tools=tools)
        return TokenizedPrompt(text.replace(OWN, ""), tuple(self.encode(text)))

    def encode(self, text: str) -> list[int]:
        """Token ids of text that stands after other tokens."""
        return [one for part in text.split(OWN) for one in self.tokenizer(part, add_special_tokens=False)["input_ids"]]

    def quoted(self, text: str) -> str:
        """A text in which special tokens are words like others: without their meaning, such as to end a turn.

        Without a chat template it stays as it is, and may write special tokens.
        """
        return self._special.sub(rf"\1{OWN}", text.replace(OWN, "\ufffd")) if self.templated else text

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Text of each token, special tokens included; a character of several tokens is that of the last of them."""
        return self._text.pieces(ids)

    def rollout(
        self, posed: RenderedPrompt, group: int, ids: Sequence[int], logprobs: Sequence[float], turns: Sequence[Turn]
    ) -> Rollout:
        """What was sampled for a problem after its prompt, with its text; not scored yet."""
        problem, prompt = posed
        return Rollout(
            problem_id=problem.id,
            prompt=prompt.text,
            answer=problem.answer,
            prompt_ids=prompt.ids,
            completion_ids=tuple(ids),
            sampler_logprobs=tuple(logprobs),
            text=self.decode(ids),
            turns=tuple(turns),
            group=group,
            environment=problem.environment,
        )

    def conversation(self, problem: Problem, *, all_turns: bool = False) -> ExpertRow:
        """Prompt and solution as they would be sampled: answers are tokenized apart, and end with the end of sequence.

        Without a chat template a single message of the user counts as a text prompt.

        Args:
            problem: with a solution; `id` is what errors call it.
            all_turns: the assistant's earlier turns in the prompt are imitated as well.
        Raises:
            DataError: messages without a chat template, or with one that cannot render them in one piece.
        """
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        said = ""
        for before, answer in _turns(problem, all_turns):
            try:
                prompt = self.prompt(self._plain(before))
            except Exception as error:  # a template may raise anything
                raise DataError(f"{problem.id}: {error}") from error
            if not prompt.text.startswith(said):
                raise DataError(
                    f"{problem.id}: the chat template renders an earlier turn differently once it is answered, so that "
                    "the turns are no single row; leave out [expert] all_assistant_turns"
                )
            ids += self.encode(prompt.text[len(said) :]) if said else prompt.ids
            start = len(ids)
            ids += [*self.encode(answer), self.end_id]
            spans.append((start, len(ids)))
            said = prompt.text + answer + str(self.tokenizer.convert_ids_to_tokens(self.end_id))
        return ExpertRow(tuple(ids), tuple(spans))

    def warning(self, prompt: str | Messages) -> str | None:
        """What is wrong with the chat template, or None: the prompt must be a prefix of prompt + answer.

        A template that rewrites history (some drop earlier thinking) shows the model, in use, another
        prompt than the one it was trained on.
        """
        text = self.prompt(prompt).text
        if not self.templated:
            return None
        whole = self.render([*_messages(prompt), {"role": "assistant", "content": "42"}])
        if whole.startswith(text):
            return None
        at = next((i for i, pair in enumerate(zip(text, whole, strict=False)) if pair[0] != pair[1]), len(whole))
        return (
            f"the chat template renders the prompt differently once it is answered: {text[at : at + 40]!r} becomes "
            f"{whole[at : at + 40]!r}; several turns would not continue the tokens that were trained"
        )

    @property
    def templated(self) -> bool:
        """Prompts are rendered with a chat template."""
        return self.mode != "off" and getattr(self.tokenizer, "chat_template", None) is not None

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Messages as the template's text.

        Raises:
            DataError: the template refuses them, as some do a system message or two turns of one role.
        """
        try:
            return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
        except Exception as error:  # a template may raise anything
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise DataError(f"the chat template does not render messages of {roles}: {error}") from error

    @cached_property
    def _text(self) -> TokenText:
        return TokenText(self.tokenizer, special=True)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """The first character of each special token, wherever one begins."""
        known = [str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return re.compile(f"(?=(?:{'|'.join(map(re.escape, known))}))(.)" if known else "(?!)()", re.DOTALL)

    def _plain(self, prompt: str | Messages) -> str | Messages:
        if self.templated or isinstance(prompt, str) or [message["role"] for message in prompt] != ["user"]:
            return prompt
        return prompt[0]["content"]


def plain_text(prompt: str | Messages) -> str:
    """The prompt as text without any template: itself, or its messages' contents, a line each."""
    return prompt if isinstance(prompt, str) else "".join(f"{message['content']}\n" for message in prompt)


def _messages(prompt: str | Messages) -> Messages:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _turns(problem: Problem, all_turns: bool) -> list[_PromptAndAnswer]:
    """(what comes before, answer) of every turn to imitate."""
    prompt = problem.prompt
    last: _PromptAndAnswer = (prompt, problem.solution or "")
    if isinstance(prompt, str) or not all_turns:
        return [last]
    spoken = [index for index, message in enumerate(prompt) if index and message["role"] == "assistant"]
    return [*((prompt[:index], prompt[index]["content"]) for index in spoken), last]
