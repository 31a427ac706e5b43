"""A limit on the size of files, which is how a full disk looks to a process."""

import subprocess
from typing import Any

from tests.forks import run_source

_PROLOGUE = """
import resource, sys

limits = resource.getrlimit(resource.RLIMIT_FSIZE)

def fill(most=20_000):  # bytes of a file: what grows past them cannot be written
    sys.dont_write_bytecode = True  # Python would leave the first bytes of what it compiles, for every other process
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))

def free():
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
"""


def run_script(source: str, *arguments: Any, code: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python source that may call `fill()` and `free()`; what it was given is in `sys.argv[1:]`."""
    return run_source(_PROLOGUE + source, *arguments, code=code)
