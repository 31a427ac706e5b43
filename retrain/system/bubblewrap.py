"""Run code written by a model under bubblewrap (the program bwrap), each call in new namespaces that leave nothing.

The code sees no other process, no network and no file of the project. Its file system holds the interpreter with its
packages, the programs of the system and empty writable directories. When a call ends, the kernel kills its processes
and frees what they wrote.

This module imports only the standard library, because the interpreter of an environment's worker may have nothing else.
"""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from functools import cache

_PROCESSES, _FILE, _DESCRIPTORS = 64, 1 << 24, 256
"""Limits for the code: number of processes, size of a file in bytes, open files."""
_ROOM = 1 << 26
"""Size of each writable directory, in bytes."""
_LONGEST = 100_000
"""Maximum size of the code in bytes; the kernel limits the length of one argument."""
_SEEN = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
"""Environment variables that the code sees. Variables named in `[reward_pool] env` stay hidden from it."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix", "/gnu", "/sys/devices/system/cpu")
_OF_ETC = (
    *("alternatives", "fonts", "group", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime"),
    *("mime.types", "nsswitch.conf", "passwd", "ssl", "timezone"),
)
_OF_PYTHON = ("bin", "include", "lib", "lib64", "share", "ssl", "pyvenv.cfg")
_TEMPORARY = ("/tmp", "/var/tmp", "/run", "/dev/shm")  # noqa: S108 - private
_PROBE_S = 30.0

_BEGIN = """\
import os, resource, sys
for kind, value in {limits}:
    hard = resource.getrlimit(kind)[1]
    value = value if hard < 0 else min(value, hard)
    resource.setrlimit(kind, (value, value))
os.write({ready}, b"+")
os.close({ready})
del os, resource, kind, value, hard
exec(compile(sys.argv.pop(), "<string>", "exec"))
"""
"""Program that limits itself inside the namespaces, then runs the code. Without a capability no limit can be raised."""

# Bubblewrap's namespaces leave sockets of the machine (vsock) and the number of root's processes open. Its seccomp
# filter, a BPF program, refuses both, and the system calls with which code could look for errors of the kernel.
_MACHINES = {
    "x86_64": (0xC000003E, 9, 53, 56, (57, 58), (
        *(29, 41, 64, 68, 101, 165, 240, 248, 249, 250, 272, 298, 308, 310, 311, 319, 321, 323, 425, 447),
    )),
    "aarch64": (0xC00000B7, 222, 199, 220, (), (
        *(40, 97, 117, 180, 186, 190, 194, 198, 217, 218, 219, 241, 268, 270, 271, 279, 280, 282, 425, 447),
    )),
}  # fmt: skip
"""Machine -> its number in audit.h, and the numbers of its system calls: mmap; socketpair; clone; those without
arguments that create a process; and those that are refused: shmget, socket, semget, msgget, ptrace, mount, mq_open,
add_key, request_key, keyctl, unshare, perf_event_open, setns, process_vm_readv and writev, memfd_create, bpf,
userfaultfd, io_uring_setup, memfd_secret."""
_X32, _CLONE3 = 0x40000000, 435
"""First number of the x32 calls of x86_64; a call whose flags are in memory, which a filter cannot read."""
_CLONE_THREAD, _CLONE_NEW = 0x00010000, 0x7E020000
"""Flags of clone: create a thread; create a namespace of any kind."""
_SOCK_STREAM, _SOCK_TYPE = 1, 0xF
_SHARED_MEMORY = 0x21
"""Flags of mmap: memory that is shared and in no file. Its limit, RLIMIT_AS, has room for libraries."""
_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND, _FOURTH = 0, 4, 16, 24, 40
_ALLOW, _EPERM, _ENOSYS = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38


def missing() -> tuple[str, str] | None:
    """Return (reason, fix) if this machine cannot run code of a model, else None. A call without code tries it."""
    return _missing(shutil.which("bwrap"))


@cache
def _missing(program: str | None) -> tuple[str, str] | None:
    if program is None:
        return (
            "bubblewrap (the program bwrap) is not installed",
            "apt-get install bubblewrap, or dnf install bubblewrap",
        )
    try:
        run("", _PROBE_S, 400)
    except (OSError, TimeoutError) as error:
        return f"bubblewrap does not work here ({error})", "allow unprivileged user namespaces"
    return None


def run(code: str, seconds: float, most: int) -> str:
    """Run the code and return what it printed to stdout and stderr. This process's limits of memory apply to it.

    Args:
        seconds: time limit of the call.
        most: maximum number of bytes of output to return.
    Raises:
        ValueError: the code is too long.
        TimeoutError: the code ran longer than the limit.
        OSError: the code could not be started.
    """
    text = code.encode(errors="replace")
    if len(text) > _LONGEST:
        raise ValueError(f"the code is longer than {_LONGEST:,} bytes")
    if not (program := shutil.which("bwrap")):
        raise OSError("the program bwrap is not installed")
    (about, info), (begun, ready) = os.pipe(), os.pipe()
    with (
        tempfile.TemporaryFile() as printed,
        os.fdopen(about, "rb") as about_file,
        os.fdopen(begun, "rb") as begun_file,
    ):
        filters = os.memfd_create("filter")
        os.pwrite(filters, _filter(processes=os.geteuid() != 0), 0)  # the kernel does not count root's processes
        files = (info, ready, filters)
        try:
            command = [program, *_options(), "--info-fd", str(info), "--seccomp", str(filters), "--", sys.executable]
            command += ["-I", "-c", _BEGIN.format(limits=_limits(), ready=ready), text.decode()]
            process = subprocess.Popen(  # noqa: S603 - the user's own bwrap
                command, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, env=_variables(), pass_fds=files
            )
        finally:
            for file in files:
                os.close(file)
        if _wait(process, about_file.read(), seconds):
            raise TimeoutError(f"it took more than {seconds:g} s")
        shown = os.pread(printed.fileno(), most, 0).decode(errors="replace")
        if begun_file.read() != b"+":
            raise OSError(f"the code could not be run ({shown.strip()[:400] or 'bwrap ended'})")
        return shown


def _wait(process: subprocess.Popen[bytes], info: bytes, seconds: float) -> bool:
    """Wait until all processes of a call have ended, and return True if they had to be killed.

    Args:
        info: what bwrap reports about itself: the PID of the first process in the namespace, with which the kernel
            ends all others; empty if bwrap failed.
    """
    first = -1
    with suppress(ValueError, KeyError, ProcessLookupError):
        first = os.pidfd_open(json.loads(info)["child-pid"])
    try:
        process.wait(seconds)
        late = False
    except subprocess.TimeoutExpired:
        late = True
    if first < 0:
        process.kill()
    else:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(first, signal.SIGKILL)
        select.select([first], [], [])  # readable once the kernel has ended the namespace
        os.close(first)
    process.wait()
    return late


def _options() -> list[str]:
    """Return the options of bwrap."""
    options = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--proc", "/proc"]
    options += ["--dev", "/dev", "--ro-bind", "/dev/null", "/dev/zero"]  # mapping /dev/zero would share memory
    options += [word for folder in _TEMPORARY for word in ("--size", str(_ROOM), "--tmpfs", folder)]
    here, visible = os.getcwd(), _visible()
    binds, links = layout(visible)
    options += [word for path in binds for word in ("--ro-bind", path, path)]
    if here in binds or _below(here, binds):  # a project in /usr/src, or one with its packages beside its files
        inner, more = layout(path for path in visible if _below(path, [here]) or _below(os.path.realpath(path), [here]))
        options += ["--size", str(_ROOM), "--tmpfs", here]
        options += [word for path in inner for word in ("--ro-bind", path, path)]
        links |= more
    options += [word for path, target in links.items() for word in ("--symlink", target, path)]
    return [*options, "--remount-ro", "/dev", "--remount-ro", "/proc", "--remount-ro", "/", "--chdir", _TEMPORARY[0]]


def _visible() -> list[str]:
    """Return the paths that the code sees: programs and libraries, but no file of a project."""
    packages = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    of_python = [f"{prefix}/{name}" for prefix in (sys.prefix, sys.base_prefix) for name in _OF_PYTHON]
    return [*_SYSTEM, *(f"/etc/{name}" for name in _OF_ETC), *of_python, *packages, *filter(os.path.isabs, libraries)]


def layout(visible: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Return the real paths to mount, none below another, and {given path: real path} for paths that need a symbolic
    link. A path below one of these links needs none, because the link leads to it."""
    wanted = {os.path.abspath(path): os.path.realpath(path) for path in visible if os.path.exists(path)}
    real = set(wanted.values())
    binds = sorted(path for path in real if not _below(path, real - {path}))
    links: dict[str, str] = {}
    for path, real in sorted(wanted.items()):
        if path != real and path not in (*binds, *_TEMPORARY, "/proc") and not _below(path, (*binds, *links, "/proc")):
            links[path] = real
    return binds, links


