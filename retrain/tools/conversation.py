"""Completions of prompts that a person types."""

from __future__ import annotations

from retrain.functional.seeds import derive_seed
from retrain.run.run_parts import Parts
from retrain.types import Request, Sampling


class Conversation:
    """Completes one prompt after the other with a run's sampler.

    Args:
        parts: of the reopened run.
        count: completions per prompt.
        temperature: 0 is greedy.
    """

    def __init__(self, parts: Parts, count: int, temperature: float) -> None:
        self._parts, self._count, self._temperature = parts, count, temperature
        self._turn = 0

    def complete(self, prompt: str) -> list[str]:
        """Completions of this prompt, without special tokens."""
        parts, config = self._parts, self._parts.config
        ids = parts.chat.prompt(prompt).ids
        sampling = Sampling(
            temperature=self._temperature,
            top_p=config.eval.top_p,
            top_k=config.eval.top_k,
            stop_ids=parts.loaded.stop_ids,
            seed=derive_seed(config.eval.seed, "conversation", self._turn),
        )
        self._turn += 1
        request = Request(ids, self._count, config.eval.max_tokens or config.training.max_tokens, stream=0)
        [group] = parts.sampler.sample([request], sampling)
        return [parts.chat.decode(completion.ids) for completion in group]
