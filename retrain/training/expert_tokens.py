"""What an expert said, as token ids with the spans to imitate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from retrain.errors import DataError
from retrain.training.model.loading import Chat, Loaded, render
from retrain.types import Problem

_Turn = tuple[str | list[dict[str, str]], str]


@dataclass(frozen=True, slots=True)
class ExpertRow:
    """One conversation.

    Attributes:
        ids: token ids, the last token of every answer being the end of sequence.
        spans: (first, behind the last) token of every answer to imitate, in order.
    """

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """What comes before the first answer to imitate."""
        return self.ids[: self.spans[0][0]]


def expert_row(loaded: Loaded, problem: Problem, chat: Chat = "auto", *, all_turns: bool = False) -> ExpertRow:
    """Prompt and solution as they would be sampled: answers are tokenized apart, and end with the end of sequence.

    Without a chat template a single message of the user counts as a text prompt.

    Args:
        problem: with a solution; `id` is what errors call it.
        chat: how the prompt is rendered; as for sampling.
        all_turns: the assistant's earlier turns in the prompt are imitated as well.
    Raises:
        DataError: messages need a chat template and there is none, or it cannot render them in one piece.
    """
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    said = ""
    for prompt, answer in _turns(problem, all_turns):
        try:
            text, tokens = render(loaded.tokenizer, _plain(loaded, prompt, chat), chat)
        except Exception as error:  # a template may raise anything
            raise DataError(f"{problem.id}: {error}") from error
        if not text.startswith(said):
            raise DataError(
                f"{problem.id}: the chat template renders an earlier turn differently once it is answered, so that "
                "the turns are no single row; leave out [expert] all_assistant_turns"
            )
        ids += _encode(loaded, text[len(said) :]) if said else tokens
        start = len(ids)
        ids += [*_encode(loaded, answer), loaded.end_id]
        spans.append((start, len(ids)))
        said = text + answer + str(loaded.tokenizer.convert_ids_to_tokens(loaded.end_id))
    return ExpertRow(tuple(ids), tuple(spans))


def _turns(problem: Problem, all_turns: bool) -> list[_Turn]:
    """(what comes before, answer) of every turn to imitate."""
    prompt = problem.prompt
    last: _Turn = (prompt, problem.solution or "")
    if isinstance(prompt, str) or not all_turns:
        return [last]
    spoken = [index for index, message in enumerate(prompt) if index and message["role"] == "assistant"]
    return [*((prompt[:index], prompt[index]["content"]) for index in spoken), last]


def _plain(loaded: Loaded, prompt: str | list[dict[str, str]], chat: Chat) -> str | list[dict[str, str]]:
    template = getattr(loaded.tokenizer, "chat_template", None) is not None and chat != "off"
    if template or isinstance(prompt, str) or [message["role"] for message in prompt] != ["user"]:
        return prompt
    return prompt[0]["content"]


def _encode(loaded: Loaded, text: str) -> list[int]:
    tokenizer: Any = loaded.tokenizer
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
