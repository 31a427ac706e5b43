"""File locks that admit one process at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import uuid
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
    """Lock file that records the machine and PID of the process that owns a run directory.

    An empty file means that the lock is free. The lock of a process that no longer exists on this machine is taken
    over. A process of another machine cannot be checked, so `acquire` raises an error that asks the user to delete the
    file.

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
                fix = "wait, or choose another name"
                if owner["machine"] != machine():
                    fix = f"if that process has ended, also by a restart of its machine, delete {self.path}"
                problem = f"in use by process {owner['pid']} on host {owner['host']}"
                raise ConfigError.at(self.path.parent, "run directory", problem, fix)
            file.truncate(0)
            file.write(json.dumps(identity(os.getpid()) | {"group": os.getpgid(0)}))

    def release(self) -> None:
        """Release the lock if this process owns it."""
        owner = self.owner()
        # A worker that took the lock over owns it now.
        if owner is not None and (owner["machine"], owner["pid"]) == (machine(), os.getpid()):
            with exclusive(self.path, waiting=lambda: None) as file:
                file.truncate(0)

    def owner(self) -> dict[str, Any] | None:
        """Return host, machine, PID, start time and process group of the owner; None if the lock is free.

        The lock is also free if the file is incomplete, because its owner was killed while it started.
        """
        try:
            owner = dict(json.loads(read_plain(self.path)))
            numbers = {"pid": int(owner["pid"]), "group": int(owner.get("group", owner["pid"]))}
            strings = {name: str(owner.get(name, "")) for name in ("host", "machine")}
            return {**strings, "born": owner["born"], **numbers}
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def held(self) -> bool:
        """Return whether the lock has an owner that may be alive."""
        owner = self.owner()
        return owner is not None and alive(owner)


def alive(owner: Mapping[str, Any]) -> bool:
    """Return whether a process exists, identified by machine, PID and start time; True if it is of another machine."""
    if owner["machine"] != machine():
        return True
    if not 0 < owner["pid"] <= _MAX_PID:
        return False
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    # A PID is used again once the numbers have run through; with its start time it is unique.
    return owner["born"] == _start_time(owner["pid"])


def identity(pid: int) -> dict[str, Any]:
    """Return host, machine, PID and start time of a process of this machine, for `alive`."""
    return {"host": socket.gethostname(), "machine": machine(), "pid": pid, "born": _start_time(pid)}


def machine() -> str:
    """Return a name for this machine, until it is restarted, and for the PID namespace of this process.

    PIDs can be compared within one namespace of one kernel only. The hostname does not identify these: many virtual
    machines are called localhost, and containers may have the name of their host. Nor does the namespace alone, whose
    first has the same inode on every kernel.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux: the hardware address
        return f"{socket.gethostname()} {uuid.getnode():x}"


def _start_time(pid: int) -> str | None:
    """Return the start time of a process in clock ticks, which differs if the PID was reused by another process.

    Return None on a system without /proc, if there is no such process, and for a zombie, a process that has ended but
    whose parent has not waited for it.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    # Field 22 of stat(5): state, the first behind the name, is field 3.
    return None if fields[0] == "Z" else fields[19]
