"""Print safely: mask secrets, replace control characters, and survive an output that cannot be written."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from retrain.system.masking import masked

_IN_ASCII = str.maketrans("─├┤┊┼◂▸●○▲▼✓✗·≈≡≠≤≥±", "-||:+<>oo^v+x.~==<>~")
"""What is drawn instead of lines, marks and signs where a terminal has ASCII alone."""


def clean(text: str) -> str:
    """Replace tabs by spaces and all other non-printable characters except newlines by a dot.

    Text of models, rewards and exceptions could otherwise control the terminal with escape sequences.
    """
    return "".join(char if char.isprintable() or char == "\n" else " " if char == "\t" else "·" for char in text)


def shown(text: str) -> str:
    """Return the text with secrets masked and control characters replaced, safe for a terminal."""
    return clean(masked(text))


def say(text: str, error: bool = False) -> None:
    """Print text with secrets masked and control characters replaced.

    Characters that the encoding of the stream does not have become similar ones of ASCII, or question marks.

    Args:
        text: the text.
        error: print to standard error instead of standard output.
    Raises:
        OSError: the stream cannot be written, or standard output was closed before Python started.
    """
    stream = sys.stderr if error else sys.stdout
    if stream is None and error:
        return
    if stream is None:
        raise OSError(errno.EBADF, "is closed", "standard output")
    encoding = getattr(stream, "encoding", None) or "utf-8"
    text = shown(text)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_IN_ASCII).encode(encoding, "replace").decode(encoding)
    # A log that is followed, and a process that is killed, must show the last line.
    print(text, file=stream, flush=True)


def warn(warnings: Iterable[object]) -> None:
    """Print warnings to standard error."""
    for warning in warnings:
        say(f"warning: {warning}", error=True)


class CleanHandler(logging.Handler):
    """Logging handler that prints records to standard error with `say`."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one log record."""
        with suppress(OSError):
            say(self.format(record), error=True)


@contextmanager
def forgiving_output() -> Generator[None]:
    """Discard further output inside the block once a stream cannot be written: full disk, closed pipe."""
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w") as null:  # a stream is None if it was closed when Python started
        sys.stdout, sys.stderr = (cast("TextIO", _DroppingStream(stream or null)) for stream in before)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


class _DroppingStream:
    """Text stream that redirects its file descriptor to /dev/null after a failed write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            return self._drop(len(text))

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._drop(0)

    def _drop(self, count: int) -> int:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())  # the interpreter's flush at exit must succeed as well
        os.close(null)
        return count
