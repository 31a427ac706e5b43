"""One seed, many independent streams."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *names: str | int) -> int:
    """Seed of the sub-stream `names` of `seed`: the first 63 bits of sha256("seed/name/...").

    Streams with different names are independent, and a stream needs no state: naming the step
    in it (`derive_seed(seed, "sampling", step)`) makes a resumed run draw what it would have drawn.
    """
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
