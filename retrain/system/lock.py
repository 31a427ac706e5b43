"""One process at a time."""

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

from retrain.errors import ConfigError, ConfigProblem, StorageError
from retrain.system.files import read_plain

_GREATEST_PID = 1 << 22
"""That of Linux; `os.kill` raises OverflowError far above."""


@contextmanager
def exclusive(path: Path, waiting: Callable[[], None] | None = None) -> Generator[IO[str]]:
    """Hold the lock of a file, which is made if need be; the system drops the lock when this process dies.

    Args:
        waiting: called once if another process holds the lock, before waiting for it. None does not wait.
    Raises:
        BlockingIOError: another process holds it, and `waiting` is None.
        OSError: the file cannot be opened, is not a regular file, or has a second name: a link is never followed.
    """
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    found = os.fstat(opened)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:  # the owner rewrites what it locks
        os.close(opened)
        raise OSError(errno.EMLINK, f"{path.name} is a link or a special file", str(path))
    with open(opened, "r+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is None:
                raise
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


class Lock:
    """A file that names the process that owns a run directory, by host and process id.

    An empty file is a free lock. The lock of a process that no longer exists on this host is taken over;
    on another host that cannot be checked, so the user is asked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def acquire(self) -> None:
        """Take the lock, or raise ConfigError naming the owner; OSError where it cannot be written.

        Raises:
            StorageError: the file is a link, so that the owner would be written into another file.
        """
        try:
            self._acquire()
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EMLINK):
                raise
            raise StorageError(f"{self.path} is a link or a special file; remove it") from error

    def _acquire(self) -> None:
        # Held only while reading and writing the owner, so that two starting processes take turns.
        with exclusive(self.path, waiting=lambda: None) as file:
            owner = self.owner()
            if owner is not None and alive(owner):
                away = owner["host"] != socket.gethostname()
                fix = f"if that process is gone, delete {self.path}" if away else "wait for it, or choose another name"
                problem = f"in use by process {owner['pid']} on host {owner['host']}"
                raise ConfigError([ConfigProblem(str(self.path.parent), 0, 0, "run directory", problem, fix)])
            file.truncate(0)
            file.write(json.dumps(identity(os.getpid()) | {"group": os.getpgid(0)}))

    def release(self) -> None:
        """Free the lock if this process holds it."""
        owner = self.owner()
        if owner is not None and (owner["host"], owner["pid"]) == (socket.gethostname(), os.getpid()):
            with exclusive(self.path, waiting=lambda: None) as file:
                file.truncate(0)

    def owner(self) -> dict[str, Any] | None:
        """Host, process id and process group written in the lock; None if it is free.

        A half-written owner is that of a process killed while starting: the lock is free.
        """
        try:
            owner = dict(json.loads(read_plain(self.path)))
            numbers = {"pid": int(owner["pid"]), "group": int(owner.get("group", owner["pid"]))}
            return {"host": str(owner["host"]), "born": owner["born"], **numbers}
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def held(self) -> bool:
        """Somebody owns the lock and may be alive."""
        owner = self.owner()
        return owner is not None and alive(owner)


def alive(owner: Mapping[str, Any]) -> bool:
    """Return whether the process with this host, pid and start time exists; True for another host."""
    if owner["host"] != socket.gethostname():
        return True
    if not 0 < owner["pid"] <= _GREATEST_PID:
        return False
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return owner["born"] == _born(owner["pid"])


def identity(pid: int) -> dict[str, Any]:
    """Host, pid and start time of a process of this machine: what `alive` asks for."""
    return {"host": socket.gethostname(), "pid": pid, "born": _born(pid)}


def _born(pid: int) -> str | None:
    """Start time of a process in clock ticks, which tells a reused process id; None where there is no /proc.

    Also None for a process that has ended while its parent, perhaps frozen, has not waited for it.
    """
    try:
        facts = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if facts[0] == "Z" else facts[19]
