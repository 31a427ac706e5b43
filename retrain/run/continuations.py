"""Completions that are sampled from the middle of others, and scored as the whole ones are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from retrain.errors import ComponentError
from retrain.functional.seeds import derive_seed
from retrain.run.collect import score, train_sampling
from retrain.types import Request, Rollout, Turn

if TYPE_CHECKING:
    from torch import Tensor

    from retrain.algorithms.monte_carlo.prefixes import Prefix
    from retrain.run.run_parts import Parts
    from retrain.training.chat import Posed


class Continuations:
    """The `Continue` of a run: its engine continues, its rewards score.

    Attributes:
        parts: of the run, once all are built. They end when the run lets go of them, so this does not hold them.
    """

    parts: Callable[[], Parts | None] = staticmethod(lambda: None)

    def __call__(
        self, problems: Mapping[int, Posed], prefixes: Sequence[Prefix], count: int, seed: int
    ) -> tuple[Tensor, int]:
        """Rewards [P, count] float32, NaN where scoring failed, and the number of tokens sampled.

        A continuation has the tokens that its prefix leaves of [training] max_tokens. What it draws depends on the
        seed, the problems and the prefix's place alone. A completion that is reached more than once is scored once.
        """
        parts = self.parts()
        if parts is None or parts.world is not None or parts.source is not None:
            what = (
                "no engine has been built"
                if parts is None
                else "whoever answers them would have to be continued as well"
            )
            raise ComponentError(f"completions cannot be continued from their middle: {what}", "use other credit")
        limit = parts.config.training.max_tokens
        requests = [Request(one.ids, count, limit - one.sampled, stream) for stream, one in enumerate(prefixes)]
        groups = {group: place for place, group in enumerate(sorted({one.group for one in prefixes}))}
        posed = [problems[group] for group in groups]
        seed = derive_seed(seed, *(problem.id for problem, _ in posed))  # batches share no random numbers
        sampled = parts.sampler.sample(requests, train_sampling(parts, seed))
        known: dict[tuple[int, tuple[int, ...]], int] = {}
        rollouts: list[Rollout] = []
        places: list[int] = []
        for prefix, completions in zip(prefixes, sampled, strict=True):
            for completion in completions:
                group, ids = groups[prefix.group], (*prefix.ids[len(prefix.ids) - prefix.sampled :], *completion.ids)
                if (group, ids) not in known:
                    known[group, ids] = len(rollouts)
                    turn = Turn(0, len(ids), completion.finish_reason, completion.weights_version)
                    rollouts.append(parts.chat.rollout(posed[group], group, ids, [0.0] * len(ids), [turn]))
                places.append(known[group, ids])
        rewards = [one.reward for one in score(parts, posed, rollouts, limit)]
        values = torch.tensor([float("nan") if reward is None else reward for reward in rewards])
        tokens = sum(len(completion.ids) for completions in sampled for completion in completions)
        return values[torch.tensor(places)].view(len(prefixes), count), tokens
