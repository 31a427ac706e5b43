"""`retrain`, `python -c`, `python -m` and `python FILE` as forks of a process that has already imported torch.

Started under the name `retrain` or `python` (see `install`), this program asks the server of its folder for a fork with
its own arguments, environment, working directory and standard streams. It forwards the signals that it gets, ends as
the fork ends, by the same signal or with the same exit code, and takes the fork with it if it is killed.

It becomes the real program where a fork would differ: if variables that Python or libraries read while they start are
not those of the server, if another copy of the package would be imported, if Python is started with options or without
a program, or if there are other file descriptors than the standard streams. These differences remain: the fork has a
PID, a session and a process group of its own, all forks share one seed of `hash`, and OpenMP has the number of threads
of the server until the program sets another.

It imports the standard library alone: it starts in 20 ms, where torch and transformers take five seconds.
"""

import fcntl
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
LIBRARIES = ("ATEN_", "DNNL_", "GLIBC_", "HF_", "LD_", "MALLOC_", "ONEDNN_", "OPENBLAS_", "TRANSFORMERS_")
LOADED = (*LIBRARIES, "LANG", "LC_", "PYTHON")
"""Beginnings of variables that are read at the start. Libraries set others later, such as KMP_INIT_AT_FORK."""
FOLLOWED = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONUNBUFFERED")
"""Those of them that a fork reads itself."""
ROOT = Path(__file__).resolve().parents[2]


def loaded(environment: dict[str, str]) -> dict[str, str]:
    """The variables that a process reads once, while it starts or loads its libraries."""
    return {key: value for key, value in environment.items() if key.startswith(LOADED) and key not in FOLLOWED}


def forkable(arguments: list[str], environment: dict[str, str], first: dict[str, str]) -> bool:
    """Whether a fork of a server with the variables `first` runs as the real program would."""
    places = [Path(place) for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    plain = arguments[0] == "retrain"
    if not plain and len(arguments) > 1:
        source = arguments[1] in ("-c", "-m")
        places.append(Path() if source else Path(arguments[1]).resolve().parent)
        plain = len(arguments) > 2 if source else Path(arguments[1]).is_file()
    other = any((place / "retrain").is_dir() and place.resolve() != ROOT for place in places)
    return plain and not other and loaded(environment) == loaded(first)


def connect(folder: Path) -> socket.socket:
    """A connection to the server of the folder; the first caller starts it."""
    link = socket.socket(socket.AF_UNIX)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            link.connect(str(folder / "socket"))
            return link
        except OSError:
            with (folder / "log").open("ab") as log:
                server = subprocess.Popen(
                    [sys.executable, "-m", "tests.preload.server", str(folder)],
                    cwd=ROOT,
                    env={**json.loads((folder / "environment.json").read_text()), "PYTHONPATH": ""},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        while True:
            try:
                link.connect(str(folder / "socket"))
                return link
            except OSError:
                if server.poll() is not None:
                    raise SystemExit(f"no server of forks: {(folder / 'log').read_text()}") from None
                time.sleep(0.02)


def lines(link: socket.socket) -> Iterator[str]:
    """The lines that arrive. Signals wake the wait for them: one that came just before would be handled after it."""
    wakes, wake = socket.socketpair()
    for end in (wakes, wake):
        end.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    file = link.makefile("r")
    while True:
        while link not in select.select([link, wakes], [], [])[0]:
            wakes.recv(4096)
        yield file.readline()


def run(folder: Path, arguments: list[str]) -> None:
    """Have the server run the program, and end as it ends; meanwhile `folder/forks/PID` holds the PID of the fork."""
    ignored = [number for number in FORWARDED if signal.getsignal(number) == signal.SIG_IGN]
    pid, early, link = 0, [], connect(folder)

    def forward(number: int, _: object) -> None:
        if pid:
            os.kill(pid, number)
        else:
            early.append(number)

    for number in FORWARDED:  # also what is ignored here: the program may install a handler of its own
        signal.signal(number, forward)
    about = {
        "client": os.getpid(),
        "arguments": arguments,
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "umask": os.umask(0),
        "ignored": ignored,
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "cores": sorted(os.sched_getaffinity(0)),
        "limits": {n: resource.getrlimit(n) for n in (resource.RLIMIT_FSIZE, resource.RLIMIT_AS, resource.RLIMIT_CORE)},
    }
    os.umask(about["umask"])
    body = json.dumps(about).encode("utf-8", "surrogateescape")
    socket.send_fds(link, [len(body).to_bytes(8, "big")], [0, 1, 2])
    link.sendall(body)
    answers = lines(link)
    pid = int(next(answers))
    for number in early:
        os.kill(pid, number)
    status = int(next(answers) or -signal.SIGKILL)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def install(folder: Path) -> None:
    """Write `retrain` and `python` of this interpreter into `folder/bin`, whose server gets today's environment."""
    for inside in ("bin", "forks"):
        (folder / inside).mkdir(parents=True, exist_ok=True)
    (folder / "environment.json").write_text(json.dumps(dict(os.environ)))
    (folder / "interpreter").symlink_to(sys.executable)  # whose path may be too long for a first line, or have a space
    for name in ("retrain", "python"):
        program = folder / "bin" / name
        lines = [f"#!{folder / 'interpreter'} -IS", "import sys", f"sys.executable = {sys.executable!r}"]
        lines += [f"sys.path.insert(0, {str(Path(__file__).parent)!r})", "import client"]
        program.write_text("\n".join([*lines, f"client.main({name!r}, {str(folder)!r})"]) + "\n")
        program.chmod(0o755)


def main(name: str, place: str) -> None:
    """Run the program of this name."""
    folder, arguments = Path(place), [name, *sys.argv[1:]]
    environment = dict(os.environ)
    held = {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}
    if held == {"0", "1", "2"} and forkable(
        arguments, environment, json.loads((folder / "environment.json").read_text())
    ):
        run(folder, arguments)
    real = sys.executable if name == "python" else str(Path(sys.executable).with_name("retrain"))
    os.execv(real, [real, *arguments[1:]])
