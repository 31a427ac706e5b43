"""Sign run directories, to recognize those that this user has trained.

The author of a run directory can write anything into it. The signature is therefore a keyed hash (HMAC) of the
configuration, and its key stays in the user's home directory.
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

from retrain.system.files import expanded, read_plain, write_text

CONFIG, SIGNATURE = "config.resolved.json", "signature.json"
_KEY_BYTES = 32


def sign(run: Path) -> None:
    """Sign a run's configuration together with the path of the run and the working directory.

    Nothing is written if the key cannot be stored, for example in a container without a home directory.
    """
    key = _key(create=True)
    if key:
        signature = {"directory": os.getcwd(), "hmac": _hmac(key, run)}
        write_text(run / SIGNATURE, json.dumps(signature) + "\n")


def is_own(run: Path) -> bool:
    """Return whether this user trained the run with this configuration, at this path and in this working directory.

    The working directory is part of the signature because the configuration may name a module that is a file in it.
    """
    key = _key()
    with suppress(OSError, ValueError, KeyError, TypeError):
        stored = json.loads(read_plain(run / SIGNATURE))["hmac"]
        return bool(key) and hmac.compare_digest(str(stored).encode(), _hmac(key, run).encode())
    return False


def _hmac(key: bytes, run: Path) -> str:
    config = hashlib.sha256(read_plain(run / CONFIG)).hexdigest()
    return hmac.new(key, json.dumps([os.path.realpath(run), os.getcwd(), config]).encode(), "sha256").hexdigest()


def _key(create: bool = False) -> bytes:
    """Return the user's key; b"" if it is missing, damaged, not owned by the user, or accessible to other users.

    Args:
        create: create the key if it does not exist.
    """
    with suppress(OSError, RuntimeError):  # RuntimeError: the user has no home directory
        folder = expanded(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "retrain"
        file = folder / "signing-key"
        if create and not file.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _create_key(file)
        status = file.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
            key = file.read_bytes()
            return key if len(key) == _KEY_BYTES else b""
    return b""


def _create_key(file: Path) -> None:
    """Write a new key atomically. If several runs start at once, they all use the key of the first."""
    stage = file.with_name(f".tmp-{file.name}-{secrets.token_hex(8)}")
    descriptor = os.open(stage, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, secrets.token_bytes(_KEY_BYTES))
        with suppress(FileExistsError):
            os.link(stage, file)
    finally:
        os.close(descriptor)
        stage.unlink()
