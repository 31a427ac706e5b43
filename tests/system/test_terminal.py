"""What is printed drives no terminal, and what cannot be printed stops nothing."""

import io
import logging
import subprocess
import sys

import pytest

from retrain.system.terminal import CleanHandler, say


def test_escapes_in_messages_and_logs_are_dots(capsys):
    say("\x1b]0;owned\x07 text")
    CleanHandler().emit(logging.LogRecord("x", logging.WARNING, "", 0, "see \x1b[2J", None, None))
    assert capsys.readouterr() == ("·]0;owned· text\n", "see ·[2J\n")


def test_an_encoding_that_lacks_a_character_shows_another(monkeypatch):
    written = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", written)
    say("naïve \x1b")
    assert written.buffer.getvalue() == b"na?ve .\n"


SCRIPT = """
import sys
from retrain.system.terminal import forgiving_output
with forgiving_output():
    for number in range(10_000):
        print(number, flush=number % 2 == 0)
    print("done", file=sys.stderr)
"""


@pytest.mark.parametrize("output", ["full disk", "closed pipe"])
def test_an_output_that_cannot_be_written_is_dropped(output):
    if output == "full disk":
        with open("/dev/full", "w") as full:
            done = subprocess.run([sys.executable, "-c", SCRIPT], stdout=full, stderr=subprocess.PIPE)
    else:
        done = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        done.stdout.close()
        done.stderr, _ = done.stderr.read(), done.wait()
    assert (done.returncode, done.stderr) == (0, b"done\n")
