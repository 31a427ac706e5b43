"""Runs code that a model has written: each call in namespaces of its own, of which nothing is left when it ends.

A sandboxed worker cannot make namespaces, since it has given up its privileges. So a process that keeps them, the
launcher, is forked beforehand. For each call it forks a child with its own process, mount, network and IPC namespace:
the code sees no other process, writes into empty directories alone, and shares no memory or message queue with
anybody. The kernel ends all of its processes, and frees all that they wrote, when the first of them ends.

Needs nothing but the standard library, as the workers of an environment do.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import socket
import struct
import sys
import tempfile
from contextlib import suppress
from typing import NoReturn

from retrain.system import sandbox

_PROCESSES, _FILE, _DESCRIPTORS = 64, 1 << 24, 256
"""Limits of the code: processes, bytes of a file, open files."""
_LONGEST = 100_000
"""Bytes of code: the kernel takes no more in one argument of a program."""
_SEEN = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
"""Environment variables that the code sees. What `[reward_pool] env` names is not for it."""

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWPID, _CLONE_NEWNET = 0x00020000, 0x08000000, 0x20000000, 0x40000000
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 22, 38
_MODE_FILTER = 2
_FORBIDDEN = {
    "x86_64": (0xC000003E, {
        "shmget": 29, "socket": 41, "semget": 64, "msgget": 68, "ptrace": 101, "mount": 165, "mq_open": 240,
        "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298, "setns": 308,
        "process_vm_readv": 310, "process_vm_writev": 311, "memfd_create": 319, "bpf": 321, "userfaultfd": 323,
        "io_uring_setup": 425, "memfd_secret": 447,
    }),
    "aarch64": (0xC00000B7, {
        "mount": 40, "unshare": 97, "ptrace": 117, "mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194,
        "socket": 198, "add_key": 217, "request_key": 218, "keyctl": 219, "perf_event_open": 241, "setns": 268,
        "process_vm_readv": 270, "process_vm_writev": 271, "memfd_create": 279, "bpf": 280, "userfaultfd": 282,
        "io_uring_setup": 425, "memfd_secret": 447,
    }),
}  # fmt: skip
"""System calls that the code may not make, by machine, with the machine's number in `audit.h`: those that reach other
processes or the network, sockets in files and of virtual machines included, and memory that no limit counts."""
_X32 = 0x40000000
"""Numbers from here on are another set of system calls of x86_64."""

_launcher: socket.socket | None = None


def start_launcher(memory_mb: int) -> None:
    """Fork the launcher. Called in the sandbox before this process gives up its privileges.

    Args:
        memory_mb: what each process of the code may allocate; 0 for no limit.
    """
    global _launcher
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        _launch_all(theirs, memory_mb)
    theirs.close()
    _launcher = ours


def available() -> bool:
    """Whether this process has a launcher."""
    return _launcher is not None


def run(code: str, seconds: float, most: int) -> str:
    """What the code prints, on either stream.

    Args:
        seconds: until it is ended.
        most: bytes of what it prints that are read.
    Raises:
        ValueError: the code is too long. TimeoutError: it took too long. OSError: it could not be started.
    """
    assert _launcher is not None
    text = code.encode(errors="replace")
    if len(text) > _LONGEST:
        raise ValueError(f"the code is longer than {_LONGEST:,} bytes")
    read, write = os.pipe()
    with tempfile.TemporaryFile() as printed, os.fdopen(read, "rb") as how:
        try:
            socket.send_fds(_launcher, [struct.pack("d", seconds) + text], [printed.fileno(), write])
        finally:
            os.close(write)
        ended = how.read()
        if ended == b"late":
            raise TimeoutError(f"it took more than {seconds:g} s")
        if ended != b"done":
            raise OSError(f"the code could not be run ({ended.decode(errors='replace') or 'its launcher has ended'})")
        printed.seek(0)
        return printed.read(most).decode(errors="replace")


def _launch_all(calls: socket.socket, memory_mb: int) -> NoReturn:
    """Fork a child for each call until the worker ends."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    while True:
        message, files, _, _ = socket.recv_fds(calls, _LONGEST + 64, 2)
        if not message:
            os._exit(0)
        if not os.fork():
            _supervise(message, files, memory_mb)
        for file in files:
            os.close(file)


