"""Crash-safe checkpoints without pickles: written to a temporary directory, hashed, and published by one rename.

    checkpoints/step-000100/
        policy.safetensors   tensors of the state's top-level key "policy"
        policy.rank-00001.safetensors   rank 1's rows of the tensors that are sharded over ranks
        state.json           everything except tensors, with references to the tensors
        manifest.json        size and SHA-256 hash of every other file; written last

A directory without a valid manifest is not a checkpoint. Files that the manifest does not list are never read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pydantic import ConfigDict, TypeAdapter
from typing_extensions import TypedDict

from retrain.errors import StorageError, UserCodeError
from retrain.protocols import ALONE, CheckpointRows, Ranks
from retrain.system.files import read_plain, remove, sha256, staged, sync, writing
from retrain.system.records import checked, parse_json
from retrain.types import State

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
SHARDED = 2
"""Format numbers of checkpoints without and with sharded tensors."""
MANIFEST = "manifest.json"
STATE_FILE = "state.json"
_STEP = re.compile(r"step-(\d{6,})(\.old)?")
_RANK = re.compile(r"\.rank-\d{5}(?=\.safetensors$)")
_TEMPORARY = ".tmp-"
_QUARANTINE = "bad-"
_ROWS = "rows:"
"""Prefix of the name of a sharded tensor in state.json. The rows of this tensor are in the files of all ranks."""
_FIX = (
    "free some space or lower [checkpoint] keep, and check that the folder can be written; "
    "the previous checkpoints are intact"
)
_MAX_RETRIES = 100
"""Number of checkpoints in a row that are rejected, or deleted while they are read, before a reader gives up."""


class _FileEntry(TypedDict):
    bytes: int
    sha256: str


class _Manifest(TypedDict):
    __pydantic_config__ = ConfigDict(strict=True)  # pyright: ignore[reportGeneralTypeIssues]
    format: int
    step: int
    files: dict[str, _FileEntry]


_MANIFEST_SCHEMA: TypeAdapter[_Manifest] = TypeAdapter(_Manifest)


def save(root: Path, step: int, state: State, keep: int, ranks: Ranks = ALONE) -> Path:
    """Write `state` as the checkpoint of `step`, and delete all but the newest `keep` checkpoints.

    Previous checkpoints are unchanged until the rename that publishes the new one, which is complete by then.

    Args:
        root: the run's `checkpoints/`; created if it does not exist. Only the owner of the run's lock may write.
        step: number of completed optimizer steps.
        state: nested dicts, lists and tuples of JSON values and tensors, keyed by component. Loading restores key
            types, tuples, dtypes, and the identity of tensors that several entries share.
        keep: number of checkpoints to keep, at least 1.
        ranks: the process group. All ranks call this function; each writes its rows of sharded tensors, and rank 0
            writes the rest.

    Returns:
        The path of the checkpoint.

    Raises:
        StorageError: the disk is full or cannot be written. No file of this checkpoint is left behind.
        UserCodeError: the state has a value that is neither a JSON value nor a tensor.
    """
    final = root / f"step-{step:06d}"

    def begin() -> Path:
        with writing(final, _FIX):
            root.mkdir(parents=True, exist_ok=True)
            # Only the owner of the run's lock saves, so existing temporary folders are left from a killed process.
            for leftover in root.glob(f"{_TEMPORARY}*"):
                remove(leftover)
            stage = publication.enter_context(staged(final))
            stage.mkdir()
            return stage

    def write() -> dict[str, _FileEntry]:
        with writing(final, _FIX):
            return _write(stage, state, ranks)

    def publish() -> None:
        with writing(final, _FIX):
            kind = SHARDED if any(_RANK.search(name) for name in files) else FORMAT
            manifest = {"format": kind, "step": step, "files": dict(sorted(files.items()))}
            # Written last, so that a directory left by a killed process has no manifest and is not a checkpoint.
            (stage / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
            publication.close()
        # A replaced checkpoint (.old) is redundant now and must not count toward `keep`.
        current = [path for path in every(root) if not path.name.endswith(".old")]
        for path in set(every(root)) - set(current[:keep]):
            _drop(path)

    with ExitStack() as publication:
        stage = ranks.on_rank0(begin)
        files = {name: entry for written in ranks.on_each_rank(write) for name, entry in written.items()}
        ranks.on_rank0(publish)
    return final


def newest(root: Path, log: Callable[[str], None], holds_lock: bool) -> tuple[Path, State] | None:
    """Return the newest valid checkpoint with its state, or None if no checkpoint was ever saved.

    Args:
        root: the run's `checkpoints/`.
        log: called with the file and the reason of every rejected checkpoint.
        holds_lock: this process holds the run's lock, and renames invalid checkpoints to `bad-step-...`. Others
            change nothing. If a checkpoint is deleted while they read it, a newer one exists, so they retry.
    Raises:
        StorageError: there are checkpoints, but all of them are invalid. The error lists every reason.
    """
    reasons: dict[str, str] = {}
    for _ in range(_MAX_RETRIES):
        path = next((path for path in every(root) if path.name not in reasons), None)
        if path is None:
            break
        try:
            return path, load(path)
        except StorageError as error:
            if not holds_lock and not path.exists():
                continue  # the owner has deleted it meanwhile, so a newer one exists
            reasons[path.name] = str(error).removeprefix(f"checkpoint {root}/")
            log(f"{error}; falling back to the previous one")
            # Another reader may lack the permission, or may have read a checkpoint that is being deleted.
            if holds_lock:
                _quarantine(path)
    if not reasons:
        rejected = sorted(root.glob(f"{_QUARANTINE}step-*"))
        reasons = {path.name: f"{path.name}: {problem(path) or 'was rejected before'}" for path in rejected}
    if reasons:
        listing = "\n  ".join(reasons.values())
        raise StorageError(
            f"no valid checkpoint in {root}:\n  {listing}\n"
            "restore one of them from a copy, or start again with --fresh (which deletes them)"
        )
    return None


def drop_after(root: Path, step: int) -> None:
    """Delete the checkpoints of steps after `step`, because a run resumed from there may diverge from them."""
    for path in every(root):
        if step_of(path) > step:
            _drop(path)


def load(path: Path) -> State:
    """Verify the hash of every file of a checkpoint, and return its state with tensors on the CPU.

    Sharded tensors are returned as `CheckpointRows`, from which a rank reads the rows that it needs.

    Raises:
        StorageError: a file is missing, changed, not a regular file, or not listed in the manifest.
    """
    reason = problem(path)
    if reason is not None:
        raise StorageError(f"checkpoint {path}: {reason}")
    return read(path)


def read(path: Path) -> State:
    """Return the state of a checkpoint that was verified before; see `load`.

    Raises:
        StorageError: the state cannot be read.
    """
    from safetensors import SafetensorError

    try:
        document: dict[str, Any] = parse_json(read_plain(path / STATE_FILE))
        files = _manifest(path)["files"]
        return {
            key: _decode(
                value, _load_tensors(path, [name for name in sorted(files) if _RANK.sub("", name) == _file_name(key)])
            )
            for key, value in document.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise StorageError(f"checkpoint {path}: {STATE_FILE} cannot be read: {error}") from error


def is_one(path: Path) -> bool:
    """Return whether `path` is a directory with the name of a checkpoint."""
    return path.is_dir() and _STEP.fullmatch(path.name) is not None


def step_of(path: Path) -> int:
    """Return the number of completed optimizer steps from the path of a checkpoint, such as `.../step-000100`."""
    return int(path.stem.removeprefix("step-"))


def problem(path: Path) -> str | None:
    """Return the file and the reason why the checkpoint at `path` is invalid; None if it is valid."""
    if path.is_symlink() or not path.is_dir():  # a link may lead out of the run
        return "not a directory"
    try:
        manifest = _manifest(path)
        # A later version may have changed what the entries mean.
        if manifest["format"] not in (FORMAT, SHARDED):
            return f"{MANIFEST}: format {manifest['format']!r} is not {FORMAT} or {SHARDED}"
        # A folder that was renamed by hand would resume at a step that it does not hold.
        expected = _STEP.fullmatch(path.name.removeprefix(_QUARANTINE))
        if expected is not None and manifest["step"] != int(expected[1]):
            return f"{MANIFEST}: written for step {manifest['step']!r}"
        files = manifest["files"]
        if STATE_FILE not in files:
            return f"{MANIFEST}: does not list {STATE_FILE}"
        reasons = (_file_problem(path, name, entry) for name, entry in files.items())
        return next((reason for reason in reasons if reason is not None), None)
    except (OSError, ValueError) as error:
        return f"{MANIFEST}: {error}"


def _file_problem(path: Path, name: str, entry: _FileEntry) -> str | None:
    file = path / name
    # The manifest is untrusted: the names in it must not lead out of the directory.
    if Path(name).name != name or "\\" in name:
        return f"{name!r}: not a plain file name"
    if file.is_symlink() or not file.is_file():
        return f"{name}: " + ("not a plain file" if os.path.lexists(file) else "missing")
    size = file.stat().st_size
    if size != entry["bytes"]:  # compared first, because truncation is the usual damage and hashing is slow
        return f"{name}: {size} bytes instead of {entry['bytes']}"
    return None if sha256(file) == entry["sha256"] else f"{name}: sha256 differs from the manifest"


def _manifest(path: Path) -> _Manifest:
    file = path / MANIFEST
    if file.is_symlink():
        raise ValueError("not a plain file")
    return checked(_MANIFEST_SCHEMA, parse_json(read_plain(file)))


def _write(stage: Path, state: State, ranks: Ranks) -> dict[str, _FileEntry]:
    """Write this rank's part of the state; return the entries of its files for the manifest."""
    from safetensors.torch import save_file

    document: dict[str, Any] = {}
    written: list[Path] = []
    for key, value in state.items():
        tensors = _Tensors(may_be_sharded=ranks.mesh is not None)
        document[key] = _encode(value, key, tensors)
        whole = {} if ranks.rank else tensors.by_name
        for file, stored in ((_file_name(key), whole), (_file_name(key, ranks), tensors.rows)):
            if stored:
                save_file(stored, stage / file)
                written.append(stage / file)
    if ranks.rank == 0:
        (stage / STATE_FILE).write_text(json.dumps(document), encoding="utf-8")
        written.append(stage / STATE_FILE)
    else:
        for file in written:  # rank 0 flushes the folder, but only on its own machine
            sync(file)
    return {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in written}


