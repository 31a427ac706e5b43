"""Rendering of prompts, messages and answers as token ids, and decoding of token ids to text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from retrain.algorithms.planning.token_text import TokenText
from retrain.errors import DataError
from retrain.types import Completion, ExpertRow, Problem, Rollout, Turn, messages_of

_REPLY = "reply"
"""An answer in a conversation that is rendered to see what the chat template writes around answers."""
TemplateMode = Literal["auto", "on", "off"]
Messages = list[dict[str, str]]
_PromptAndAnswer = tuple[str | Messages, str]

SEPARATOR = "\ufdd0"
"""A Unicode noncharacter, reserved for a program's internal use. `encode` tokenizes the parts before and after it
separately.
"""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as the model receives it: the rendered text, with the template's additions, and its token ids."""

    text: str
    ids: tuple[int, ...]


RenderedPrompt = tuple[Problem, TokenizedPrompt]
"""A problem with its prompt as the model receives it."""


@dataclass(frozen=True)
class Chat:
    """Renders the model's input with its tokenizer and chat template.

    Attributes:
        tokenizer: the model's transformers tokenizer.
        eos_id: id of the token that ends a text; it ends an answer if the chat template writes no token behind one.
        mode: "auto" uses the chat template if the tokenizer has one, "on" requires one, "off" ignores it.
        params: variables for the chat template, such as `enable_thinking`.
    """

    tokenizer: Any
    eos_id: int
    mode: TemplateMode = "auto"
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def prompt(self, prompt: str | Messages, tools: Sequence[Mapping[str, Any]] | None = None) -> TokenizedPrompt:
        """Render a prompt, ready for an answer to follow.

        With a template a text becomes a single user message. Without one it is tokenized as it is.

        Args:
            prompt: a text, or messages.
            tools: JSON schemas of functions, for templates that render them.
        Raises:
            DataError: there is no chat template, and the prompt is a list of messages or the mode is "on"; or the
                template refuses the messages.
        """
        if not self.templated:
            if not isinstance(prompt, str) or self.mode == "on":
                raise DataError(
                    f"the prompt cannot be rendered as a chat: there is no chat template (chat = {self.mode!r}); "
                    'use an instruct model, or text prompts with [model] chat = "auto"'
                )
            ids: list[int] = self.tokenizer(prompt)["input_ids"]
            # A few tokenizers append an end-of-sequence token to every text, but the completion follows the prompt.
            ids = ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids
            # The text may begin with the token that the tokenizer puts in front of it.
            start = int(len(ids) > 1 and ids[0] == ids[1] == self.tokenizer.bos_token_id)
            return TokenizedPrompt(prompt, tuple(ids[start:]))
        text = self.render(messages_of(prompt), add_generation_prompt=True, tools=tools)
        return TokenizedPrompt(text.replace(SEPARATOR, ""), tuple(self.encode(text)))

    def of(self, problem: Problem) -> Chat:
        """Return the renderer with the template variables of a problem's row."""
        return replace(self, params={**self.params, **problem.template}) if problem.template else self

    def prompt_of(self, problem: Problem) -> TokenizedPrompt:
        """Render a problem's prompt with the tools and template variables of its row.

        Raises:
            DataError: see `prompt`; or the chat template does not show a tool of the row.
        """
        prompt = self.of(problem).prompt(problem.prompt)
        tools: Sequence[Mapping[str, Any]] = problem.template.get("tools", ())
        # A template without tools renders the prompt all the same, and the model would never learn of them.
        hidden = [name for tool in tools if (name := str(tool.get("function", tool).get("name"))) not in prompt.text]
        if hidden:
            raise DataError(
                f"{problem.place or problem.id}: the prompt does not show the row's tool {hidden[0]}, because "
                f"{'the chat template renders no tools' if self.templated else 'there is no chat template'}; use a "
                "model whose template does, or remove the column tools"
            )
        return prompt

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that follows other tokens: no special tokens are added."""
        return [
            id_ for part in text.split(SEPARATOR) for id_ in self.tokenizer(part, add_special_tokens=False)["input_ids"]
        ]

    def quoted(self, text: str) -> str:
        """Return the text with its special tokens disabled: `encode` then makes ordinary tokens of their letters.

        Without a chat template the text is returned unchanged, and special tokens in it are active.
        """
        return self._special.sub(rf"\1{SEPARATOR}", text.replace(SEPARATOR, "\ufffd")) if self.templated else text

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without the tokens that begin, end and pad texts and turns.

        Other special tokens, such as a `<think>` of the tokenizer, are part of the text, so that a reward can read
        them. A line ends where tokens were left out between two words, as in gpt-oss's `analysis...final18`. If the
        template opens answers with special tokens (gpt-oss's final channel), the text is what follows the last opening.
        """
        visible: list[list[int]] = [[]]
        for token in self._after_opening(ids):
            # Runs are decoded as a whole, because a character may consist of several tokens.
            if token not in self._markers:
                visible[-1].append(token)
            elif visible[-1]:
                visible.append([])
        joined = ""
        for text in (str(self.tokenizer.decode(run)) for run in visible):
            ended = not (joined and text) or joined[-1].isspace() or text[0].isspace()
            joined += text if ended else f"\n{text}"
        return joined

    def _after_opening(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the ids behind the last `_answer_opening`, or all of them if there is none."""
        opening = list(self._answer_opening)
        for end in range(len(ids), len(opening) - 1, -1) if opening else ():
            if list(ids[end - len(opening) : end]) == opening:
                return ids[end:]
        return ids

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Text of each token, special tokens included; a character of several tokens belongs to the last of them."""
        return self._text.pieces(ids)

    def rollout(
        self, rendered: RenderedPrompt, group: int, ids: Sequence[int], logprobs: Sequence[float], turns: Sequence[Turn]
    ) -> Rollout:
        """Make a rollout without a reward.

        Args:
            rendered: the problem and its prompt.
            group: index of the prompt's group in its step.
            ids, logprobs: one entry for each token after the prompt.
            turns: positions of the sampled tokens in `ids`.
        """
        problem, prompt = rendered
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
        """Render the prompt and the solution as an expert row, with the tokens that sampling would give.

        Answers are tokenized separately from the prompt. Each begins as the template opens answers, if it does so with
        special tokens, and ends with the token `end_id`. Without a chat template a single user message counts as a text
        prompt.

        Args:
            problem: a problem with a solution; errors name it by its `id`.
            all_turns: imitate the assistant's earlier turns in the prompt as well.
        Raises:
            DataError: the prompt is a list of messages without a chat template, the template refuses the messages, or
                it renders an earlier turn differently in the prompts of later turns.
        """
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        rendered = ""
        chat = self.of(problem)
        for before, answer in chat._turns(problem, all_turns):
            try:
                prompt = chat.prompt(self._plain(before))
            except Exception as error:  # a template may raise anything
                raise DataError(f"{problem.id}: {error}") from error
            if not prompt.text.startswith(rendered):
                raise DataError(
                    f"{problem.id}: the chat template renders an earlier turn differently once it is answered, so that "
                    "the turns do not form one row; leave out [expert] all_assistant_turns"
                )
            ids += self.encode(prompt.text[len(rendered) :]) if rendered else prompt.ids
            start = len(ids)
            # Encoded by itself: sampled tokens never merge with the prompt's last ones.
            ids += [*self._answer_opening, *self.encode(answer), self.end_id]
            spans.append((start, len(ids)))
            opening = str(self.tokenizer.decode(self._answer_opening))
            rendered = prompt.text + opening + answer + str(self.tokenizer.convert_ids_to_tokens(self.end_id))
        return ExpertRow(tuple(ids), tuple(spans))

    def warning(self, prompt: str | Messages) -> str | None:
        """Return a warning if the rendered prompt is not a prefix of the rendered prompt and answer; else None.

        Some templates rewrite earlier turns, for example drop their thinking. A model that is served with such a
        template reads, from the second turn on, a context that it was not trained on.
        """
        text = self.prompt(prompt).text
        if not self.templated:
            return None
        whole = self.render([*messages_of(prompt), {"role": "assistant", "content": "42"}])
        if whole.startswith(text):
            return None
        at = next((i for i, pair in enumerate(zip(text, whole, strict=False)) if pair[0] != pair[1]), len(whole))
        return (
            f"the chat template renders the prompt differently once it is answered: {text[at : at + 40]!r} becomes "
            f"{whole[at : at + 40]!r}; with several turns, a served model reads other tokens than those of its training"
        )

    def dated(self, prompt: str | Messages) -> bool:
        """Return True if the chat template writes today's date into this prompt."""
        if not self.templated:
            return False
        # transformers gives templates the function strftime_now; a macro in its place shows whether it is called.
        marker = "<strftime_now>"
        template = f"{{% macro strftime_now(form) %}}{marker}{{% endmacro %}}" + self.tokenizer.get_chat_template()
        return marker in self.render(messages_of(prompt), chat_template=template)

    @cached_property
    def end_id(self) -> int:
        """Id of the token that ends an answer: the first special token that the template writes behind it.

        A base model with a ChatML template has another end of text, which its template does not write.
        """
        special = self.tokenizer.added_tokens_decoder
        return next((token for token in self._answered[1] if token in special), self.eos_id)

    @cached_property
    def _answer_opening(self) -> tuple[int, ...]:
        """Tokens that the template writes between a prompt and its answer, if some are special; else ()."""
        opening = self._answered[0]
        return opening if self._markers & set(opening) else ()

    @cached_property
    def _answered(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens that the template writes in front of an answer, after its prompt, and behind it."""
        if not self.templated:
            return (), ()
        question = [{"role": "user", "content": "x"}]
        try:
            prompt = self.render(question, add_generation_prompt=True)
            whole = self.render([*question, {"role": "assistant", "content": _REPLY}])
        except DataError:  # a template may want other roles first; rendering the data then says so
            return (), ()
        before, reply, after = whole.partition(_REPLY)
        # A template that renders the prompt differently once it is answered has no opening.
        opening = before.removeprefix(prompt) if reply and before.startswith(prompt) else ""
        return tuple(self.encode(opening)), tuple(self.encode(after))

    @property
    def templated(self) -> bool:
        """True if prompts are rendered with a chat template."""
        return self.mode != "off" and getattr(self.tokenizer, "chat_template", None) is not None

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Render messages with the chat template, as text; `options` are those of `apply_chat_template`.

        Raises:
            DataError: the template refuses the messages; some refuse a system message, or two turns of one role.
        """
        try:
            tools = self.params.get("tools") or []
            variables = {**self.params, **options, "tools": [*tools, *(options.get("tools") or [])] or None}
            return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, **variables))
        except Exception as error:  # a template may raise anything
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise DataError(f"the chat template does not render messages of {roles}: {error}") from error

    @cached_property
    def _text(self) -> TokenText:
        return TokenText(self.tokenizer, special=True)

    @property
    def hidden(self) -> set[str]:
        """Texts of the special tokens that `decode` leaves out: begin, end, padding, and those of `written`."""
        return {str(self.tokenizer.convert_ids_to_tokens(token)) for token in self._markers if token is not None}

    @cached_property
    def _markers(self) -> frozenset[int | None]:
        # An id may be None; it equals no token.
        ids = {getattr(self.tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
        return frozenset((*ids, self.end_id, *self.written))

    @cached_property
    def written(self) -> dict[int, str]:
        """Special tokens that the chat template writes around messages, id -> text; empty without a template."""
        if not self.templated:
            return {}
        # An answer with a question behind it: many templates write an empty <think> in front of the last answer.
        turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
        ids, special = set(self.encode(self.render(turns))), self.tokenizer.added_tokens_decoder
        return {token: str(text) for token, text in special.items() if text.special and token in ids}

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Pattern of the first character of a special token, which it matches wherever a special token begins."""
        texts = [str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        # A lookahead, because special tokens may overlap. Without any, the pattern matches nothing.
        return re.compile(f"(?=(?:{'|'.join(map(re.escape, texts))}))(.)" if texts else "(?!)()", re.DOTALL)

    def _turns(self, problem: Problem, all_turns: bool) -> list[_PromptAndAnswer]:
        """Return (context, answer) of every turn to imitate."""
        prompt = problem.prompt
        last: _PromptAndAnswer = (prompt, problem.solution or "")
        if isinstance(prompt, str) or not all_turns:
            return [last]
        earlier = [index for index, message in enumerate(prompt) if index and message["role"] == "assistant"]
        return [*((prompt[:index], self._as_written(prompt, index)) for index in earlier), last]

    def _as_written(self, messages: Messages, index: int) -> str:
        """Return an assistant's message as the model writes it: its text, or the template's rendering of its calls."""
        message: Mapping[str, Any] = messages[index]
        if not message.get("tool_calls") or not self.templated:
            return str(message["content"])
        before = self.render(messages[:index], add_generation_prompt=True)
        whole = self.render(messages[: index + 1])
        end = str(self.tokenizer.convert_ids_to_tokens(self.end_id))
        return whole[len(before) :].rpartition(end)[0] if whole.startswith(before) else str(message["content"])

    def _plain(self, prompt: str | Messages) -> str | Messages:
        if self.templated or isinstance(prompt, str) or [message["role"] for message in prompt] != ["user"]:
            return prompt
        return prompt[0]["content"]


@dataclass(eq=False)
class Transcript:
    """A conversation as tokens. Sampled tokens are kept as they are and never tokenized again.

    Attributes:
        prompt: the tokens before the first turn.
        ids, logprobs: one entry for each token after the prompt; the log-prob of a token that was not sampled is 0.
        turns: positions of the sampled tokens in `ids`, with their finish reasons.
    """

    prompt: TokenizedPrompt
    ids: list[int] = field(default_factory=list[int], kw_only=True)
    logprobs: list[float] = field(default_factory=list[float], kw_only=True)
    turns: list[Turn] = field(default_factory=list[Turn], kw_only=True)

    @property
    def context(self) -> tuple[int, ...]:
        """Token ids of the whole conversation, prompt included."""
        return (*self.prompt.ids, *self.ids)

    @property
    def end(self) -> int | None:
        """The token that ended the last turn; None if the token limit cut the turn."""
        return self.ids[-1] if self.turns[-1].finish_reason == "stop" else None

    def add_turn(self, completion: Completion, state: str = "") -> None:
        """Append a sampled turn; `state` is the key of the environment's state before it, "" if unknown."""
        start = len(self.ids)
        self.ids += completion.ids
        self.logprobs += completion.logprobs
        origin = completion.finish_reason, completion.weights_version
        self.turns.append(Turn(start, len(self.ids), *origin, state=state, versions=completion.versions))

    def observe(self, ids: Sequence[int]) -> None:
        """Append the tokens of an observation."""
        self.ids += ids
        self.logprobs += [0.0] * len(ids)


def plain_text(prompt: str | Messages) -> str:
    """Return a prompt as text without a template; the contents of messages are put one per line."""
    return prompt if isinstance(prompt, str) else "".join(f"{message['content']}\n" for message in prompt)
