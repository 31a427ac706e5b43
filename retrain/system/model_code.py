"""Run code written by a model, each call in new namespaces that leave nothing behind.

The code sees no other process, no network and no file of the project. Its file system holds the interpreter with its
packages, the programs of the system and an empty writable directory. When the first process of a call ends, the kernel
kills the others and frees what they wrote.

Two methods create the namespaces: `bubblewrap` (the program bwrap) where it is installed and works, otherwise this
module, inside the worker's sandbox. Both need privileges that the worker gives up when it enters its sandbox. A
launcher keeps them: it is forked beforehand and forks a child for each call.

This module imports only the standard library, because the interpreter of an environment's worker may have nothing else.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import NoReturn

from retrain.system import sandbox

BUBBLEWRAP, NAMESPACES = "bubblewrap", "namespaces"

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
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_HOME = "/tmp"  # noqa: S108 - private
_PROBE_S = 30.0

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWPID, _CLONE_NEWNET = 0x00020000, 0x08000000, 0x20000000, 0x40000000
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36

_BEGIN = """\
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NPROC, ({limit}, {limit}))
os.write({ready}, b"+")
os.close({ready})
del os, resource
exec(compile(sys.argv.pop(), "<string>", "exec"))
"""
"""Program that limits the number of processes inside bubblewrap's user namespace, then runs the code."""

_launchers: dict[str, socket.socket] = {}
"""Sockets to the launchers of this process, by method, the preferred method first."""
_tried: list[str] = []
"""The method that was tried with success in this process, or empty."""


def method() -> tuple[str, str]:
    """Return the method that works on this machine and the reason why none does; one of the two is "".

    A subprocess tries the methods.
    """
    return _method(os.environ.get("PATH", ""))


@cache
def _method(path: str) -> tuple[str, str]:
    del path  # part of the cache key: another PATH may have another bwrap
    if sys.platform != "linux":
        return "", "it needs Linux"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(place or os.getcwd() for place in sys.path)}
    command = [sys.executable, "-P", "-m", "retrain.system.model_code"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, env=environment)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        return "", str(error)
    if tried.returncode == 0:
        return tried.stdout.strip(), ""
    return "", (tried.stderr.strip().splitlines() or ["the process that tried it ended"])[-1]


def start_outer_launcher(memory_mb: int) -> None:
    """Fork the launcher that uses bubblewrap, if bwrap is installed. Call it before the process enters its sandbox.

    Args:
        memory_mb: what each process of the code may allocate; 0 for no limit.
    """
    if program := shutil.which("bwrap"):
        _start(BUBBLEWRAP, partial(_in_bubblewrap, memory_mb=memory_mb, program=program))


def start_launcher(memory_mb: int) -> None:
    """Fork the launcher that creates namespaces itself. Call it in the sandbox, before capabilities are dropped.

    Args:
        memory_mb: what each process of the code may allocate; 0 for no limit.
    """
    _start(NAMESPACES, partial(_in_namespaces, memory_mb=memory_mb))


