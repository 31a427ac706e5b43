"""Record the environment of a run: versions, hardware, source revision.

To protect privacy, it records only two environment variables, and no command-line arguments, user or host name.
"""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from retrain.system.process import thread_waiting
from retrain.version import __version__

_PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "numpy", "vllm", "peft")
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


def environment() -> dict[str, Any]:
    """Return the content of environment.json. Imports torch, which knows the devices and the number of threads."""
    import torch

    packages = {"retrain": __version__}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "thread_waiting": thread_waiting.reason,
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "git": _git(),
    }


def _cpu() -> str:
    """Return the model name of the CPU."""
    # On Linux, platform.processor() returns only the architecture, or "".
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def _git() -> str | None:
    """Return the commit of the current directory's Git repository, with -dirty if files differ; None outside one."""
    # Without --exclude the name of a tag could replace the commit.
    command = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)  # noqa: S603 - constant
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
