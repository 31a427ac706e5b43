"""Environments for the tests of episodes. Imported by their workers."""

import os
from pathlib import Path

from retrain import Observation
from tests.waiting import until


def chatty(answer, rng, *, longest: int = 6):
    """Says and rewards at random, by its seed and what it hears, for at most `longest` turns."""
    reply = yield None if rng.random() < 0.5 else "ab"
    for _ in range(rng.randrange(longest)):
        text = "".join(rng.choice("abcdefgh") for _ in range(rng.randrange(9))) + reply[:2]
        reply = yield Observation(text or None, reward=rng.choice([0.0, 0.5, -1.0]), metrics={"heard": len(reply)})
    return rng.choice([None, 0.25, {"won": 1.0, "style": -0.5}])


def endless(answer, *, says: str = "abc"):
    while True:
        yield says


def polite(answer):
    """Ends with the second reply, and leaves the score to the rewards."""
    yield None
    yield "really?"


def dies_once(answer, rng):
    """Ends its process in one game of two, after the first reply."""
    reply = yield None
    if rng.randrange(2) == 0:
        os._exit(1)
    reply = yield f"{len(reply)} {rng.randrange(100)}\n"
    return rng.random() + len(reply) / 100


def waits_for_the_other(answer, problem, *, file: str):
    """The first of several episodes ends when the second has had three turns."""
    yield None
    if problem["id"] == "0":
        until(Path(file).exists)
        return 1.0
    yield "once"
    yield "more"
    Path(file).touch()
    return 1.0


def breaks(answer):
    reply = yield None
    yield int(f"{reply}?")


def odd(answer, *, what: str):
    """Yields or returns what no tokenizer, no metric or no sum takes."""
    if what == "opens with a tool's message":
        yield [{"role": "tool", "content": "be brief"}]
        return 1.0
    yield None
    if what == "half a surrogate pair":
        yield "a\ud800b"
    elif what == "two halves":
        yield "a\ud83d\ude00b"
    elif what == "raises with a surrogate":
        raise ValueError("a\ud800b")
    elif what == "counts turns":
        yield Observation("a", metrics={"turns": 1000.0})
    elif what == "rewards too much":
        yield Observation("a", reward=9e14)
    return {"much": 9e14} if what == "rewards too much" else 1.0
