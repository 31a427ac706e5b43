"""Continue completions from a prefix, and score the results as whole completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from retrain.errors import ComponentError
from retrain.functional.seeds import derive_seed
from retrain.run.collectors.rollouts import score, train_sampling
from retrain.types import Prefix, Request, Rollout, Turn

if TYPE_CHECKING:
    from torch import Tensor

    from retrain.config.schema import Config
    from retrain.protocols import Sampler
    from retrain.rewards.pool import RewardPool
    from retrain.training.chat import RenderedPrompt
    from retrain.training.model.loading import Loaded


class Continuations:
    """Samples continuations with the run's engine and scores them with the run's rewards.

    It implements the `continue_from` resource that credit components may ask for. Components are built before the
    engine, so `begin` passes engine and rewards later.
    """

    def __init__(self) -> None:
        self._parts: tuple[Config, Loaded, Sampler, RewardPool] | None = None

    def begin(self, config: Config, loaded: Loaded, sampler: Sampler, pool: RewardPool) -> None:
        """Continue with this engine and these rewards from now on."""
        self._parts = config, loaded, sampler, pool

    def __call__(
        self, problems: Mapping[int, RenderedPrompt], prefixes: Sequence[Prefix], count: int, seed: int
    ) -> tuple[Tensor, int]:
        """Sample `count` continuations of each of P prefixes, and score them.

        A continuation may use the tokens that its prefix leaves of [training] max_tokens. Its draws
        depend only on the seed, the problems and the index of the prefix. Identical completions of
        one problem are scored once.

        Args:
            problems: rendered problem of each group that a prefix belongs to.
            count: continuations of each prefix.
        Returns:
            Rewards [P, count] float32, NaN where scoring failed, and the number of sampled tokens.
        Raises:
            ComponentError: the run has no engine yet, or its episodes come from an environment or a
                served program.
        """
        if self._parts is None or not problems.keys() >= {prefix.group for prefix in prefixes}:
            what = "an environment or a served program takes part in the episodes, or no engine has been built"
            problem = f"cannot continue completions from a prefix: {what}"
            raise ComponentError(problem, "use other credit")
        config, loaded, sampler, pool = self._parts
        limit = config.training.max_tokens
        requests = [
            Request(prefix.ids, count, limit - prefix.sampled, stream) for stream, prefix in enumerate(prefixes)
        ]
        # `score` takes the problem of a rollout by the number of its group, counted from the first.
        groups = {group: index for index, group in enumerate(sorted({prefix.group for prefix in prefixes}))}
        rendered = [problems[group] for group in groups]
        seed = derive_seed(seed, *(problem.id for problem, _ in rendered))  # each batch draws its own
        sampled = sampler.sample(requests, train_sampling(config, loaded, seed))
        first_index: dict[tuple[int, tuple[int, ...]], int] = {}
        rollouts: list[Rollout] = []
        places: list[int] = []
        for prefix, completions in zip(prefixes, sampled, strict=True):
            for completion in completions:
                # The response so far is a part of the completion that is scored.
                group, ids = groups[prefix.group], (*prefix.ids[len(prefix.ids) - prefix.sampled :], *completion.ids)
                if (group, ids) not in first_index:
                    first_index[group, ids] = len(rollouts)
                    turn = Turn(0, len(ids), completion.finish_reason, completion.weights_version)
                    # No update trains on these rollouts, so their log-probs are not needed.
                    rollouts.append(loaded.chat.rollout(rendered[group], group, ids, [0.0] * len(ids), [turn]))
                places.append(first_index[group, ids])
        rewards = [rollout.reward for rollout in score(loaded.chat, pool, rendered, rollouts, limit)]
        values = torch.tensor([float("nan") if reward is None else reward for reward in rewards])
        tokens = sum(len(completion.ids) for completions in sampled for completion in completions)
        return values[torch.tensor(places)].view(len(prefixes), count), tokens
