"""Processes of a test that find torch imported: importing it would take longer than what they do."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from tests.waiting import PATIENCE_S

_RETRAIN = "from retrain.cli.main import main\nmain()"


def forked(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function in a process of its own."""
    process: Any = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def finish(process: Any) -> None:
    """Wait for a process that ends well."""
    process.join(timeout=PATIENCE_S)
    assert process.exitcode == 0


def run_source(source: str, *arguments: Any, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`python -c SOURCE ARGUMENT...`, to its end."""
    return _run(source, ["-c", *map(str, arguments)], cwd)


def run_command(*arguments: Any, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`retrain ARGUMENT...`, to its end."""
    return _run(_RETRAIN, ["retrain", *map(str, arguments)], cwd)


def _run(source: str, argv: list[str], cwd: Path | None) -> subprocess.CompletedProcess[str]:
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        process = forked(_apart, source, argv, cwd or Path.cwd(), (out.fileno(), err.fileno()))
        process.join(timeout=PATIENCE_S)
        assert process.exitcode is not None, "waited in vain"
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(argv, process.exitcode, out.read(), err.read())


def _apart(source: str, argv: list[str], cwd: Path, files: tuple[int, int]) -> None:
    """In the fork: what a program is given that is started in this folder, with these files for what it prints."""
    os.dup2(files[0], 1)
    os.dup2(files[1], 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    sys.argv = argv
    os.chdir(cwd)
    sys.path.insert(0, "")
    exec(compile(source, "<string>", "exec"), {"__name__": "__main__"})
