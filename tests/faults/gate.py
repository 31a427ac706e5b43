"""Runs that stand still in the middle of a step until the test lets them go on: what it does to them is in time."""

from pathlib import Path

_GATE = """
import os, time

calls = 0

def held(completion):
    global calls
    calls += 1
    while calls > 54 and not os.path.exists("open"):  # the first evaluation and three steps
        time.sleep(0.02)
        if os.access(".", os.W_OK):  # not in a sandbox
            open("held", "a").close()
        if os.path.exists("ajar"):
            time.sleep(0.1)
            break
    return 0.0
"""


def gated(folder: Path, toml: str) -> str:
    """The same run, which goes no further than its fourth step, or the fourth after a resume, in this folder.

    A reward in the trainer itself makes a file `held` there. The run goes on when there is a file `open` in the folder;
    slowly, a second for a step, when there is one `ajar`.
    """
    (folder / "gate.py").write_text(_GATE)
    held = '\n[[rewards]]\nname = "gate.held"\nweight = 0.0\n'
    return toml.replace("workers = 0", "workers = 1\ntimeout_s = 36000.0") + held
