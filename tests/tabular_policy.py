"""A policy over three tokens and three steps whose every completion can be enumerated."""

from itertools import product

import torch

from retrain.types import Batch

TOKENS, STEPS, PROMPT = 3, 3, 7
WORDS = torch.tensor(list(product(range(TOKENS), repeat=STEPS)))  # all 27 completions


class Tabular:
    """One row of logits for every beginning; the reward is a table as well."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(1 + 3 + 9, TOKENS, generator=generator, dtype=torch.float64)
        self.rewards = (torch.rand(len(WORDS), generator=generator) < 0.4).double()
        self.states = torch.stack([torch.zeros(27).long(), 1 + WORDS[:, 0], 4 + 3 * WORDS[:, 0] + WORDS[:, 1]], 1)
        logprobs = self.logits.log_softmax(-1)
        self.probabilities = logprobs[self.states, WORDS].sum(-1).exp()
        self.values = torch.stack(  # of a completion's state before each token, and behind the last
            [*(self._expected(step) for step in range(STEPS)), self.rewards], 1
        )
        self.advantages = self.values.diff(dim=1)
        # d log p(y_t | y_<t) / d logits: [completion, step, parameter]
        own = torch.nn.functional.one_hot(WORDS, TOKENS).double() - logprobs.exp()[self.states]
        score = torch.zeros(27, STEPS, len(self.logits), TOKENS, dtype=torch.float64)
        score.scatter_(2, self.states[..., None, None].expand(-1, -1, -1, TOKENS), own[:, :, None])
        self.scores = score.flatten(2)

    def _expected(self, step: int) -> torch.Tensor:
        same = (WORDS[:, None, :step] == WORDS[None, :, :step]).all(-1).double()
        weights = same * self.probabilities
        return (weights * self.rewards).sum(-1) / weights.sum(-1)

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Numbers of completions."""
        return torch.multinomial(self.probabilities, count, replacement=True, generator=generator)

    def batch(self, drawn: torch.Tensor, group_size: int) -> Batch:
        """Drawn completions behind a prompt of one token."""
        ids = torch.cat([torch.full((len(drawn), 1), PROMPT), WORDS[drawn]], 1)
        mask = torch.arange(STEPS + 1).expand(ids.shape) > 0
        rewards = self.rewards[drawn]
        return Batch(
            input_ids=ids,
            attention_mask=torch.ones_like(mask),
            response_mask=mask,
            sampler_logprobs=torch.zeros(ids.shape, dtype=torch.float64),
            rewards=rewards,
            correct=rewards > 0.5,
            lengths=mask.sum(-1),
            group_ids=torch.arange(len(drawn)) // group_size,
            is_expert=torch.zeros(len(drawn), dtype=torch.bool),
            advantages=torch.zeros(ids.shape, dtype=torch.float64),
        )

    def gradient(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        """As `Policy.gradient`."""
        words = batch.input_ids[:, 1:]
        numbers = words[:, 0] * 9 + words[:, 1] * 3 + words[:, 2]
        return torch.einsum("nt,ntd->d", weights[:, 1:].double(), self.scores[numbers])

    def continue_from(self, problems, prefixes, count, seed):
        """As the continuations of a run."""
        generator = torch.Generator().manual_seed(seed)
        rewards = []
        for prefix in prefixes:
            begun = torch.tensor(prefix.ids[1:], dtype=torch.long)
            fits = (WORDS[:, : len(begun)] == begun).all(-1)
            drawn = torch.multinomial(self.probabilities * fits, count, replacement=True, generator=generator)
            rewards.append(self.rewards[drawn])
        return torch.stack(rewards), len(prefixes) * count
