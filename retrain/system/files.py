"""Files that readers and a crash find old or new, never in part."""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from retrain.errors import StorageError

SUMS = "SHA256SUMS"
"""File of a folder with the hash of every other file, as `sha256sum --check` reads it."""

_MOST, _SMALL, _GROWTH, _CHUNK = 2 << 30, 64 << 20, 100, 1 << 20
NO_FILE_FIX = "check the path: it starts from the directory that the command is run in"


@contextmanager
def staged(path: Path, durable: bool = True) -> Generator[Path]:
    """A new name in the folder of `path`; the file or folder that the block makes there then replaces `path`.

    The files have the permissions that the umask allows, also those of libraries that write for their owner alone.
    If the block raises, `path` stays as it was and nothing else stays. A folder cannot be replaced in one rename: for
    a moment the old one has the name `path.old`, and a crash at that moment leaves it there.

    Args:
        durable: flush everything to disk before the rename, and the rename after it; False where what a power cut
            leaves is made again anyway.
    """
    stage = path.with_name(f".tmp-{path.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    old = path.with_name(f"{path.name}.old")
    try:
        yield stage
        _apply_umask(stage)
        if durable:
            sync(stage)
        if stage.is_dir() and path.is_dir() and not path.is_symlink():  # a file never takes the place of a folder
            remove(old)
            path.rename(old)
        stage.replace(path)
        remove(old)
        if durable:
            sync(path.parent, deep=False)
    finally:
        remove(stage)


def _apply_umask(stage: Path) -> None:
    """Give files that only their owner can read the permissions of a file that `open` makes; safetensors uses 0600."""
    files = [path for path in (stage.rglob("*") if stage.is_dir() else [stage]) if path.is_file()]
    private = [path for path in files if not path.stat().st_mode & 0o077]
    if private:
        # Asking for the umask means setting it, for all threads: a new file shows it.
        probe = stage.with_name(f"{stage.name}-umask")
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = stat.S_IMODE(probe.stat().st_mode)
        probe.unlink()
        for path in private:
            path.chmod(mode)


@contextmanager
def published(folder: Path) -> Generator[Path]:
    """A new folder whose files become those of `folder` when the block ends, with their hashes in SHA256SUMS.

    What else is in `folder` stays, and so does everything if the block raises; a folder that was published before
    and holds nothing else is replaced at once.

    Raises:
        StorageError: it cannot be written.
    """
    folder = folder.resolve()
    ours = {line.partition("  ")[2].partition("/")[0] for line in _sums(folder)} | {SUMS}
    others = folder.is_dir() and any(entry.name not in ours and entry.suffix != ".md" for entry in folder.iterdir())
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with staged(folder.with_name(f"{folder.name}.new") if others else folder) as stage:
            stage.mkdir()
            yield stage
            # Prose is left out: people edit it.
            files = sorted(path for path in stage.rglob("*") if path.is_file() and path.suffix != ".md")
            lines = [f"{sha256(file)}  {file.relative_to(stage).as_posix()}\n" for file in files if file.name != SUMS]
            (stage / SUMS).write_text("".join(lines), encoding="utf-8")
        if others:
            complete = folder.with_name(f"{folder.name}.new")
            for entry in sorted(complete.iterdir(), key=lambda entry: entry.name == SUMS):
                remove(folder / entry.name)
                entry.replace(folder / entry.name)
            remove(complete)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the file's content."""
    with staged(path) as stage:
        stage.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Replace the file's content, in UTF-8."""
    write_bytes(path, text.encode())


def sync(path: Path, deep: bool = True) -> None:
    """Have the disk hold a file, or a folder with all that is in it."""
    if deep and path.is_dir():
        for part in path.iterdir():
            sync(part)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def no_file(path: str) -> str:
    """Reason why a file cannot be read, in words; "" for a readable file."""
    if not os.path.isfile(path):
        return f'there is no file "{path}"'
    if os.path.getsize(path) == 0:
        return f'the file "{path}" is empty'
    return "" if os.access(path, os.R_OK) else f'the file "{path}" may not be read'


def plain_files(folder: Path, *, deep: bool = True) -> None:
    """StorageError if something in a folder is neither a regular file nor a directory; links are not followed.

    Args:
        deep: look into its directories as well.
    """
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
            kind = "a link, and may lead to what no run wrote" if entry.is_symlink() else "not a regular file"
            raise StorageError(f"{entry.path} is {kind}; remove it, or put a copy of the file there")
        if deep and entry.is_dir():
            plain_files(Path(entry.path))


def remove(path: Path) -> None:
    """Delete a file or a folder. Whoever else deletes it at the same time does no harm, nor does one that stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


@contextmanager
def writing(path: Path, fix: str = "free some space, and check that its folder can be written") -> Generator[None]:
    """Turn whatever keeps `path` from being written, a full disk above all, into a StorageError."""
    try:
        yield
    except Exception as error:
        # The Rust writer of safetensors reports a full disk as its own exception, which is not an OSError.
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise StorageError(f"{path} cannot be written: {reason}; {fix}") from error


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file to read it. A link is not followed, and nothing waits for the other end of a pipe.

    Raises:
        OSError: there is no file, it cannot be read, or it is a link, a pipe, a device or a directory.
    """
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, and links are not followed", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read_plain(path: Path) -> bytes:
    """The content of a regular file, unpacked if its name ends in .gz.

    Raises:
        OSError: as `open_plain`; or it holds more than 2 GB; or unpacking makes more than 64 MB of it, and more than a
            hundred times its size, which no rollouts do.
        EOFError, zlib.error: it is damaged.
    """
    with open_plain(path) as file:
        size, packed = os.fstat(file.fileno()).st_size, path.suffix == ".gz"
        most = min(_MOST, max(_SMALL, _GROWTH * size)) if packed else _MOST
        source: Any = gzip.GzipFile(fileobj=file) if packed else file
        parts, length = list[bytes](), 0
        while part := source.read(_CHUNK):
            parts.append(part)
            length += len(part)
            if length > most:
                raise OSError(errno.EFBIG, f"it holds more than {most >> 20:,} MB", str(path))
        return b"".join(parts)


def sha256(path: Path) -> str:
    """Hash of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sums(folder: Path) -> list[str]:
    file = folder / SUMS
    return file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []


def check_sums(folder: Path, fix: str) -> None:
    """Compare a folder's files with its hashes; a folder without any is taken as it is.

    Args:
        fix: how to get the files again, for the error.
    Raises:
        StorageError: a file is missing or differs; it names the file.
    """
    fix = f"{fix}, or delete {folder / SUMS} if the change is yours"
    try:
        for line in _sums(folder):
            digest, _, name = line.partition("  ")
            if not name or sha256(folder / name) != digest:
                raise StorageError(f"{folder / name}: its sha256 is not that of {SUMS}; {fix}")
    except (OSError, ValueError) as error:  # a name may hold anything
        raise StorageError(f"{folder}: {SUMS} cannot be checked ({error}); {fix}") from error
