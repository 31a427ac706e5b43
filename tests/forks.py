"""Processes of a test that find torch imported: importing it would take longer than what they do.

`PYTHON` and `RETRAIN` behave as the real programs do; `tests/preload/client.py` says what differs. Tests of imports and
of process groups start `sys.executable`.
"""

import multiprocessing
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE_S

BIN = Path(os.environ["RETRAIN_TEST_SERVER"], "bin")
PYTHON, RETRAIN = str(BIN / "python"), str(BIN / "retrain")


def forked(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function in a process of its own, which has what this process has."""
    process: Any = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def finish(process: Any) -> None:
    """Wait for a process that ends well."""
    process.join(timeout=PATIENCE_S)
    assert process.exitcode == 0


def run_source(source: str, *arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """`python -c SOURCE ARGUMENT...`, to its end."""
    return _run([PYTHON, "-c", source, *map(str, arguments)], **options)


def run_command(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """`retrain ARGUMENT...`, to its end."""
    return _run([RETRAIN, *map(str, arguments)], **options)


def _run(
    command: list[str],
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    code: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command; `code` is the exit code that it must end with."""
    variables = {**os.environ, **(environment or {})}
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=PATIENCE_S)
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done