def _supervise(message: bytes, files: list[int], memory_mb: int) -> NoReturn:
    """Run the code of a call in namespaces of its own, and write how it ended into the second file."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    printed, how = files
    [seconds], code = struct.unpack("d", message[:8]), message[8:].decode()
    try:
        sandbox.call("unshare", _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC)
        ready, tell = os.pipe()
        first = os.fork()  # process 1 of the new namespace: all others end with it
        if not first:
            os.close(how)
            _inside(code, printed, tell, memory_mb)
        os.close(tell)
        late = not select.select([os.pidfd_open(first)], [], [], seconds)[0]
        with suppress(ProcessLookupError):
            os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        problem = os.read(ready, 500)
        os.write(how, problem or (b"late" if late else b"done"))
    except OSError as error:
        os.write(how, str(error).encode())
    os._exit(0)


def _inside(code: str, printed: int, tell: int, memory_mb: int) -> NoReturn:
    """Become the program of the code; a problem on the way is written into `tell`."""
    try:
        sandbox.renew()
        sandbox.continue_in_child()  # process 1 ignores most signals: it only waits
        os.setsid()
        for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, printed), (2, printed)):
            os.dup2(source, target)
        os.set_inheritable(tell, False)
        os.closerange(3, tell)
        os.closerange(tell + 1, 4096)
        os.chdir(tempfile.gettempdir())
        _limit(memory_mb)
        sandbox.drop_capabilities()
        _forbid_system_calls()
        seen = {name: os.environ[name] for name in _SEEN if name in os.environ}
        os.execve(sys.executable, [sys.executable, "-I", "-c", code], seen)  # noqa: S606 - what the sandbox is for
    except BaseException as error:
        os.write(tell, str(error).encode()[:400] or b"it could not be started")
    os._exit(1)


def _limit(memory_mb: int) -> None:
    limits = {"NPROC": _PROCESSES, "FSIZE": _FILE, "NOFILE": _DESCRIPTORS, "CORE": 0}
    if memory_mb:
        limits |= {"DATA": memory_mb << 20, "AS": (memory_mb << 20) + sandbox.LIBRARIES}
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _forbid_system_calls() -> None:
    """Have the kernel refuse the forbidden system calls (EPERM), for good; nothing on a machine that is not listed."""
    architecture, numbers = _FORBIDDEN.get(os.uname().machine, (0, {}))
    if not numbers:
        return
    # A program for the kernel's filter: load the architecture (offset 4) and the number (offset 0), compare, return.
    load, equal, at_least, back = 0x20, 0x15, 0x35, 0x06
    refuse = 0x00050000 | 1  # SECCOMP_RET_ERRNO with EPERM
    rows = [(load, 0, 0, 4), (equal, 1, 0, architecture), (back, 0, 0, refuse), (load, 0, 0, 0)]
    rows += [(at_least, 0, 1, _X32), (back, 0, 0, refuse)]
    for number in numbers.values():
        rows += [(equal, 0, 1, number), (back, 0, 0, refuse)]
    rows.append((back, 0, 0, 0x7FFF0000))  # SECCOMP_RET_ALLOW
    program = b"".join(struct.pack("HBBI", *row) for row in rows)
    held = ctypes.create_string_buffer(program, len(program))
    filters = struct.pack("HxxxxxxP", len(rows), ctypes.addressof(held))
    sandbox.call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    sandbox.call("prctl", _PR_SET_SECCOMP, _MODE_FILTER, ctypes.create_string_buffer(filters, len(filters)), 0, 0)
