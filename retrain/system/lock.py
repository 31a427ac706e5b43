"""File locks that admit one process at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from retrain.errors import ConfigError, StorageError
from retrain.system.files import read_plain

_MAX_PID = 1 << 22
"""Largest PID on Linux; `os.kill` raises OverflowError for much larger numbers."""


@contextmanager
def exclusive(path: Path, waiting: Callable[[], None] | None = None) -> Generator[IO[str]]:
    """Hold an exclusive lock on a file inside the block. The kernel releases the lock when this process dies.

    Args:
        path: the file; created if it does not exist.
        waiting: called once, before the wait, if another process holds the lock. With None the call does not wait.
    Yields:
        The file, open for reading and writing.
    Raises:
        BlockingIOError: another process holds the lock, and `waiting` is None.
        OSError: the file cannot be opened, is not a regular file, or is a symbolic or hard link.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:  # writing to a link would change another file
        os.close(descriptor)
        raise OSError(errno.EMLINK, f"{path.name} is a link or a special file", str(path))
    with open(descriptor, "r+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is None:
                raise
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


class Lock:
    """Lock file that records the host and PID of the process that owns a run directory.

    An empty file means that the lock is free. The lock of a process that no longer exists on this host is taken over.
    A process on another host cannot be checked, so `acquire` raises an error that asks the user to delete the file.

    Args:
        path: the lock file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def acquire(self) -> None:
        """Take the lock for this process.

        Raises:
            ConfigError: another process owns the lock; the error names its PID and host.
            StorageError: the file is a link or a special file, so that writing the owner would change another file.
            OSError: the file cannot be written.
        """
        try:
            self._acquire()
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EMLINK):
                raise
            raise StorageError(f"{self.path} is a link or a special file; remove it") from error

    def _acquire(self) -> None:
        # The file lock is held only while the owner is read and written, so that starting processes take turns.
        with exclusive(self.path, waiting=lambda: None) as file:
            owner = self.owner()
            if owner is not None and alive(owner):
                remote = owner["host"] != socket.gethostname()
                fix = f"if that process has ended, delete {self.path}" if remote else "wait, or choose another name"
                problem = f"in use by process {owner['pid']} on host {owner['host']}"
                raise ConfigError.at(self.path.parent, "run directory", problem, fix)
            file.truncate(0)
            file.write(json.dumps(identity(os.getpid()) | {"group": os.getpgid(0)}))

    def release(self) -> None:
        """Release the lock if this process owns it."""
        owner = self.owner()
        if owner is not None and (owner["host"], owner["pid"]) == (socket.gethostname(), os.getpid()):
            with exclusive(self.path, waiting=lambda: None) as file:
                file.truncate(0)

    def owner(self) -> dict[str, Any] | None:
        """Return host, PID, start time and process group of the owner; None if the lock is free.

        The lock is also free if the file is incomplete, because its owner was killed while it started.
        """
        try:
            owner = dict(json.loads(read_plain(self.path)))
            numbers = {"pid": int(owner["pid"]), "group": int(owner.get("group", owner["pid"]))}
            return {"host": str(owner["host"]), "born": owner["born"], **numbers}
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def held(self) -> bool:
        """Return whether the lock has an owner that may be alive."""
        owner = self.owner()
        return owner is not None and alive(owner)


def alive(owner: Mapping[str, Any]) -> bool:
    """Return whether a process exists, identified by host, PID and start time; True if it is on another host."""
    if owner["host"] != socket.gethostname():
        return True
    if not 0 < owner["pid"] <= _MAX_PID:
        return False
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return owner["born"] == _start_time(owner["pid"])


def identity(pid: int) -> dict[str, Any]:
    """Return host, PID and start time of a process on this host, for `alive`."""
    return {"host": socket.gethostname(), "pid": pid, "born": _start_time(pid)}


def _start_time(pid: int) -> str | None:
    """Return the start time of a process in clock ticks, which differs if the PID was reused by another process.

    Return None on a system without /proc, if there is no such process, and for a zombie, a process that has ended but
    whose parent has not waited for it.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
