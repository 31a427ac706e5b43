"""Safe printing: masks secrets and control characters; a failing output does not end a run."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from retrain.system.masking import masked


def clean(text: str) -> str:
    """Text of models, rewards and exceptions without control: what is not printable, escapes included, is a dot."""
    return "".join(char if char.isprintable() or char == "\n" else " " if char == "\t" else "·" for char in text)


def shown(text: str) -> str:
    """Text as it may stand in a terminal: without secrets and controls."""
    return clean(masked(text))


def say(text: str, error: bool = False) -> None:
    """Print text without secrets and controls; what the output's encoding lacks becomes a question mark."""
    stream = sys.stderr if error else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(shown(text).encode(encoding, "replace").decode(encoding), file=stream, flush=True)


class CleanHandler(logging.Handler):
    """Says log records to standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Say one record."""
        with suppress(OSError):
            say(self.format(record), error=True)


@contextmanager
def forgiving_output() -> Generator[None]:
    """Inside the block, an output that cannot be written any more, on a full disk or in a closed pipe, is dropped."""
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w") as nowhere:  # a stream that was closed from the start is None
        sys.stdout, sys.stderr = (cast("TextIO", _Forgiving(stream or nowhere)) for stream in before)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


class _Forgiving:
    """A text stream that sends the rest of its text nowhere once it cannot be written."""

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
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())  # so that the interpreter's last flush succeeds as well
        os.close(nowhere)
        return count
