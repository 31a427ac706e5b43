"""A Ray cluster of two nodes on this machine, whose every process can be found, and killed, by node."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

TOKEN = "of-the-tests-" + "0123456789abcdef" * 2
_MARK = "RETRAIN_TEST_NODE"
_SMALL = ("--object-store-memory=80000000", "--disable-usage-stats", "--block")


def environment(token: str | None = TOKEN, **more: str) -> dict[str, str]:
    """Of a process that knows the token, or does not, whatever the user's own environment says."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    own |= {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    own["RAY_worker_niceness"] = "0"  # instead of 15, with which runs hardly go on beside other suites
    return own | ({} if token is None else {"RAY_AUTH_TOKEN": token}) | more


class Nodes:
    """Nodes by name; the first one started is the head."""

    def __init__(self, **variables: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self._variables = variables
        self._processes: dict[str, subprocess.Popen] = {}
        self.folder = tempfile.mkdtemp(prefix="rt-", dir="/tmp")  # paths of sockets must be short

    def start(self, name: str, cpus: int = 1, gpus: int = 0) -> None:
        port = self.address.rpartition(":")[2]
        head = ("--head", f"--port={port}", f"--temp-dir={self.folder}", "--include-dashboard=false")
        where = (f"--address={self.address}",) if self._processes else head
        command = [
            str(Path(sys.executable).parent / "ray"),
            "start",
            *where,
            f"--num-cpus={cpus}",
            f"--num-gpus={gpus}",
            *_SMALL,
        ]
        log = Path(self.folder, f"{name}.txt")
        with log.open("wb") as file:
            process = self._processes[name] = subprocess.Popen(
                command, stdout=file, stderr=file, env=environment(**{_MARK: self._mark(name)}, **self._variables)
            )
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)

    def processes(self, name: str) -> list[int]:
        """Everything that the node runs, the campaign's runs on it included."""
        mark, found = f"{_MARK}={self._mark(name)}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def kill(self, name: str) -> None:
        """All of it at once, as when a machine loses its power."""
        while found := self.processes(name):
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        self._processes.pop(name).wait()

    def stop(self) -> None:
        for name in [*self._processes]:
            self.kill(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _mark(self, name: str) -> str:
        return f"{self.folder}-{name}"
