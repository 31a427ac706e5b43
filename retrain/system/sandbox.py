"""Sandbox for the current process and its children, built from Linux features that need no privileges.

The process gets its own user, mount, PID, network and IPC namespaces. It has no network, sees no other process and
holds no capability. The file system is read-only; /tmp, /var/tmp, /run, /dev/shm and the home directory are empty
private directories. When the process ends, the kernel kills everything that it started, in any session.

Code written by a model also gets its own root file system and a seccomp filter of system calls; see `model_code`.
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
"""Environment variable that is set inside a sandbox."""

PROCESSES = 620
"""Maximum number of processes and threads in a sandbox. It allows one thread per core on a large machine. For root the
limit is on the PID (pid_max). The kernel reuses only PIDs from 300 up, so about 320 are usable."""

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442  # the same on every architecture
_AT_FDCWD, _AT_RECURSIVE, _OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = -100, 0x8000, 1, 4
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MS_REC, _MS_PRIVATE = 1, 2, 1 << 14, 1 << 18
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_PR_CAPBSET_DROP, _CAPABILITY_VERSION_3 = 24, 0x20080522
_TMPFS, _TMPFS_FOR_DEVICES = b"size=64m,mode=1777", b"size=64m,mode=755"
_MNT_DETACH = 2
TEMPORARY = ("/tmp", "/var/tmp", "/run", "/dev/shm")  # noqa: S108 - private directories
"""Directories for temporary files in a new root."""
_HIDDEN = ("/tmp", "/var/tmp", "/run", "/dev")  # noqa: S108 - private directories are mounted over them
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/dri", "/dev/kfd")
_PROBE_S = 30.0
LIBRARIES = 8 << 30
"""Bytes of address space that a sandboxed process gets for mapped files. Importing a CUDA build of torch takes 3 GB."""


@cache
def missing() -> str:
    """Return the reason why this machine cannot make a sandbox; "" if it can. A subprocess tries it."""
    if sys.platform != "linux":
        return "it needs Linux"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    command = [sys.executable, "-P", "-m", "retrain.system.sandbox"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, env=environment)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    if tried.returncode == 0:
        return ""
    return (tried.stderr.strip().splitlines() or ["the process that tried it ended without a message"])[-1]


def enter(readable: Iterable[str], before_dropping: Callable[[], None] = lambda: None) -> None:
    """Continue in a sandbox, in a child of this process. This process waits for the child and exits with its code.

    The process must have a single thread. Its file descriptors stay open only in the child.

    Args:
        readable: paths that stay readable although they are below a hidden directory.
        before_dropping: called in the sandbox before the process drops its capabilities.
    Raises:
        OSError: the kernel refuses a step. The process is then in an undefined state and must exit.
    """
    uid, gid, directory = os.geteuid(), os.getegid(), os.getcwd()
    call("unshare", _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        Path("/proc/self", name).write_text(text)
    with suppress(OSError):  # nested user namespaces would expose more of the kernel to the code inside
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    _make_read_only("/")
    _hide(_hidden(), [directory, *readable, *_DEVICES, *glob("/dev/nvidia*")])
    continue_in_child()  # PID 1 of the namespace: the others end with it, and it ignores their signals
    follower(0, signal.SIGKILL)()
    continue_in_child()
    _show_own_processes(uid)
    os.chdir(directory)  # the same path, seen from inside
    before_dropping()
    drop_capabilities()
    os.environ[INSIDE] = "1"


def _make_read_only(path: str) -> None:
    """Make all mounts at and below `path` read-only, private and nosuid."""
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, _MS_PRIVATE, 0)
    call("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE, attributes, ctypes.sizeof(attributes))


def new_root(visible: Iterable[str]) -> None:
    """Replace the root by a file system that holds only `visible`, read-only, and directories for temporary files.

    The directories are empty and share 64 MB. /proc shows only the processes of the PID namespace. It must be called by
    PID 1 of a new namespace in a sandbox, before that drops its capabilities.

    Args:
        visible: absolute paths. Missing ones are ignored; symbolic links keep their targets.
    """
    binds, links = layout(visible)
    call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    trees = {path: _clone(path) for path in binds}
    root = Path("/tmp")  # noqa: S108 - an empty directory to mount the new root on
    call("mount", b"tmpfs", bytes(root), b"tmpfs", _MS_NOSUID | _MS_NODEV, _TMPFS)
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
    """Return the real paths to mount, none below another, and {given path: real path} for paths that need a symbolic
    link. A path below one of these links needs none, because the link leads to it."""
    wanted = {os.path.abspath(path): os.path.realpath(path) for path in visible if os.path.exists(path)}
    real = set(wanted.values())
    binds = sorted(path for path in real if not _below(path, real - {path}))
    links: dict[str, str] = {}
    for path, real in sorted(wanted.items()):
        if path != real and path not in (*binds, *TEMPORARY, "/proc") and not _below(path, (*binds, *links, "/proc")):
            links[path] = real
    return binds, links


def _hidden() -> set[str]:
    """Return the directories that are replaced by empty ones."""
    homes = [os.path.expanduser("~")]
    with suppress(KeyError):
        homes.append(pwd.getpwuid(os.geteuid()).pw_dir)
    return {real for path in (*_HIDDEN, *homes) if os.path.isdir(real := os.path.realpath(path)) and real != "/"}


def _hide(hidden: set[str], readable: Iterable[str]) -> None:
    """Mount an empty directory over each hidden one, then mount the readable paths back into it."""
    wanted = {os.path.abspath(path): os.path.realpath(path) for path in readable if os.path.exists(path)}
    hidden = hidden - set(wanted.values())
    places = [path for path in hidden if not _below(path, hidden - {path})]
    kept = {path for path in wanted.values() if _below(path, places)}
    # Clone the mounts before the empty directories hide the originals.
    trees = {path: _clone(path) for path in kept if not _below(path, kept - {path})}
    for path in places:
        options = _TMPFS_FOR_DEVICES if path == "/dev" else _TMPFS
        call("mount", b"tmpfs", path.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options)
    for path, tree in trees.items():
        _attach(tree, path)
    for path, real in sorted(wanted.items()):
        if not os.path.lexists(path):  # the path was a symbolic link inside a hidden directory
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).symlink_to(real)
    if "/dev" in places:
        Path("/dev/shm").mkdir(mode=0o777)  # noqa: S108 - private
        Path("/dev/fd").symlink_to("/proc/self/fd")


def _below(path: str, places: Iterable[str]) -> bool:
    return any(path.startswith(f"{place}/") for place in places)


def _clone(path: str) -> int:
    """Return a file descriptor of a detached copy of the mount at a path."""
    flags = _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    return call("syscall", _SYS_OPEN_TREE, _AT_FDCWD, path.encode(), flags)


def _attach(tree: int, path: str) -> None:
    """Create a path and mount a detached copy there."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).mkdir(exist_ok=True) if os.path.isdir(tree) else Path(path).touch()
    call("syscall", _SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, path.encode(), _MOVE_MOUNT_F_EMPTY_PATH)
    os.close(tree)


