"""A sandbox for this process and all that it starts, made of what Linux gives to a user without privileges.

User, mount, process, network and IPC namespaces: no network; a file system that is read-only, with empty private
places where /tmp, /var/tmp, /run, /dev/shm and the home directory are; no other process in sight; no capability left.
When the process ends, the kernel ends everything that it has started, whatever session that is in.

Code of a model has a root of its own besides, and a filter of its system calls (seccomp); see `model_code`.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

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
_MNT_DETACH = 2
TEMPORARY = ("/tmp", "/var/tmp", "/run", "/dev/shm")  # noqa: S108 - private ones
"""Directories for temporary files in a new root."""
_HIDDEN = ("/tmp", "/var/tmp", "/run", "/dev")  # noqa: S108 - to put private places over them
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/dri", "/dev/kfd")
_PROBE_S = 30.0
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
    _hide(_hidden(), [directory, *readable, *_DEVICES, *glob("/dev/nvidia*")])
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


def new_root(visible: Iterable[str]) -> None:
    """Continue in new namespaces inside of a sandbox, in a file system that holds nothing but `visible`, read-only.

    The rest is one empty, private place of 64 MB, with directories for temporary files. /proc shows the processes of
    the new namespace alone. This process still has its privileges in the sandbox, and is the first of its process
    namespace.

    Args:
        visible: absolute paths; those that do not exist are left out, and links lead where they led before.
    """
    binds, links = layout(visible)
    call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    trees = {path: _clone(path) for path in binds}
    root = Path("/tmp")  # noqa: S108 - a place to mount the new root on, which holds nothing yet
    call("mount", b"tmpfs", bytes(root), b"tmpfs", _MS_NOSUID | _MS_NODEV, _ROOM)
    for path, tree in trees.items():
        _attach(tree, f"{root}{path}")
    for path in (*TEMPORARY, "/proc"):
        Path(f"{root}{path}").mkdir(parents=True, exist_ok=True)
    for path, target in {**links, "/dev/fd": "/proc/self/fd"}.items():
        Path(f"{root}{path}").parent.mkdir(parents=True, exist_ok=True)
        Path(f"{root}{path}").symlink_to(target)
    _show_own_processes(os.geteuid(), f"{root}/proc")
    os.chdir(root)
    call("pivot_root", b".", b".")  # the old root is now mounted over the new one
    call("umount2", b".", _MNT_DETACH)
    os.chdir("/")


def layout(visible: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Return the real paths of what is visible, none below another, and links to them by the paths that were given."""
    wanted = {os.path.abspath(path): os.path.realpath(path) for path in visible if os.path.exists(path)}
    real = set(wanted.values())
    binds = sorted(path for path in real if not _below(path, real - {path}))
    shown = [*binds, *TEMPORARY, "/proc"]
    links = {path: to for path, to in wanted.items() if path != to and path not in shown and not _below(path, shown)}
    return binds, links


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
        _attach(tree, path)
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


