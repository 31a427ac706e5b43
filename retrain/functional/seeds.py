"""One seed, many independent streams; and hashes that name data."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from random import Random
from typing import Any


def derive_seed(seed: int, *names: str | int) -> int:
    """Seed of the sub-stream `names` of `seed`: the first 63 bits of sha256("seed/name/...").

    Streams with different names are independent, and a stream needs no state: naming the step
    in it (`derive_seed(seed, "sampling", step)`) makes a resumed run draw what it would have drawn.
    """
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, count: int) -> list[int]:
    """The numbers below `count`, shuffled anew for every epoch."""
    order = list(range(count))
    Random(derive_seed(seed, "epoch", epoch)).shuffle(order)
    return order


def digest_of(*parts: Any) -> str:
    """sha256 of JSON values, in hex."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
