"""Atomic writes, safe reads and hashes of files."""

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
"""Name of the file with the hashes of a folder's other files, in the format of `sha256sum --check`."""

_MAX_SIZE = 2 << 30
"""Maximum size of a file's content in bytes."""
_ALWAYS_UNPACKED = 64 << 20
"""Bytes to which a compressed file may unpack, however small it is."""
_MAX_RATIO = 100
"""Maximum ratio of unpacked to compressed size beyond `_ALWAYS_UNPACKED`; rollouts never compress that well."""
_CHUNK = 1 << 20
"""Bytes of one read."""
_MAX_SUMS = 16 << 20
"""Maximum size of SHA256SUMS in bytes."""
NO_FILE_FIX = "check the path, which is relative to the working directory"


@contextmanager
def staged(path: Path, durable: bool = True) -> Generator[Path]:
    """Replace a file or folder atomically: yield a temporary path, and rename it to `path` at the end of the block.

    The block creates a file or folder at the temporary path, which is in the folder of `path`. Files get the
    permissions that the umask allows, even if a library created them with mode 0600. If the block raises, `path` is
    unchanged and the temporary path is deleted. A folder cannot be replaced in one rename: for a moment the old folder
    is named `path.old`, and a crash at that moment leaves it there.

    Args:
        path: the file or folder to create or replace.
        durable: flush the data to disk before the rename, and the rename itself. False is faster and suits data
            that can be created again after a power failure.
    """
    # In the same folder, because a rename is atomic only within one file system.
    stage = path.with_name(f".tmp-{path.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    old = path.with_name(f"{path.name}.old")
    try:
        yield stage
        _apply_umask(stage)
        if durable:
            sync(stage)
        is_folder = stage.is_dir()
        # A file must not replace a folder: then the last rename fails.
        if is_folder and path.is_dir() and not path.is_symlink():
            remove(old)
            path.rename(old)
        stage.replace(path)
        if is_folder:
            remove(old)
        if durable:
            sync(path.parent, deep=False)
    finally:
        remove(stage)


def _apply_umask(stage: Path) -> None:
    """Change the permissions of files that only their owner can read to those of a file created by `open`.

    The safetensors library creates files with mode 0600.
    """
    files = [path for path in (stage.rglob("*") if stage.is_dir() else [stage]) if path.is_file()]
    private = [path for path in files if not path.stat().st_mode & 0o077]
    if private:
        # os.umask can only read the umask by changing it for all threads, so take the mode of a new file.
        probe = stage.with_name(f"{stage.name}-umask")
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = stat.S_IMODE(probe.stat().st_mode)
        probe.unlink()
        for path in private:
            path.chmod(mode)


@contextmanager
def published(folder: Path) -> Generator[Path]:
    """Yield a temporary folder, and move its content into `folder` at the end of the block with a SHA256SUMS file.

    A `folder` that holds only files of an earlier publication is replaced as a whole. Otherwise files of the same name
    are replaced one by one, SHA256SUMS last, and all other files stay. If the block raises, `folder` is unchanged.
    SHA256SUMS does not list Markdown files, because people edit them; of these only README.md is replaced.

    Raises:
        StorageError: the folder cannot be written.
    """
    folder = folder.resolve()
    with writing(folder):
        ours = {folder / line.partition("  ")[2] for line in _sum_lines(folder)} | {folder / SUMS, folder / "README.md"}
        others = any(path not in ours and not path.is_dir() for path in folder.rglob("*"))
        folder.parent.mkdir(parents=True, exist_ok=True)
        with staged(folder.with_name(f"{folder.name}.new") if others else folder) as stage:
            stage.mkdir()
            yield stage
            files = sorted(path for path in stage.rglob("*") if path.is_file() and path.suffix != ".md")
            lines = [f"{sha256(file)}  {file.relative_to(stage).as_posix()}\n" for file in files if file.name != SUMS]
            (stage / SUMS).write_text("".join(lines), encoding="utf-8")
        if others:
            complete = folder.with_name(f"{folder.name}.new")
            files = (path for path in complete.rglob("*") if path.is_file())
            # SHA256SUMS last: until it is there, the old sums refuse the new files.
            for file in sorted(files, key=lambda path: path.name == SUMS):
                target = folder / file.relative_to(complete)
                target.parent.mkdir(parents=True, exist_ok=True)
                file.replace(target)
            remove(complete)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of a file atomically."""
    with staged(path) as stage:
        stage.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Replace the content of a file atomically, in UTF-8."""
    write_bytes(path, text.encode())


def sync(path: Path, deep: bool = True) -> None:
    """Flush a file, or a folder with everything in it, to disk.

    Args:
        path: the file or folder.
        deep: flush the content of a folder as well, not only its directory entries.
    """
    if deep and path.is_dir():
        for part in path.iterdir():
            sync(part)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def expanded(path: str | Path) -> Path:
    """Return a path with `~` replaced by the home directory; unchanged if there is no such user."""
    return Path(os.path.expanduser(path))


def no_file(path: str) -> str:
    """Return the reason why a file cannot be read; "" if it is readable and not empty."""
    path = os.path.expanduser(path)
    if not os.path.isfile(path):
        return f'"{path}" is a directory, not a file' if os.path.isdir(path) else f'there is no file "{path}"'
    if os.path.getsize(path) == 0:
        return f'the file "{path}" is empty'
    return "" if os.access(path, os.R_OK) else f'no permission to read the file "{path}"'


def plain_files(folder: Path, *, deep: bool = True) -> None:
    """Check that a folder holds only regular files and directories, without following links.

    Args:
        folder: the folder.
        deep: check its subdirectories as well.
    Raises:
        StorageError: an entry is a link or a special file.
    """
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
            kind = "a link, which may lead out of the run" if entry.is_symlink() else "not a regular file"
            raise StorageError(f"{entry.path} is {kind}; remove it, or replace it by a copy of the file")
        if deep and entry.is_dir():
            plain_files(Path(entry.path))


def remove(path: Path) -> None:
    """Delete a file or a folder, and ignore errors: another process may delete it at the same time."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


@contextmanager
def writing(path: Path, fix: str = "free some space, and check that its folder can be written") -> Generator[None]:
    """Convert errors of the file system inside the block, such as a full disk, into a StorageError.

    Args:
        path: the file or folder that the block writes, for the error.
        fix: advice for the error.
    """
    try:
        yield
    except Exception as error:
        # The Rust code of safetensors reports a full disk by its own exception, which is not an OSError.
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise StorageError(f"{path} cannot be written: {reason}; {fix}") from error


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file for reading, without following a link and without blocking on a named pipe.

    Raises:
        OSError: the file does not exist, cannot be read, or is a link, a pipe, a device or a directory.
    """
    try:
        # O_NONBLOCK: opening a named pipe would wait for a writer that never comes.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, and links are not followed", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_plain(path: Path, max_size: int = _MAX_SIZE) -> bytes:
    """Read a regular file, and decompress its content if its name ends in .gz.

    Args:
        path: the file.
        max_size: maximum size of the content in bytes.
    Raises:
        OSError: see `open_plain`; or the content is larger than `max_size`; or a compressed file unpacks to more than
            64 MiB and more than 100 times its size.
        EOFError, zlib.error: the compressed data is damaged.
    """
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        compressed = path.suffix == ".gz"
        limit = min(max_size, max(_ALWAYS_UNPACKED, _MAX_RATIO * size)) if compressed else max_size
        source: Any = gzip.GzipFile(fileobj=file) if compressed else file
        too_large = OSError(errno.EFBIG, f"it holds more than {limit >> 20:,} MB", str(path))
        if size > limit:
            raise too_large
        parts: list[bytes] = []
        length = 0
        while part := source.read(_CHUNK):
            parts.append(part)
            length += len(part)
            # The size above says nothing about unpacked data, or about a file that grows.
            if length > limit:
                raise too_large
        return b"".join(parts)


def sha256(path: Path) -> str:
    """Return the SHA-256 hash of a file's content, in hex."""
    with expanded(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sum_lines(folder: Path) -> list[str]:
    file = folder / SUMS
    return read_plain(file.resolve(), _MAX_SUMS).decode(errors="replace").splitlines() if file.is_file() else []


def check_sums(folder: Path, fix: str) -> None:
    """Verify a folder's files against its SHA256SUMS; a folder without that file is accepted.

    Args:
        folder: the folder.
        fix: how to get the files again, for the error.
    Raises:
        StorageError: a file is missing, is outside of the folder or has another hash. The error names the file.
    """
    fix = f"{fix}, or delete {folder / SUMS} if the change is yours"
    try:
        for line in _sum_lines(folder):
            digest, _, name = line.partition("  ")
            # Hashing a device such as /dev/zero would never end, so every name must be a file.
            if os.path.isabs(name) or ".." in Path(name).parts or not (folder / name).is_file():
                raise StorageError(f"{folder}: {SUMS} names {name!r}, which is not a file in this folder; {fix}")
            if sha256(folder / name) != digest:
                raise StorageError(f"{folder / name}: its SHA-256 hash differs from that in {SUMS}; {fix}")
    except (OSError, ValueError) as error:  # ValueError: the name has a null byte
        raise StorageError(f"{folder}: {SUMS} cannot be checked ({error}); {fix}") from error
