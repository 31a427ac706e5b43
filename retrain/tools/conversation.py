"""Completions of prompts that a person types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from retrain.functional.seeds import derive_seed
from retrain.run.run_parts import Parts
from retrain.types import Request, Sampling


def completions(parts: Parts, prompts: Iterable[str], count: int, temperature: float) -> Iterator[str]:
    """`count` completions of each prompt in turn by a run's sampler, without special tokens.

    Args:
        parts: of the reopened run.
        temperature: 0 is greedy.
    """
    config = parts.config
    for turn, prompt in enumerate(prompts):
        sampling = Sampling(
            temperature=temperature,
            top_p=config.eval.top_p,
            top_k=config.eval.top_k,
            stop_ids=parts.loaded.stop_ids,
            seed=derive_seed(config.eval.seed, "conversation", turn),
        )
        most = config.eval.max_tokens or config.training.max_tokens
        [group] = parts.sampler.sample([Request(parts.chat.prompt(prompt).ids, count, most, stream=0)], sampling)
        yield from (parts.chat.decode(completion.ids) for completion in group)