def _load_tensors(path: Path, names: list[str]) -> dict[str, Tensor | CheckpointRows]:
    """Load the tensors of one component from its files; sharded ones as `CheckpointRows`."""
    from safetensors.torch import load_file

    ranks = [load_file(path / name) for name in names if _RANK.search(name)]
    whole = {key: value for name in names if not _RANK.search(name) for key, value in load_file(path / name).items()}
    return whole | {
        f"{_ROWS}{key}": CheckpointRows([rows[key] for rows in ranks]) for key in (ranks[0] if ranks else ())
    }


def _drop(path: Path) -> None:
    """Rename a checkpoint, so that it vanishes atomically for readers, and delete it. `save` deletes leftovers."""
    with suppress(OSError):
        remove(path.rename(path.with_name(f"{_TEMPORARY}{path.name}-dropped-{os.getpid()}")))


def every(root: Path) -> list[Path]:
    """Return all valid and invalid checkpoints, newest first; a replaced one (.old) follows its replacement."""
    numbered = ((match, path) for path in root.glob("step-*") if (match := _STEP.fullmatch(path.name)))
    return [path for _, path in sorted(numbered, key=lambda item: (-int(item[0][1]), item[0][2] or ""))]


def _quarantine(path: Path) -> None:
    target = path.with_name(_QUARANTINE + path.name)
    number = 2
    while target.exists():
        target, number = path.with_name(f"{_QUARANTINE}{path.name}-{number}"), number + 1
    with suppress(OSError):
        path.rename(target)


