"""Derive independent random streams from one seed, and hash data."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from random import Random
from typing import Any


def derive_seed(seed: int, *names: str | int) -> int:
    """Return the seed of the random stream `names` of `seed`: the first 63 bits of SHA-256("seed/name/...").

    Streams with different names are independent. A stream needs no stored state: with the step as one of its names,
    as in `derive_seed(seed, "sampling", step)`, a resumed run draws the same numbers as an uninterrupted one.
    """
    text = "/".join(str(part) for part in (seed, *names))
    # Without its lowest bit the number fits a signed 64-bit integer.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, count: int) -> list[int]:
    """Return the numbers below `count`, in another random order for every epoch."""
    order = list(range(count))
    Random(derive_seed(seed, "epoch", epoch)).shuffle(order)
    return order


_HELDOUT_SHARE = 8
"""One problem in this many is held out."""


def is_heldout(key: str) -> bool:
    """Return whether the problem with this key is held out, whatever the seed of the run."""
    return hashlib.sha256(key.encode()).digest()[0] % _HELDOUT_SHARE == 0


def digest_of(*parts: Any) -> str:
    """Return the SHA-256 hash of JSON values, in hex."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