def _start(name: str, start: Callable[[str, int, int], int]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        _launch_all(theirs, start)
    theirs.close()
    _launchers[name] = ours


def available() -> bool:
    """Return True if this process has a launcher."""
    return bool(_launchers)


def run(code: str, seconds: float, most: int) -> str:
    """Run the code and return what it printed to stdout and stderr.

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
    return _call(_launchers[usable()], text, seconds, most)


def usable() -> str:
    """Return the method that this process uses: that of its first launcher that works.

    Raises:
        OSError: no launcher works.
    """
    if not _tried:
        problem = OSError("this process has no launcher for code")
        for name, launcher in _launchers.items():
            try:
                _call(launcher, b"", _PROBE_S, 1)
                _tried.append(name)
                break
            except OSError as error:
                problem = error
        else:
            raise problem
    return _tried[0]


def _call(launcher: socket.socket, code: bytes, seconds: float, most: int) -> str:
    read, write = os.pipe()
    with tempfile.TemporaryFile() as printed, os.fdopen(read, "rb") as how:
        try:
            socket.send_fds(launcher, [struct.pack("d", seconds) + code], [printed.fileno(), write])
        finally:
            os.close(write)
        ended = how.read()
        if ended == b"late":
            raise TimeoutError(f"it took more than {seconds:g} s")
        if ended != b"done":
            raise OSError(f"the code could not be run ({ended.decode(errors='replace') or 'its launcher has ended'})")
        printed.seek(0)
        return printed.read(most).decode(errors="replace")


def _launch_all(calls: socket.socket, start: Callable[[str, int, int], int]) -> NoReturn:
    """Fork a child for each call until the worker closes its end of the socket."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    while True:
        message, files, _, _ = socket.recv_fds(calls, _LONGEST + 64, 2)
        if not message:
            os._exit(0)
        if not os.fork():
            _supervise(message, files, start)
        for file in files:
            os.close(file)


def _supervise(message: bytes, files: list[int], start: Callable[[str, int, int], int]) -> NoReturn:
    """Run the code of a call and write its outcome to the second file: "done", "late" or an error message.

    Args:
        start: takes the code, a file for its output and a pipe, writes "+" to the pipe when the code begins, and
            returns the PID of the process with which all others of the call end.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    printed, how = files
    [seconds], code = struct.unpack("d", message[:8]), message[8:].decode()
    try:
        sandbox.call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        progress, ready = os.pipe()
        first = start(code, printed, ready)
        os.close(ready)
        late = not select.select([os.pidfd_open(first)], [], [], seconds)[0]
        with suppress(ProcessLookupError):
            os.kill(first, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.wait():  # also waits for PID 1 of the namespace, which ends last
                pass
        said = os.read(progress, 500)
        problem = b"" if said == b"+" else said.removeprefix(b"+") or os.pread(printed, 500, 0) or b"it did not start"
        os.write(how, (late and b"late") or problem or b"done")
    except OSError as error:
        os.write(how, str(error).encode())
    os._exit(0)


def _in_namespaces(code: str, printed: int, ready: int, memory_mb: int) -> int:
    """Start the code in new namespaces and return PID 1 of them."""
    sandbox.call("unshare", _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC)
    if first := os.fork():
        return first
    try:
        _keep_open(printed, ready)
        sandbox.new_root([*_visible(), *_DEVICES])
        sandbox.continue_in_child()  # PID 1 ignores most signals, so that the code runs in a child
        os.setsid()
        os.chdir(_HOME)
        _limit(memory_mb, NPROC=_PROCESSES)
        sandbox.drop_capabilities()
        sandbox.forbid_system_calls(processes=os.geteuid() != 0 or sandbox.root_has_limits())
        os.write(ready, b"+")
        os.set_inheritable(ready, False)
        os.execve(sys.executable, [sys.executable, "-I", "-c", code], _variables())  # noqa: S606 - sandboxed
    except BaseException as error:
        os.write(ready, str(error).encode()[:400] or b"it could not be started")
    os._exit(1)


def _in_bubblewrap(code: str, printed: int, ready: int, memory_mb: int, program: str) -> int:
    """Start the code in bwrap and return the PID of bwrap, which prints its own errors."""
    if first := os.fork():
        return first
    try:
        # Bubblewrap cannot limit the number of root's processes, so that root may create none.
        filters = os.memfd_create("filter", 0)
        os.write(filters, sandbox.syscall_filter(processes=os.geteuid() != 0))
        os.lseek(filters, 0, os.SEEK_SET)
        _keep_open(printed, ready, filters)
        _limit(memory_mb)
        options = [*_options(), *(["--seccomp", str(filters)] if os.fstat(filters).st_size else [])]
        begin = _BEGIN.format(limit=_PROCESSES, ready=ready)
        command = [program, *options, "--", sys.executable, "-I", "-c", begin, code]
        os.execve(program, command, _variables())  # noqa: S606 - sandboxed
    except BaseException as error:
        os.write(ready, str(error).encode()[:400] or b"it could not be started")
    os._exit(1)


def _options() -> list[str]:
    """Return the options of bwrap."""
    found = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--proc", "/proc"]
    found += ["--dev", "/dev"]
    for place in sandbox.TEMPORARY:
        found += ["--size", str(_ROOM), "--tmpfs", place]
    binds, links = sandbox.layout(_visible())
    for path in binds:
        found += ["--ro-bind", path, path]
    for path, target in links.items():
        found += ["--symlink", target, path]
    return [*found, "--remount-ro", "/dev", "--remount-ro", "/proc", "--remount-ro", "/", "--chdir", _HOME]


def _visible() -> list[str]:
    """Return the paths that the code sees: programs and libraries, but no file of a project."""
    packages = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    etc = [f"/etc/{name}" for name in _OF_ETC]
    return [*_SYSTEM, *etc, sys.prefix, sys.base_prefix, *packages, *filter(os.path.isabs, libraries)]


def _variables() -> dict[str, str]:
    return {"HOME": _HOME, **{name: os.environ[name] for name in _SEEN if name in os.environ}}


def _keep_open(printed: int, *kept: int) -> None:
    """Redirect stdin to /dev/null and both outputs to `printed`, pass `kept` to the next program, close all others."""
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, printed), (2, printed)):
        os.dup2(source, target)
    low = 3
    for file in sorted(kept):
        os.set_inheritable(file, True)
        os.closerange(low, file)
        low = file + 1
    os.closerange(low, 4096)


def _limit(memory_mb: int, **limits: int) -> None:
    limits = {"FSIZE": _FILE, "NOFILE": _DESCRIPTORS, "CORE": 0, **limits}
    if memory_mb:
        limits |= {"DATA": memory_mb << 20, "AS": (memory_mb << 20) + sandbox.LIBRARIES}
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _try() -> str:
    """Return the method that works on this machine; raise OSError if none does."""
    start_outer_launcher(0)
    problem: OSError | None = None
    try:
        sandbox.enter([*filter(None, sys.path), sys.prefix, sys.base_prefix], lambda: start_launcher(0))
    except OSError as error:
        problem = error
    try:
        return usable()
    except OSError as error:
        raise problem or error from None


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{_try()}\n")
        sys.stdout.flush()
    except OSError as failed:
        sys.exit(f"{failed.strerror or failed}")
