"""The environment of a run: its pools of live episodes, and what holds for all of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from retrain.environments.contract import Limits
from retrain.environments.world_pool import WorldPool
from retrain.errors import UserCodeError
from retrain.types import Metrics

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class World:
    """The environment of a run.

    Attributes:
        pools: hold the live episodes, each a share of the groups that does not wait for the others'.
        limits: of an episode.
        context: tokens that the model knows of an episode in all.
        max_failed: share of the episodes of a call above which failing is an error.
        told: kinds of failures that have been shown.
        turn: of the sampler, unless it takes calls from several threads.
        over: the run has ended; what is under way goes no further.
    """

    pools: Sequence[WorldPool]
    limits: Limits
    context: float
    max_failed: float
    told: set[str] = field(default_factory=set[str])
    turn: AbstractContextManager[Any] = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)

    def check(self, failures: Sequence[str], total: int) -> None:
        """Show each kind of failure once; UserCodeError if too many of the episodes of a call have failed."""
        for detail in failures:
            kind = detail.partition(":")[0]
            if kind not in self.told:
                self.told.add(kind)
                _logger.warning("environment: %s (shown once)", detail)
        if len(failures) > self.max_failed * total:
            raise UserCodeError(
                f"{len(failures)} of {total} episodes failed, more than [reward_pool] max_failed = "
                f"{self.max_failed:g} allows; the first: {failures[0]}; mend the environment"
            )

    def metrics(self) -> Metrics:
        """Milliseconds for each step of an episode, and episodes that were replayed, since the last call."""
        spent, steps, replayed = map(sum, zip(*(pool.metrics() for pool in self.pools), strict=True))
        return {"time/env_step_ms": 1000 * spent / max(1, steps), "env/replayed": float(replayed)}

    def close(self) -> None:
        """End the processes."""
        for pool in self.pools:
            pool.close()