def _below(path: str, places: Iterable[str]) -> bool:
    return any(path.startswith(f"{folder}/") for folder in places)


def _variables() -> dict[str, str]:
    return {"HOME": _TEMPORARY[0], **{name: os.environ[name] for name in _SEEN if name in os.environ}}


def _limits() -> list[tuple[int, int]]:
    """Return (resource, value) of the limits of each process, which the code cannot raise."""
    limits = [(resource.RLIMIT_NPROC, _PROCESSES), (resource.RLIMIT_FSIZE, _FILE), (resource.RLIMIT_CORE, 0)]
    limits.append((resource.RLIMIT_NOFILE, _DESCRIPTORS))
    return [*limits, *((kind, resource.getrlimit(kind)[0]) for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))]


def _filter(processes: bool) -> bytes:
    """Return the seccomp filter as a BPF program, which allows everything on a machine that `_MACHINES` does not list.

    Args:
        processes: allow new processes; otherwise only new threads.
    """
    rows: list[tuple[int, int, int, int]] = []
    if machine := _MACHINES.get(os.uname().machine):
        audit, mmap, socketpair, clone, forks, refused = machine
        rows += [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _EPERM)]
        rows += [(_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _EPERM)]
        for number in (*refused, *(() if processes else forks)):
            rows += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
        rows += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ENOSYS)]  # libraries fall back to clone
        rows += [(_EQUAL, 0, 5, mmap), (_LOAD, 0, 0, _FOURTH), (_AND, 0, 0, _SHARED_MEMORY)]
        rows += [(_EQUAL, 0, 1, _SHARED_MEMORY), (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
        # A stream pair stays connected; a datagram socket can send to any socket in the file system.
        rows += [(_EQUAL, 0, 5, socketpair), (_LOAD, 0, 0, _SECOND), (_AND, 0, 0, _SOCK_TYPE)]
        rows += [(_EQUAL, 1, 0, _SOCK_STREAM), (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
        wanted = 0 if processes else _CLONE_THREAD
        rows += [(_EQUAL, 0, 5, clone), (_LOAD, 0, 0, _FIRST), (_ANY_BIT, 2, 0, _CLONE_NEW)]
        rows += [(_AND, 0, 0, wanted), (_EQUAL, 1, 0, wanted), (_RETURN, 0, 0, _EPERM)]
    return b"".join(struct.pack("HBBI", *row) for row in (*rows, (_RETURN, 0, 0, _ALLOW)))
