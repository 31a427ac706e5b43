"""A sandbox for this process and all that it starts, made of what Linux gives to a user without privileges.

User, mount, process, network and IPC namespaces: no network; a file system that is read-only, with empty private
places where /tmp, /var/tmp, /run, /dev/shm and the home directory are; no other process in sight; no capability left.
When the process ends, the kernel ends everything that it has started, whatever session that is in.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from glob import glob
from pathlib import Path
from typing import Any

from retrain.system.process import follower

INSIDE = "RETRAIN_SANDBOX"
"""The variable that is set in a sandbox."""

PROCESSES = 620
"""Processes and threads that a sandbox may hold: more than one thread for each core of a large machine. For root their
numbers are what is limited, and Linux gives those below 300 only once: from then on there are 320."""

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442  # the same on every architecture
_AT_FDCWD, _AT_RECURSIVE, _OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = -100, 0x8000, 1, 4
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MS_REC, _MS_PRIVATE = 1, 2, 1 << 14, 1 << 18
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_PR_CAPBSET_DROP, _CAPABILITY_VERSION_3 = 24, 0x20080522
_ROOM, _ROOM_FOR_DEVICES = b"size=64m,mode=1777", b"size=64m,mode=755"
_HIDDEN = ("/tmp", "/var/tmp", "/run", "/dev")  # noqa: S108 - to put private places over them
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/dri", "/dev/kfd")
_PROBE_S = 30.0
_readable: list[str] = []
"""What stays readable in the sandbox that this process is in."""
LIBRARIES = 8 << 30
"""Bytes of address space for files that a process inside maps: importing a CUDA build of torch takes 3 GB."""


@cache
def missing() -> str:
    """Why there can be no sandbox on this machine, in words; empty if there can. Another process tries it."""
    if sys.platform != "linux":
        return "it needs Linux"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    command = [sys.executable, "-P", "-m", "retrain.system.sandbox"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, env=environment)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "" if tried.returncode == 0 else (tried.stderr.strip().splitlines() or ["it ended without a word"])[-1]


def enter(readable: Iterable[str], before_dropping: Callable[[], None] = lambda: None) -> None:
    """Continue in a sandbox, as a child of this process; this process waits for the child, and ends as it does.

    The process must have one thread. Its descriptors stay open in the child alone.

    Args:
        readable: paths that can still be read where they lie below a hidden place.
        before_dropping: called inside, while the process still has its privileges there.
    Raises:
        OSError: the system does not allow it. The process is then in an undefined state and must end.
    """
    uid, gid, directory = os.geteuid(), os.getegid(), os.getcwd()
    call("unshare", _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        Path("/proc/self", name).write_text(text)
    with suppress(OSError):  # what is inside shall not open the parts of the kernel that namespaces open
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    _make_read_only("/")
    _readable[:] = [directory, *readable, *_DEVICES, *glob("/dev/nvidia*")]
    _hide(_hidden(), _readable)
    continue_in_child()  # the first process of the new namespace: the others end with it, and no signal from them does
    follower(0, signal.SIGKILL)()
    continue_in_child()
    _show_own_processes(uid)
    os.chdir(directory)  # the same path, seen from inside
    before_dropping()
    drop_capabilities()
    os.environ[INSIDE] = "1"


def _make_read_only(path: str) -> None:
    """Everything mounted at and below `path`, without set-user-ID programs, and apart from the world outside."""
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, _MS_PRIVATE, 0)
    call("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE, attributes, ctypes.sizeof(attributes))


def renew() -> None:
    """In new namespaces inside of a sandbox: empty private places, and no process in sight but those of the new one.

    The process still has its privileges in the sandbox, and is the first of its process namespace.
    """
    call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    _hide(_hidden(), _readable)
    _show_own_processes(os.geteuid())


def _hidden() -> set[str]:
    """The directories that are replaced by empty ones."""
    homes = [os.path.expanduser("~")]
    with suppress(KeyError):
        homes.append(pwd.getpwuid(os.geteuid()).pw_dir)
    return {real for path in (*_HIDDEN, *homes) if os.path.isdir(real := os.path.realpath(path)) and real != "/"}


def _hide(hidden: set[str], readable: Iterable[str]) -> None:
    """Put an empty place over each hidden directory, and back into it what must stay readable."""
    wanted = {os.path.abspath(path): os.path.realpath(path) for path in readable if os.path.exists(path)}
    hidden = hidden - set(wanted.values())
    places = [path for path in hidden if not _below(path, hidden - {path})]
    kept = {path for path in wanted.values() if _below(path, places)}
    # Cloned before the empty places hide the originals.
    trees = {path: _clone(path) for path in kept if not _below(path, kept - {path})}
    for path in places:
        room = _ROOM_FOR_DEVICES if path == "/dev" else _ROOM
        call("mount", b"tmpfs", path.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, room)
    for path, tree in trees.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).mkdir() if os.path.isdir(tree) else Path(path).touch()
        call("syscall", _SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, path.encode(), _MOVE_MOUNT_F_EMPTY_PATH)
        os.close(tree)
    for path, real in wanted.items():
        if not os.path.lexists(path):  # a link inside a hidden place led there
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).symlink_to(real)
    if "/dev" in places:
        Path("/dev/shm").mkdir(mode=0o777)  # noqa: S108 - a private one
        Path("/dev/fd").symlink_to("/proc/self/fd")


def _below(path: str, places: Iterable[str]) -> bool:
    return any(path.startswith(f"{place}/") for place in places)


def _clone(path: str) -> int:
    """A copy of what is mounted at a path, which is mounted nowhere yet."""
    flags = _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    return call("syscall", _SYS_OPEN_TREE, _AT_FDCWD, path.encode(), flags)


def _show_own_processes(uid: int) -> None:
    """A /proc of the new namespace alone; an empty one where the machine hides parts of its own, as containers do."""
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    try:
        call("mount", b"proc", b"/proc", b"proc", flags, None)
    except PermissionError:
        call("mount", b"tmpfs", b"/proc", b"tmpfs", flags, _ROOM)
    # The limit of processes does not bind root. Since Linux 6.14 each namespace has its own highest process number;
    # before, this file is that of the whole machine.
    if uid == 0 and tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 14):
        with suppress(OSError):
            Path("/proc/sys/kernel/pid_max").write_text(str(PROCESSES))
    _make_read_only("/proc")
    resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))


def continue_in_child() -> None:
    """Go on in a child. This process reaps whatever comes to it, and ends as the child does."""
    child = os.fork()
    if not child:
        return
    os.closerange(3, 4096)  # a pipe that the child closes must be closed
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def drop_capabilities() -> None:
    """Give up the privileges inside the namespaces, for good: with them, all of the above could be undone."""
    number = 0
    while ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    call("capset", (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())


def call(name: str, *arguments: Any) -> int:
    """A function of the C library; OSError if it fails."""
    result = int(getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


if __name__ == "__main__":
    try:
        enter([])
    except OSError as error:
        sys.exit(f"{error.strerror}")
