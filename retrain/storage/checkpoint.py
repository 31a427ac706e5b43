"""Crash-safe checkpoints: staged, hashed, published by one rename, and never a pickle.

    checkpoints/step-000100/
        policy.safetensors   tensors of the state's top-level key "policy"
        policy.rank-00001.safetensors   rank 1's rows of those that are sharded over ranks
        state.json           everything that is not a tensor, with references to those that are
        manifest.json        size and sha256 of every other file; written last

A directory without a valid manifest is not a checkpoint. What the manifest does not list is not read.
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

FORMAT, SHARDED = 1, 2
"""Formats of checkpoints without and with sharded tensors."""
MANIFEST, STATE_FILE = "manifest.json", "state.json"
_STEP = re.compile(r"step-(\d{6,})(\.old)?")
_RANK = re.compile(r"\.rank-\d{5}(?=\.safetensors$)")
_STAGE = ".tmp-"
_QUARANTINE = "bad-"
_ROWS = "rows:"
"""Prefix of a tensor's name in state.json: the files of all ranks have rows of this tensor."""
_FIX = (
    "free some space or lower [checkpoint] keep, and check that the folder can be written; "
    "the previous checkpoints are intact"
)
_VANISHED = 100
"""Number of checkpoints deleted under a reader, one after the other, before it gives up."""


class _Entry(TypedDict):
    bytes: int
    sha256: str


class _Manifest(TypedDict):
    __pydantic_config__ = ConfigDict(strict=True)  # pyright: ignore[reportGeneralTypeIssues]
    format: int
    step: int
    files: dict[str, _Entry]


_MANIFEST: TypeAdapter[_Manifest] = TypeAdapter(_Manifest)


def save(root: Path, step: int, state: State, keep: int, ranks: Ranks = ALONE) -> Path:
    """Write `state` as the checkpoint of `step` and drop all but the newest `keep`.

    Until the rename the previous checkpoints are untouched; after it the new one is complete.

    Args:
        root: the run's `checkpoints/`; created if need be. One writer at a time (the run's lock).
        step: optimizer steps done.
        state: nested dicts, lists and tuples of JSON values and tensors, keyed by component. Key types,
            tuples, dtypes and tensors shared by several entries come back as they were.
        keep: how many checkpoints to keep, at least 1.
        ranks: all of them call this; each writes its rows of sharded tensors, and rank 0 the rest.

    Raises:
        StorageError: the disk is full or cannot be written; nothing of this save stays behind.
        UserCodeError: the state holds something that is neither a JSON value nor a tensor.
    """
    final = root / f"step-{step:06d}"

    def begin() -> Path:
        with writing(final, _FIX):
            root.mkdir(parents=True, exist_ok=True)
            # Only the owner of the run's lock saves, so whatever is staged here belongs to a save that was killed.
            for leftover in root.glob(f"{_STAGE}*"):
                remove(leftover)
            stage = publication.enter_context(staged(final))
            stage.mkdir()
            return stage

    def write() -> dict[str, _Entry]:
        with writing(final, _FIX):
            return _write(stage, state, ranks)

    def publish() -> None:
        with writing(final, _FIX):
            _write_manifest(stage, step, files)
            publication.close()
        # A replaced checkpoint (.old) is redundant now and must not count among those to keep.
        current = [path for path in every(root) if not path.name.endswith(".old")]
        for path in set(every(root)) - set(current[:keep]):
            _drop(path)

    with ExitStack() as publication:
        stage = ranks.on_rank0(begin)
        files = {name: entry for written in ranks.on_each_rank(write) for name, entry in written.items()}
        ranks.on_rank0(publish)
    return final


def newest(root: Path, log: Callable[[str], None], own: bool) -> tuple[Path, State] | None:
    """Return the newest valid checkpoint with its state, or None if no checkpoint was ever saved.

    `log` gets the reason and the file of every rejected checkpoint.

    Args:
        own: this process holds the run's lock and renames invalid checkpoints to `bad-step-...`.
            Other readers change nothing: a checkpoint deleted under them has a newer one, so they
            look again.
    Raises:
        StorageError: there are checkpoints, and none is valid; every reason is listed.
    """
    reasons: dict[str, str] = {}
    for _ in range(_VANISHED):
        path = next((path for path in every(root) if path.name not in reasons), None)
        if path is None:
            break
        try:
            return path, load(path)
        except StorageError as error:
            if not own and not path.exists():
                continue  # the owner deleted it while it was read here, so a newer one exists
            reasons[path.name] = str(error).removeprefix(f"checkpoint {root}/")
            log(f"{error}; falling back to the previous one")
            if own:  # Only the owner renames: a reader may be wrong, or lack the permission.
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
    """Delete checkpoints of later steps than `step`: the run that continues there may take another course."""
    for path in every(root):
        if step_of(path) > step:
            _drop(path)