def _show_own_processes(uid: int, place: str = "/proc") -> None:
    """Mount a /proc of the new PID namespace, or an empty directory where the kernel refuses one; limit processes."""
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    try:
        call("mount", b"proc", place.encode(), b"proc", flags, None)
    except PermissionError:
        call("mount", b"tmpfs", place.encode(), b"tmpfs", flags, _TMPFS)
    if uid == 0 and root_has_limits():
        with suppress(OSError):
            Path(f"{place}/sys/kernel/pid_max").write_text(str(PROCESSES))
    _make_read_only(place)
    resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))


def root_has_limits() -> bool:
    """Return True if the kernel can limit the number of processes of root. RLIMIT_NPROC does not apply to root.

    Since Linux 6.14 each PID namespace has its own pid_max; before, pid_max applied to the whole machine.
    """
    return tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 14)


def continue_in_child() -> None:
    """Fork and return in the child. The parent reaps its children and exits with the code of this child."""
    child = os.fork()
    if not child:
        return
    os.closerange(3, 4096)  # otherwise a pipe that the child closes would stay open here
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def drop_capabilities() -> None:
    """Drop all capabilities permanently; a process that held them could undo the sandbox."""
    number = 0
    while ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    call("capset", (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())


def call(name: str, *arguments: Any) -> int:
    """Call a function of the C library by name; raise OSError if it fails."""
    result = int(getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


class _Machine(NamedTuple):
    """System call numbers of one architecture.

    Attributes:
        audit: number of the architecture in `audit.h`.
        forbidden: system calls that are refused with any arguments.
        forks: system calls without arguments that create a process.
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
_CLONE3 = 435  # the same on every architecture; a filter cannot read its flags, which are in memory
_X32 = 0x40000000
"""First number of the x32 system calls of x86_64."""
_CLONE_THREAD, _CLONE_NEW = 0x00010000, 0x7E020000
"""Flags of clone: create a thread; create a namespace of any kind."""
_SOCK_STREAM, _SOCK_TYPE = 1, 0xF

# Opcodes of a BPF program, and the offsets of the fields that it loads.
_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24
_ALLOW, _EPERM, _ENOSYS = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2


def syscall_filter(processes: bool) -> bytes:
    """Return the seccomp filter as a BPF program; b"" on an architecture that `_MACHINES` does not list.

    Args:
        processes: allow new processes; otherwise only new threads.
    """
    machine = _MACHINES.get(os.uname().machine)
    if machine is None:
        return b""
    rows = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, machine.audit), (_RETURN, 0, 0, _EPERM)]
    rows += [(_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _EPERM)]
    for number in (*machine.forbidden.values(), *(() if processes else machine.forks)):
        rows += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    rows += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ENOSYS)]  # libraries fall back to clone
    # A stream pair stays connected; a datagram socket can send to any socket in the file system.
    rows += [(_EQUAL, 0, 5, machine.socketpair), (_LOAD, 0, 0, _SECOND), (_AND, 0, 0, _SOCK_TYPE)]
    rows += [(_EQUAL, 1, 0, _SOCK_STREAM), (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
    wanted = 0 if processes else _CLONE_THREAD
    rows += [(_EQUAL, 0, 5, machine.clone), (_LOAD, 0, 0, _FIRST), (_ANY_BIT, 2, 0, _CLONE_NEW)]
    rows += [(_AND, 0, 0, wanted), (_EQUAL, 1, 0, wanted), (_RETURN, 0, 0, _EPERM)]
    rows.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *row) for row in rows)


def forbid_system_calls(processes: bool) -> None:
    """Install `syscall_filter` for this process and its future children."""
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
