"""Rewards that compare the completions of a prompt."""

import asyncio


def share_of_shorter(group):
    """Share of the other completions that are longer."""
    lengths = [len(one["completion"]) for one in group]
    return [sum(own < other for other in lengths) / max(1, len(group) - 1) for own in lengths]


async def longest(group, *, wait_s: float = 0.0):
    """1 for the longest; a group with "bad" raises, one with "slow" takes too long."""
    texts = [one["completion"] for one in group]
    await asyncio.sleep(60.0 if "slow" in texts else wait_s)
    if "bad" in texts:
        raise ValueError("a bad completion")
    return [{"score": float(text == max(texts, key=len)), "letters": len(text)} for text in texts]


class Counting:
    """Number of completions of the group."""

    def __call__(self, group):
        assert all({"completion", "answer", "problem"} <= set(one) for one in group)
        return [len(group)] * len(group)


def too_few(group):
    return [0.0]


async def too_few_later(group):
    return [0.0]


def crashes(group):
    import os

    if any(one["completion"] == "bad" for one in group):
        os.abort()
    return [1.0] * len(group)


def more(group, teacher):
    return [0.0] * len(group)