def load(path: Path) -> State:
    """The state saved at `path`, tensors on the CPU, after verifying the hash of every file it reads.

    Those that were sharded are `CheckpointRows`: a rank reads the rows that it needs.

    Raises:
        StorageError: a file is missing, changed, not a plain file, or not listed in the manifest.
    """
    reason = problem(path)
    if reason is not None:
        raise StorageError(f"checkpoint {path}: {reason}")
    return read(path)


def read(path: Path) -> State:
    """The state saved at `path`, which has been verified."""
    from safetensors import SafetensorError

    try:
        document: dict[str, Any] = parse_json(read_plain(path / STATE_FILE))
        files = _manifest(path)["files"]
        return {
            key: _decode(value, _stored(path, [name for name in sorted(files) if _RANK.sub("", name) == _file(key)]))
            for key, value in document.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise StorageError(f"checkpoint {path}: {STATE_FILE} cannot be read: {error}") from error


def is_one(path: Path) -> bool:
    """Return whether `path` is a directory with the name of a checkpoint."""
    return path.is_dir() and _STEP.fullmatch(path.name) is not None


def step_of(path: Path) -> int:
    """Optimizer steps done at the checkpoint `.../step-000100`."""
    return int(path.stem.removeprefix("step-"))


def problem(path: Path) -> str | None:
    """Why the checkpoint at `path` is not valid, naming the file; None if it is."""
    if path.is_symlink() or not path.is_dir():  # a link can lead to files that no run wrote
        return "not a directory"
    try:
        manifest = _manifest(path)
        if manifest["format"] not in (FORMAT, SHARDED):
            return f"{MANIFEST}: format {manifest['format']!r} is not {FORMAT} or {SHARDED}"
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


def _file_problem(path: Path, name: str, entry: _Entry) -> str | None:
    file = path / name
    # A manifest may come from elsewhere: its names must not lead out of the directory.
    if Path(name).name != name or "\\" in name:
        return f"{name!r}: not a plain file name"
    if file.is_symlink() or not file.is_file():
        return f"{name}: " + ("not a plain file" if os.path.lexists(file) else "missing")
    size = file.stat().st_size
    if size != entry["bytes"]:  # Compare sizes first: truncation is the usual damage, and hashing takes long.
        return f"{name}: {size} bytes instead of {entry['bytes']}"
    return None if sha256(file) == entry["sha256"] else f"{name}: sha256 differs from the manifest"


def _manifest(path: Path) -> _Manifest:
    file = path / MANIFEST
    if file.is_symlink():
        raise ValueError("not a plain file")
    return checked(_MANIFEST, parse_json(read_plain(file)))


def _write(stage: Path, state: State, ranks: Ranks) -> dict[str, _Entry]:
    """Write this rank's share of the state; returns the files' entries of the manifest."""
    from safetensors.torch import save_file

    document: dict[str, Any] = {}
    written: list[Path] = []
    for key, value in state.items():
        tensors = _Tensors(may_be_sharded=ranks.mesh is not None)
        document[key] = _encode(value, key, tensors)
        for file, found in ((_file(key), {} if ranks.rank else tensors.by_name), (_file(key, ranks), tensors.rows)):
            if found:
                save_file(found, stage / file)
                written.append(stage / file)
    if ranks.rank == 0:
        (stage / STATE_FILE).write_text(json.dumps(document), encoding="utf-8")
        written.append(stage / STATE_FILE)
    else:
        for file in written:  # rank 0 flushes the folder, on its machine
            sync(file)
    return {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in written}


def _write_manifest(stage: Path, step: int, files: Mapping[str, _Entry]) -> None:
    kind = SHARDED if any(_RANK.search(name) for name in files) else FORMAT
    # Written last: wherever a kill ends this, a directory without a manifest is not a checkpoint.
    manifest = {"format": kind, "step": step, "files": dict(sorted(files.items()))}
    (stage / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def _stored(path: Path, names: list[str]) -> dict[str, Tensor | CheckpointRows]:
    """The tensors of one component's files; those that were sharded as `CheckpointRows`."""
    from safetensors.torch import load_file

    ranks = [load_file(path / name) for name in names if _RANK.search(name)]
    whole = {key: value for name in names if not _RANK.search(name) for key, value in load_file(path / name).items()}
    return whole | {
        f"{_ROWS}{key}": CheckpointRows([rows[key] for rows in ranks]) for key in (ranks[0] if ranks else ())
    }


def _drop(path: Path) -> None:
    """Delete a checkpoint atomically for readers; the next save deletes any leftovers."""
    with suppress(OSError):
        remove(path.rename(path.with_name(f"{_STAGE}{path.name}-dropped-{os.getpid()}")))


def every(root: Path) -> list[Path]:
    """All checkpoints of a run, valid or not: newest first; a replaced one after the one that replaced it."""
    found = ((match, path) for path in root.glob("step-*") if (match := _STEP.fullmatch(path.name)))
    return [path for _, path in sorted(found, key=lambda item: (-int(item[0][1]), item[0][2] or ""))]


def _quarantine(path: Path) -> None:
    target = path.with_name(_QUARANTINE + path.name)
    number = 2
    while target.exists():
        target, number = path.with_name(f"{_QUARANTINE}{path.name}-{number}"), number + 1
    with suppress(OSError):
        path.rename(target)


def _file(key: str, ranks: Ranks | None = None) -> str:
    return f"{quote(key, safe='')}{f'.rank-{ranks.rank:05d}' if ranks else ''}.safetensors"


class _Tensors:
    """Tensors of one component under unique names; entries that are the same memory are stored once.

    Attributes:
        by_name: tensors that every rank has whole. rows: this rank's rows of those that are sharded.
    """

    def __init__(self, may_be_sharded: bool) -> None:
        self._may_be_sharded = may_be_sharded
        self.by_name: dict[str, Tensor] = {}
        self.rows: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._storages: set[int] = set()

    def add(self, tensor: Tensor, where: str) -> str:
        """The name under which `tensor` is stored; that of an earlier entry if it is the same memory."""
        found, kind = self.by_name, ""
        if self._may_be_sharded:
            from retrain.training.shards import is_sharded, local

            if is_sharded(tensor):
                found, kind, tensor = self.rows, _ROWS, local(tensor)
        same = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and same in self._names:
            return self._names[same]
        name, number = where, 2
        # Two places may have one name: keys can hold dots, and 1 and "1" differ.
        while name in found:
            name, number = f"{where}~{number}", number + 1
        own = tensor.detach().cpu().contiguous()
        storage = own.untyped_storage()
        # safetensors refuses memory that two entries share: a view is copied.
        if storage.nbytes() != own.nbytes or storage.data_ptr() in self._storages:
            own = own.clone()
        self._storages.add(own.untyped_storage().data_ptr())
        found[name], self._names[same] = own, kind + name
        return kind + name


def _encode(value: Any, where: str, tensors: _Tensors) -> Any:
    """Encode `value` as JSON; other types become an object with one key, `$dict`, `$tuple` or `$tensor`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        items: list[tuple[Any, Any]] = list(value.items())
        encoded = [(key, _encode(item, f"{where}.{key}", tensors)) for key, item in items]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return dict(encoded)
        return {"$dict": [[_encode(key, where, tensors), item] for key, item in encoded]}
    if isinstance(value, list | tuple):
        sequence: list[Any] = [_encode(item, f"{where}.{index}", tensors) for index, item in enumerate(value)]
        return sequence if isinstance(value, list) else {"$tuple": sequence}
    if hasattr(value, "untyped_storage"):
        return {"$tensor": tensors.add(value, where)}
    raise UserCodeError(
        f"state {where} is a {type(value).__name__}, which a checkpoint cannot hold; "
        "let state_dict() return dicts, lists, tuples, numbers, strings and tensors"
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
        return {_decode(key, tensors): _decode(item, tensors) for key, item in value["$dict"]}
    return {key: _decode(item, tensors) for key, item in value.items()}
