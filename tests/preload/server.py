"""The process that `client` has forked: `python -m tests.preload.server FOLDER`.

It has one thread and computes nothing, so that forks of it can do anything. It ends when its folder is gone, or after a
quarter of an hour without a request.
"""

import atexit
import gc
import importlib
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from io import TextIOWrapper
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any

from retrain.campaign.work.run_process import _IMPORTED
from retrain.cli.main import COMMANDS
from retrain.system.fork import prepare
from tests.preload.client import FORWARDED

MODULES = [*_IMPORTED, *sorted({place.partition(":")[0] for place, _ in COMMANDS.values()})]
"""What most programs of the tests import. None of it starts a thread, or reads a variable that tests change."""
IDLE_S, LOOK_S = 900.0, 1.0
_SERVER: Any = getattr(forkserver, "_forkserver", None)
"""The fork server of multiprocessing, which runs of campaigns are forks of. Forks of this process share it."""


class Server:
    """Forks a process for every connection; `serve` returns in the forks alone, with what to run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.forks: dict[int, socket.socket] = {}
        self.notes: dict[int, Path] = {}
        self.selector = selectors.DefaultSelector()
        self.wake, wakes = socket.socketpair()
        self.wake.setblocking(False)
        wakes.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.sockets = [self.wake, wakes]
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / "socket.new"))
        self.listener.listen(128)
        os.rename(folder / "socket.new", folder / "socket")
        for one in (self.wake, self.listener):
            self.selector.register(one, selectors.EVENT_READ)

    def serve(self) -> dict[str, Any]:
        last = time.monotonic()
        while self.folder.exists() and (self.forks or time.monotonic() - last < IDLE_S):
            for key, _ in self.selector.select(LOOK_S):
                if key.fileobj is self.listener:
                    last = time.monotonic()
                    if about := self.fork(self.listener.accept()[0]):
                        return about
                elif key.fileobj is self.wake:
                    with suppress(BlockingIOError):
                        self.wake.recv(4096)
                else:  # its client was killed: nothing else ends a connection from that side
                    self.selector.unregister(key.fileobj)
                    for pid in [pid for pid, link in self.forks.items() if link is key.fileobj]:
                        os.kill(pid, signal.SIGKILL)
            self.reap()
        raise SystemExit

    def fork(self, link: socket.socket) -> dict[str, Any] | None:
        """Fork the program that a client asks for; returns what to run in the fork, None here."""
        size, streams, _, _ = socket.recv_fds(link, 8, 3)
        file = link.makefile("rb")
        body = file.read(int.from_bytes(size, "big"))
        if not size or len(body) < int.from_bytes(size, "big"):  # the client was killed before it had asked
            for number in streams:
                os.close(number)
            link.close()
            return None
        about = json.loads(body.decode("utf-8", "surrogateescape"))
        if hasattr(_SERVER, "_forkserver_pid") and {"campaign", "worker"} & set(about["arguments"]):
            prepare(_IMPORTED)
            forkserver.ensure_running()
        if pid := os.fork():
            for number in streams:
                os.close(number)
            self.forks[pid], self.notes[pid] = link, self.folder / "forks" / str(about["client"])
            self.selector.register(link, selectors.EVENT_READ)
            with suppress(OSError):
                link.sendall(b"%d\n" % pid)
            return None
        signal.set_wakeup_fd(-1)
        self.selector.close()
        for one in [self.listener, link, file, *self.sockets, *self.forks.values()]:
            one.close()
        return about | {"streams": streams}

    def reap(self) -> None:
        """Tell the clients of the forks that have ended how they ended."""
        for pid in [*self.forks]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                link = self.forks.pop(pid)
                self.notes.pop(pid).unlink(missing_ok=True)  # for another process will have the PID of the client
                with suppress(OSError):
                    link.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
                with suppress(KeyError):
                    self.selector.unregister(link)
                link.close()


INTERRUPTED: list[bool] = []


def die_interrupted() -> None:
    """End as Python does after a KeyboardInterrupt that nobody caught."""
    if any(INTERRUPTED):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def open_streams() -> None:
    """Make the standard streams of Python from the file descriptors, with the encodings that it has at its start."""
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        first, mode, through = getattr(sys, name), "wb" if number else "rb", at_once and number > 0
        binary: Any = open(number, mode, buffering=0 if through else -1, closefd=False)  # noqa: SIM115
        lines = not at_once and (number == 2 or binary.isatty())
        stream = TextIOWrapper(binary, first.encoding, first.errors, "\n", line_buffering=lines, write_through=through)
        setattr(sys, name, stream)


def become(about: dict[str, Any]) -> None:
    """Turn this fork into the process that the client stands for."""
    os.setsid()
    Path(sys.argv[1], "forks", str(about["client"])).write_text(str(os.getpid()))  # before the client knows the PID
    atexit.register(die_interrupted)  # the first to be registered is the last to be called
    if "triton" in sys.modules:  # its bindings, which CUDA builds of torch import, report what an exit does not free
        atexit.register(gc.unfreeze)
    for number, stream in enumerate(about["streams"]):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(about["cwd"])
    os.umask(about["umask"])
    os.sched_setaffinity(0, about["cores"])
    os.setpriority(os.PRIO_PROCESS, 0, about["nice"])
    for name, limits in about["limits"].items():
        resource.setrlimit(int(name), limits)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in FORWARDED:  # the client that started the server may have ignored others
        default: Any = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in about["ignored"] else default)
    os.environ.clear()
    os.environ.update(about["environment"])
    time.tzset()
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if numpy := sys.modules.get("numpy"):  # `random` does so by itself
        numpy.random.seed()
    open_streams()
    if getattr(_SERVER, "_forkserver_pid", None) is not None:  # whether it lives can only its parent ask
        _SERVER.ensure_running = resource_tracker.ensure_running
    if "--ranks" in about["arguments"] and "RANK" not in os.environ:
        sys.executable = str(Path(sys.argv[1]) / "bin" / "python")  # what launches ranks launches forks


def run(name: str, arguments: list[str]) -> None:
    """Run `retrain ARGUMENT...`, or `python -c CODE`, `-m MODULE` or FILE with arguments."""
    places = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:] = [*places, *PATH]
    main = sys.modules["__main__"] = ModuleType("__main__")
    if name == "retrain":
        file, sys.argv = str(Path(sys.prefix, "bin", "retrain")), ["retrain", *arguments]
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    elif arguments[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
        return
    else:
        file, sys.argv = os.path.abspath(arguments[0]), arguments
        sys.path.insert(0, str(Path(file).resolve().parent))
    main.__file__ = file
    exec(compile(Path(file).read_bytes(), file, "exec"), main.__dict__)


if __name__ == "__main__":
    PATH = sys.path[1:]  # without the working directory, from which this module comes
    for module in MODULES:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    program = Server(Path(sys.argv[1])).serve()
    become(program)
    try:
        run(program["arguments"][0], program["arguments"][1:])
    except (Exception, KeyboardInterrupt) as error:
        while (trace := error.__traceback__) and trace.tb_frame.f_code.co_filename == __file__:
            error.__traceback__ = trace.tb_next  # without the frames of this file
        sys.excepthook(type(error), error, trace)
        INTERRUPTED.append(isinstance(error, KeyboardInterrupt))
        sys.exit(1)
