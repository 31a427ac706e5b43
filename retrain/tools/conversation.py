"""Completions of typed prompts, for `retrain sample`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import TypeAdapter, ValidationError

from retrain.functional.seeds import derive_seed
from retrain.protocols import Task
from retrain.run.run_context import RunContext
from retrain.system.records import Message
from retrain.types import Request

_MESSAGES: TypeAdapter[list[Message]] = TypeAdapter(list[Message])


def completions(context: RunContext, prompts: Iterable[str], count: int, temperature: float) -> Iterator[str]:
    """Yield `count` completions of each prompt, without special tokens.

    Args:
        context: sampler and task of the reopened run.
        prompts: questions, which get the task's template and system prompt, or JSON lists of chat messages.
        count: number of completions per prompt.
        temperature: sampling temperature; 0 is greedy.
    """
    config, loaded = context.config, context.trained.loaded
    for turn, prompt in enumerate(prompts):
        # A seed for each prompt: a prompt that is typed again gets other samples.
        seed = derive_seed(config.eval.seed, "conversation", turn)
        sampling = loaded.sampling(seed, temperature, config.eval.top_p, config.eval.top_k)
        most = config.eval.max_tokens or config.training.max_tokens
        [group] = context.sampler.sample(
            [Request(context.chat.prompt(_prompt(context.task, prompt)).ids, count, most, stream=0)], sampling
        )
        yield from (context.chat.decode(completion.ids) for completion in group)


def _prompt(task: Task, typed: str) -> Any:
    """Return the messages of a JSON list, or else the text with the task's template and system prompt."""
    # A text that happens to be JSON but no list of messages is a question like any other.
    try:
        return _MESSAGES.validate_json(typed)
    except ValidationError:
        return task.pose(typed)
