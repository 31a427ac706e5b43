"""Tensors kept between runs under the hash of everything that they depend on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from retrain.system.files import staged
from retrain.system.lock import exclusive
from retrain.system.records import parse_json

Tensors = dict[str, Tensor]
_DATA, _MANIFEST = "tensors.safetensors", "manifest.json"


def cache_root() -> Path:
    """`$RETRAIN_CACHE`, or `~/.cache/retrain`."""
    return Path(os.environ.get("RETRAIN_CACHE") or "~/.cache/retrain").expanduser()


def content_key(facts: Mapping[str, Any]) -> str:
    """Hash of JSON facts, 32 hexadecimal digits; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, types, shapes and bytes."""
    return hashlib.sha256(save({name: tensors[name].detach().contiguous() for name in sorted(tensors)})).hexdigest()


def cached(
    kind: str, facts: Mapping[str, Any], build: Callable[[], Tensors], *, waiting: Callable[[], None] = lambda: None
) -> tuple[Tensors, bool]:
    """The tensors that `build` makes, computed once for equal facts, by whichever process comes first.

    An entry is trusted only if its sha256 is that of its manifest; otherwise it is built again. Where
    the cache cannot be written the tensors are built and not kept.

    Args:
        kind: folder of the cache, such as "warmup".
        facts: everything that the result depends on, as JSON.
        build: makes the tensors; no two of them may share memory.
        waiting: called once if another process is building them at the moment.
    Returns:
        The tensors, and whether they came from the cache.
    """
    entry = cache_root() / kind / content_key(facts)
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = entry.with_suffix(".lock")
        lock.touch()
    except OSError:
        return build(), False
    with exclusive(lock, waiting):
        found = _read(entry)
        if found is not None:
            return found, True
        tensors = build()
        _write(entry, facts, tensors)
        return tensors, False


def _read(entry: Path) -> Tensors | None:
    """The entry's tensors; None if it is missing, incomplete or altered."""
    try:
        manifest = parse_json((entry / _MANIFEST).read_bytes())
        data = (entry / _DATA).read_bytes()
        return load(data) if hashlib.sha256(data).hexdigest() == manifest["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        return None


def _write(entry: Path, facts: Mapping[str, Any], tensors: Tensors) -> None:
    """Put the entry in place with one rename; a cache that cannot be written is no reason to fail."""
    with suppress(OSError), staged(entry) as stage:
        stage.mkdir()
        data = save({name: value.detach().contiguous() for name, value in tensors.items()})
        (stage / _DATA).write_bytes(data)
        manifest = {"sha256": hashlib.sha256(data).hexdigest(), "facts": facts}
        (stage / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
