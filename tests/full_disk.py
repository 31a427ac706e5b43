"""A limit on the size of files, which is how a full disk looks to a process."""

import os
import subprocess
import sys
from typing import Any

from tests.waiting import PATIENCE_S

_PROLOGUE = """
import resource, sys

limits = resource.getrlimit(resource.RLIMIT_FSIZE)

def fill(most=20_000):  # bytes of a file: what grows past them cannot be written
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))

def free():
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
"""


def run_script(source: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run Python source that may call `fill()` and `free()`; what it was given is in `sys.argv[1:]`."""
    # The file in which coverage counts the lines of a process would meet the limit as well.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    command = [sys.executable, "-c", _PROLOGUE + source, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
