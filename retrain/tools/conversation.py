"""Completions of prompts that a person types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import TypeAdapter, ValidationError

from retrain.functional.seeds import derive_seed
from retrain.protocols import Task
from retrain.run.run_context import SamplingContext
from retrain.system.records import Message
from retrain.types import Request, Sampling

_MESSAGES: TypeAdapter[list[Message]] = TypeAdapter(list[Message])


def completions(context: SamplingContext, prompts: Iterable[str], count: int, temperature: float) -> Iterator[str]:
    """`count` completions of each prompt in turn by a run's sampler, without special tokens.

    Args:
        context: of the reopened run.
        prompts: as the task poses them; a JSON list of messages as it is.
        temperature: 0 is greedy.
    """
    config = context.config
    for turn, prompt in enumerate(prompts):
        sampling = Sampling(
            temperature=temperature,
            top_p=config.eval.top_p,
            top_k=config.eval.top_k,
            stop_ids=context.loaded.stop_ids,
            seed=derive_seed(config.eval.seed, "conversation", turn),
        )
        most = config.eval.max_tokens or config.training.max_tokens
        [group] = context.sampler.sample(
            [Request(context.chat.prompt(_asked(context.task, prompt)).ids, count, most, stream=0)], sampling
        )
        yield from (context.chat.decode(completion.ids) for completion in group)


def _asked(task: Task, typed: str) -> Any:
    """The prompt that was typed: messages, or a question in the task's template and with its system prompt."""
    try:
        return _MESSAGES.validate_json(typed)
    except ValidationError:
        return task.pose(typed)
