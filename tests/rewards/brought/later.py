"""Rewards that are coroutines."""

import asyncio

together = 0
most = 0


async def slow(completion, answer):
    """1 for the answer; hangs or raises if the completion says so."""
    if completion == "hang":
        await asyncio.sleep(600)
    if completion == "raise":
        raise ValueError("no")
    return float(completion == answer)


async def crowd(completion):
    """How many of these calls have been under way at once."""
    global together, most
    together += 1
    most = max(most, together)
    for _ in range(5):
        await asyncio.sleep(0)
    together -= 1
    return float(most)


async def blocks(completion):
    while True:
        pass
