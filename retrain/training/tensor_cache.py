"""Cache of tensors between runs; the key is a hash of everything that they depend on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from retrain.errors import StorageError
from retrain.functional.seeds import digest_of
from retrain.system.files import SUMS, check_sums, published
from retrain.system.lock import exclusive
from retrain.system.model_paths import cache_root

Tensors = dict[str, Tensor]
_DATA, _FACTS = "tensors.safetensors", "facts.json"


def cached(
    kind: str, facts: Mapping[str, Any], build: Callable[[], Tensors], *, waiting: Callable[[], None] = lambda: None
) -> tuple[Tensors, bool]:
    """Return the tensors of `build`, which is called only if the cache has no entry with equal facts.

    Of several processes with equal facts one builds the tensors, and the others wait for it. An entry is used only if
    its files match its SHA256SUMS; otherwise it is built again. If the cache cannot be written, the tensors are built
    and not stored.

    Args:
        kind: folder of the cache, such as "warmup".
        facts: JSON values on which the result depends.
        build: makes the tensors; no two of them may share memory.
        waiting: called once if another process is building the tensors.
    Returns:
        The tensors, and True if they came from the cache.
    """
    # Half of the digits: a folder's name that people still read, and 128 bits that no two facts share.
    entry = cache_root() / kind / digest_of(facts)[:32]
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = entry.with_suffix(".lock")
        lock.touch()
    except OSError:
        return build(), False
    with exclusive(lock, waiting):
        with suppress(OSError, StorageError, SafetensorError):  # missing, incomplete or altered
            if (entry / SUMS).is_file():
                check_sums(entry, "build it again")
                return load((entry / _DATA).read_bytes()), True
        tensors = build()
        # A full disk must not end the run: it has its tensors.
        with suppress(OSError, StorageError), published(entry) as stage:
            (stage / _DATA).write_bytes(save({name: value.detach().contiguous() for name, value in tensors.items()}))
            (stage / _FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
        return tensors, False
