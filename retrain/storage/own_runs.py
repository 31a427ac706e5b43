"""Signatures that prove which run directories this user has trained.

Anybody who hands over a run directory can write any path or name into it. So the proof is a keyed
hash (HMAC) of the configuration, and the key stays in the user's home directory.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from retrain.system.files import read_plain, write_text

CONFIG, SIGNATURE = "config.resolved.json", "signature.json"
_BYTES = 32


def sign(run: Path) -> None:
    """Write the signature of a run's configuration, the run's place, and the working directory.

    Where the key cannot be kept, in a container without a home directory for instance, nothing is written.
    """
    key = _key(create=True)
    if key:
        signature = {"directory": os.getcwd(), "hmac": _code(key, run)}
        write_text(run / SIGNATURE, json.dumps(signature) + "\n")


def is_own(run: Path) -> bool:
    """Return whether this user trained the run with this configuration, place and working directory.

    The working directory counts because a module name may mean a file in it.
    """
    key = _key()
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(read_plain(run / SIGNATURE))["hmac"]
        return bool(key) and hmac.compare_digest(str(known).encode(), _code(key, run).encode())
    return False


def _code(key: bytes, run: Path) -> str:
    config = hashlib.sha256(read_plain(run / CONFIG)).hexdigest()
    return hmac.new(key, json.dumps([os.path.realpath(run), os.getcwd(), config]).encode(), "sha256").hexdigest()


def _key(create: bool = False) -> bytes:
    """Return the user's key, made at first use; empty if it is missing or others can read or replace it."""
    with suppress(OSError, RuntimeError):  # RuntimeError: this user has no home directory
        folder = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "retrain"
        file = folder / "signing-key"
        if create and not file.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make(file)
        found = file.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            key = file.read_bytes()
            return key if len(key) == _BYTES else b""
    return b""


def _make(file: Path) -> None:
    """Write a new key atomically: if several runs start at once, the first key stays."""
    stage = file.with_name(f".tmp-{file.name}-{secrets.token_hex(8)}")
    descriptor = os.open(stage, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, secrets.token_bytes(_BYTES))
        with suppress(FileExistsError):
            os.link(stage, file)
    finally:
        os.close(descriptor)
        stage.unlink()
