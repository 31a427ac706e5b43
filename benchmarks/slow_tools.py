"""Environments for `episodes.py`, imported by their workers."""

import time
from random import Random

from retrain.environments.contract import EpisodeGenerator


def at_once(answer: str) -> EpisodeGenerator:
    """Answers at once, four times."""
    for turn in range(4):
        yield f"{turn}"
    return 1.0


def asleep(answer: str, rng: Random) -> EpisodeGenerator:
    """A tool that takes 0 to 300 ms, four times."""
    yield None
    for turn in range(3):
        time.sleep(rng.uniform(0, 0.3))
        yield f"{turn}"
    time.sleep(rng.uniform(0, 0.3))
    return 1.0


def always_asleep(answer: str, rng: Random) -> EpisodeGenerator:
    """A tool that takes 0 to 300 ms, as long as it is asked."""
    yield None
    while True:
        time.sleep(rng.uniform(0, 0.3))
        yield "done"
