"""A run as a process of its own: how it is started, and what its end means."""

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
from retrain.system.files import write_text
from retrain.system.fork import Fork, prepare
from retrain.system.lock import Lock, alive, identity
from retrain.system.process import Process, end, follower
from retrain.system.records import read_json

_TRAIN = "retrain.cli.main"
_IMPORTED = (_TRAIN, "retrain.run.build")
"""What every run imports."""
_GONE_S = 10.0
_RESTARTED = (EngineError.exit_code, Preempted.exit_code, 128 + signal.SIGINT)
_REASONS = {1: "user code", 2: "configuration", 3: "data", 4: "diverged", 5: "engine", 6: "storage", 75: "preempted"}


def train(run: Path, ranks: int, environment: Mapping[str, str], alone: bool = False) -> Process:
    """Start `retrain train`, resuming where there is something to resume; its output goes to its log.

    Args:
        alone: not as a fork, even where it could be one.
    """
    config = run / "config.toml"
    arguments = ["train", str(config), "--resume", "auto", "--plain"]
    arguments += ["--ranks", str(ranks)] if ranks > 1 else []
    logging = tomli.loads(config.read_text(encoding="utf-8"))["logging"]
    if (Path(logging["dir"]) / logging["name"]).resolve() != run.resolve():
        # On another machine the folder may be mounted at another place than the one that the file names.
        arguments += ["--set", f"logging.dir={run.parent}"]
    return _start(_TRAIN, arguments, run / "log.txt", environment, alone or ranks > 1)


def warm_start(run: Path, log: Path, alone: bool = False) -> Process:
    """Start to compute the warm start of a run into the cache; arguments as of `train`."""
    return _start("retrain.campaign.work.programs", ["warm-start", str(run / "config.toml")], log, {}, alone)


def finish(process: Process) -> int:
    """Wait for the end of a process; the exit code. If this is interrupted, the process ends as well."""
    try:
        return process.wait()
    finally:
        end(process)


def _start(program: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str], alone: bool) -> Process:
    """Start a process that ends with its parent, and with its children in `end`.

    Where there is no GPU it is a fork, for imports would take a good part of a short run. With a GPU they take nothing
    to speak of, and CUDA would not survive the fork if something that was imported had touched it.
    """
    if not alone and not gpus():
        prepare(_IMPORTED)
        return Fork(program, arguments, log, environment, Preempted.exit_code)
    with log.open("ab") as file:
        return subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-m", program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C in the terminal is for the parent to pass on
            preexec_fn=follower(os.getpid(), code=Preempted.exit_code),  # safe: the parent has one thread
        )


def gpus() -> list[str]:
    """The GPUs that this process may use, by index or name, without loading torch."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name not in ("", "-1")]
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True)  # noqa: S607
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(index) for index, _ in enumerate(found.stdout.splitlines())]


def evict(run: Path, previous: Mapping[str, Any]) -> None:
    """Free a run directory for the owner of its new lease: kill the run that the previous owner left behind.

    A process of another machine cannot be killed from here. It lost its lease because it showed no sign of life, and
    its lock is removed. What a worker starts leads a process group: the run, or the launcher of its ranks, of which
    rank 0 holds the lock.
    """
    owner, child = Lock(run / "lock").owner(), previous.get("child")
    if owner is None or child is None or (owner["host"], owner["group"]) != (child["host"], child["pid"]):
        return
    if owner["host"] != identity(os.getpid())["host"]:
        write_text(run / "lock", "")
        return
    deadline = time.monotonic() + _GONE_S
    while alive(owner) and time.monotonic() < deadline:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(owner["group"], signal.SIGKILL)
        time.sleep(0.05)


def crashed(code: int) -> bool:
    """Whether a restart may help: killed, engine, preempted. A mistake or a divergence would only happen again."""
    return code < 0 or code > 128 or code in _RESTARTED


def reason(run: Path, code: int) -> str:
    """Why the run ended with this exit code, in a line."""
    if code < 0 or code > 128:
        number = -code if code < 0 else code - 128
        name = signal.Signals(number).name if number in {one.value for one in signal.Signals} else str(number)
        return f"killed by {name}" + (": out of memory?" if number == signal.SIGKILL else "")
    with suppress(StorageError):
        if error := read_json(run / "status.json").get("error"):
            return str(error)
    return _last_line(run / "log.txt") or _REASONS.get(code, f"exit code {code}")


def _last_line(log: Path) -> str:
    with suppress(OSError, IndexError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        return file.read().decode(errors="replace").strip().splitlines()[-1][:300]
    return ""