def _file_name(key: str, ranks: Ranks | None = None) -> str:
    return f"{quote(key, safe='')}{f'.rank-{ranks.rank:05d}' if ranks else ''}.safetensors"


class _Tensors:
    """Tensors of one component under unique names. Entries that share the same memory are stored once.

    Args:
        may_be_sharded: tensors may be sharded over ranks.
    Attributes:
        by_name: tensors that are not sharded.
        rows: this rank's rows of sharded tensors.
    """

    def __init__(self, may_be_sharded: bool) -> None:
        self._may_be_sharded = may_be_sharded
        self.by_name: dict[str, Tensor] = {}
        self.rows: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._storages: set[int] = set()

    def add(self, tensor: Tensor, where: str) -> str:
        """Add a tensor, and return the name under which it is stored.

        If an earlier entry is the same memory, return its name.

        Args:
            tensor: the tensor.
            where: dotted path in the state, from which the name is derived.
        """
        stored = self.by_name
        prefix = ""
        if self._may_be_sharded:
            from retrain.training.distributed.sharded_tensors import is_sharded, local

            if is_sharded(tensor):
                stored, prefix, tensor = self.rows, _ROWS, local(tensor)
        identity = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        # All empty tensors may have the same address, and are not one tensor.
        if tensor.numel() and identity in self._names:
            return self._names[identity]
        name = where
        number = 2
        # Two entries may have the same path, because keys can contain dots, and 1 and "1" are different keys.
        while name in stored:
            name, number = f"{where}~{number}", number + 1
        copied = tensor.detach().cpu().contiguous()
        storage = copied.untyped_storage()
        # safetensors rejects tensors that share memory, so views are copied.
        if storage.nbytes() != copied.nbytes or storage.data_ptr() in self._storages:
            copied = copied.clone()
        self._storages.add(copied.untyped_storage().data_ptr())
        stored[name] = copied
        self._names[identity] = prefix + name
        return prefix + name


