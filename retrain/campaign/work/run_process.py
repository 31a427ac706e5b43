"""Start a run as a separate process, and interpret its exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli

from retrain.errors import EngineError, Preempted, StorageError
from retrain.system.files import write_text, writing
from retrain.system.fork import Fork, prepare
from retrain.system.lock import Lock, alive, machine
from retrain.system.process import Process, end, start
from retrain.system.records import read_json

_TRAIN = "retrain"
_IMPORTED = ("retrain.cli.main", "retrain.run.build")
"""Modules that every run imports; a forked process has already imported them."""
_GONE_S = 10.0  # a process that waits for a disk or a driver dies only when that call returns
_RESTARTED = (EngineError.exit_code, Preempted.exit_code, 128 + signal.SIGINT)
"""Exit codes after which a run is restarted."""
_REASONS = {1: "user code", 2: "configuration", 3: "data", 4: "diverged", 5: "engine", 6: "storage", 75: "preempted"}


def train(run: Path, ranks: int, environment: Mapping[str, str], fresh_process: bool = False) -> Process:
    """Start `retrain train`, resuming from the newest checkpoint if there is one; output goes to log.txt.

    Args:
        run: run directory with a config.toml.
        ranks: processes that train the run together.
        environment: environment variables to set.
        fresh_process: start a new interpreter even if a fork of a server process is possible.
    """
    config = run / "config.toml"
    arguments = ["train", str(config), "--resume", "auto", "--plain"]
    arguments += ["--ranks", str(ranks)] if ranks > 1 else []
    logging = tomli.loads(config.read_text(encoding="utf-8"))["logging"]
    if (Path(logging["dir"]) / logging["name"]).resolve() != run.resolve():
        # Another machine may mount the directory at another path than the one in the file.
        arguments += ["--set", f"logging.dir={run.parent}"]
    return _start(_TRAIN, arguments, run / "log.txt", environment, fresh_process or ranks > 1)


def warm_start(run: Path, log: Path, environment: Mapping[str, str], fresh_process: bool = False) -> Process:
    """Start a process that computes the warm start of a run into the cache; the arguments are those of `train`."""
    arguments = ["warm-start", str(run / "config.toml")]
    return _start("retrain.campaign.work.programs", arguments, log, environment, fresh_process)


def finish(process: Process) -> int:
    """Wait for the end of a process and return its exit code. If the wait is interrupted, end the process."""
    try:
        return process.wait()
    finally:
        end(process)


def _start(
    program: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str], fresh_process: bool
) -> Process:
    """Start a process that ends with its parent; `end` also ends its children.

    Without a GPU the process is a fork, because imports would take a good part of a short run. With a GPU runs are
    longer, and CUDA does not survive a fork if an imported module has initialized it.
    """
    if not fresh_process and not gpus():
        prepare(_IMPORTED)
        return Fork(program, arguments, log, environment, Preempted.exit_code)
    with writing(log):
        file = log.open("ab")
    with file:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        return start([sys.executable, "-m", program, *arguments], environment, code=Preempted.exit_code, **streams)


def gpus() -> list[str]:
    """Return the GPUs that this process may use, by index or name, without importing torch."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name not in ("", "-1")]
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True)  # noqa: S607
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(index) for index, _ in enumerate(listing.stdout.splitlines())]


def evict(run: Path, previous: Mapping[str, Any]) -> None:
    """Free a run directory for the owner of its new lease: kill the run of the previous owner.

    A process on another machine cannot be killed from here. Its lock is removed, because it lost its lease by showing
    no sign of life. A worker starts each run as the leader of a process group. With several ranks the leader is the
    launcher, and rank 0 holds the lock.
    """
    owner = Lock(run / "lock").owner()
    child = previous.get("child")
    if owner is None or child is None or (owner["machine"], owner["group"]) != (child["machine"], child["pid"]):
        return
    if owner["machine"] != machine():
        with writing(run):
            write_text(run / "lock", "")
        return
    deadline = time.monotonic() + _GONE_S
    while alive(owner) and time.monotonic() < deadline:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(owner["group"], signal.SIGKILL)
        time.sleep(0.05)


def checked_code(run: Path, code: int) -> int:
    """Return the exit code of a run's process; 1 for a process that ended with 0 before the run was finished.

    Code of the user may end the process, for example with `os._exit(0)`.
    """
    if code == 0:
        with suppress(StorageError):
            return int(read_json(run / "status.json").get("outcome") != "finished")
    return code or 1


def crashed(code: int) -> bool:
    """Return True if a restart may help: the run was killed or preempted, or its engine failed.

    An invalid configuration or a divergence would only occur again.
    """
    return code < 0 or code > 128 or code in _RESTARTED


def reason(run: Path, code: int) -> str:
    """Return the reason why the run ended with this exit code, in one line."""
    if code < 0 or code > 128:
        number = -code if code < 0 else code - 128
        signal_names = {name.value: name.name for name in signal.Signals}
        name = signal_names.get(number, str(number))  # real-time signals have no name
        return f"killed by {name}" + (": out of memory?" if number == signal.SIGKILL else "")
    with suppress(StorageError):
        if error := read_json(run / "status.json").get("error"):
            return str(error)
        if read_json(run / "status.json").get("outcome") == "running":
            return f"its process ended before the run was finished; {_last_line(run / 'log.txt')}"
    return _last_line(run / "log.txt") or _REASONS.get(code, f"exit code {code}")


def _last_line(log: Path) -> str:
    with suppress(OSError, IndexError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        return file.read().decode(errors="replace").strip().splitlines()[-1][:300]
    return ""