def _attach(tree: int, path: str) -> None:
    """Mount a clone at a path, which is made."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).mkdir(exist_ok=True) if os.path.isdir(tree) else Path(path).touch()
    call("syscall", _SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, path.encode(), _MOVE_MOUNT_F_EMPTY_PATH)
    os.close(tree)


def _show_own_processes(uid: int, place: str = "/proc") -> None:
    """Mount a /proc of the new namespace alone; an empty one where the machine hides parts of its own."""
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    try:
        call("mount", b"proc", place.encode(), b"proc", flags, None)
    except PermissionError:
        call("mount", b"tmpfs", place.encode(), b"tmpfs", flags, _ROOM)
    if uid == 0 and root_has_limits():
        with suppress(OSError):
            Path(f"{place}/sys/kernel/pid_max").write_text(str(PROCESSES))
    _make_read_only(place)
    resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))


def root_has_limits() -> bool:
    """Return true if the kernel can limit the processes of root, whom RLIMIT_NPROC does not bind.

    Since Linux 6.14 each process namespace has its own highest process number; before, it is that of the machine.
    """
    return tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 14)


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


class _Machine(NamedTuple):
    """Numbers of a processor's system calls.

    Attributes:
        audit: the machine's number in `audit.h`.
        forbidden: calls that are refused whatever their arguments.
        forks: calls that make a process and have no arguments.
    """

    audit: int
    forbidden: dict[str, int]
    socketpair: int
    clone: int
    forks: tuple[int, ...]


_MACHINES = {
    "x86_64": _Machine(0xC000003E, {
        "shmget": 29, "socket": 41, "semget": 64, "msgget": 68, "ptrace": 101, "mount": 165, "mq_open": 240,
        "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298, "setns": 308,
        "process_vm_readv": 310, "process_vm_writev": 311, "memfd_create": 319, "bpf": 321, "userfaultfd": 323,
        "io_uring_setup": 425, "memfd_secret": 447,
    }, socketpair=53, clone=56, forks=(57, 58)),
    "aarch64": _Machine(0xC00000B7, {
        "mount": 40, "unshare": 97, "ptrace": 117, "mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194,
        "socket": 198, "add_key": 217, "request_key": 218, "keyctl": 219, "perf_event_open": 241, "setns": 268,
        "process_vm_readv": 270, "process_vm_writev": 271, "memfd_create": 279, "bpf": 280, "userfaultfd": 282,
        "io_uring_setup": 425, "memfd_secret": 447,
    }, socketpair=199, clone=220, forks=()),
}  # fmt: skip
_CLONE3 = 435  # the same on every architecture; its flags are in memory, which no filter can read
_X32 = 0x40000000
"""Numbers from here on are another set of system calls of x86_64."""
_CLONE_THREAD, _CLONE_NEW = 0x00010000, 0x7E020000
"""Flags of clone: a thread of this process; a namespace of any kind."""
_SOCK_STREAM, _SOCK_TYPE = 1, 0xF

# Instructions of the kernel's filter, and the places of what they load.
_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24
_ALLOW, _EPERM, _ENOSYS = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2


def syscall_filter(processes: bool) -> bytes:
    """Return the filter as the kernel's BPF program; empty on a machine whose calls are not listed.

    Args:
        processes: new processes may be made; otherwise new threads alone.
    """
    machine = _MACHINES.get(os.uname().machine)
    if machine is None:
        return b""
    rows = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, machine.audit), (_RETURN, 0, 0, _EPERM)]
    rows += [(_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _EPERM)]
    for number in (*machine.forbidden.values(), *(() if processes else machine.forks)):
        rows += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    rows += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ENOSYS)]  # libraries then use clone
    # A stream pair is connected for good; the others can send to sockets in files.
    rows += [(_EQUAL, 0, 5, machine.socketpair), (_LOAD, 0, 0, _SECOND), (_AND, 0, 0, _SOCK_TYPE)]
    rows += [(_EQUAL, 1, 0, _SOCK_STREAM), (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
    wanted = 0 if processes else _CLONE_THREAD
    rows += [(_EQUAL, 0, 5, machine.clone), (_LOAD, 0, 0, _FIRST), (_ANY_BIT, 2, 0, _CLONE_NEW)]
    rows += [(_AND, 0, 0, wanted), (_EQUAL, 1, 0, wanted), (_RETURN, 0, 0, _EPERM)]
    rows.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *row) for row in rows)


def forbid_system_calls(processes: bool) -> None:
    """Have the kernel refuse the calls of `syscall_filter`, for this process and all that it starts."""
    program = syscall_filter(processes)
    if not program:
        return
    held = ctypes.create_string_buffer(program, len(program))
    filters = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", _PR_SET_SECCOMP, _MODE_FILTER, ctypes.create_string_buffer(filters, len(filters)), 0, 0)


if __name__ == "__main__":
    try:
        enter([])
    except OSError as error:
        sys.exit(f"{error.strerror}")