def _encode(value: Any, where: str, tensors: _Tensors) -> Any:
    """Encode a value as JSON. Types that JSON lacks become an object with one key, `$dict`, `$tuple` or `$tensor`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        items: list[tuple[Any, Any]] = list(value.items())
        encoded = [(key, _encode(item, f"{where}.{key}", tensors)) for key, item in items]
        # JSON turns other keys into strings, and a key "$tensor" would be read as a tensor.
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return dict(encoded)
        return {"$dict": [[_encode(key, where, tensors), item] for key, item in encoded]}
    if isinstance(value, list | tuple):
        sequence: list[Any] = [_encode(item, f"{where}.{index}", tensors) for index, item in enumerate(value)]
        return sequence if isinstance(value, list) else {"$tuple": sequence}
    if hasattr(value, "untyped_storage"):
        return {"$tensor": tensors.add(value, where)}
    raise UserCodeError(
        f"state {where} is a {type(value).__name__}, which a checkpoint cannot store; "
        "return only dicts, lists, tuples, numbers, strings, None and tensors from state_dict()"
    )


def _decode(value: Any, tensors: Mapping[str, Tensor | CheckpointRows]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$tuple" in value:
        return tuple(_decode(item, tensors) for item in value["$tuple"])
    if "$dict" in value:
        # An optimizer's state has integers as keys, which must stay integers.
        return {_decode(key, tensors): _decode(item, tensors) for key, item in value["$dict"]}
    return {key: _decode(item, tensors) for key, item in value.items()}
