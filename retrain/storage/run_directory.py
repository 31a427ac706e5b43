"""Run directory: its lock, its files, and how a resumed run continues them.

runs/NAME/
    config.toml  config.resolved.json                     configuration as written, and with all defaults
    environment.json                                      versions and hardware
    metrics.jsonl  eval.jsonl                             one row per step, one per evaluation
    rollouts/step-000010.jsonl.gz                         completions of a step with their advantages
    eval/step-000010.jsonl.gz                             completions of an evaluation
    checkpoints/step-000100/                              see retrain.storage.checkpoint
    best/step-000080/                                     checkpoint with the best evaluation, if configured
    model/                                                final weights in the format of transformers
    report.html  samples.html  status.json  lock  run_id
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import wraps
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

from retrain.errors import ConfigError, DivergedError, Preempted, RetrainError, StorageError
from retrain.protocols import ALONE, Ranks
from retrain.storage import checkpoint
from retrain.storage.run_files import parse_row, read_rows
from retrain.system.files import plain_files, remove, sync, write_bytes, write_text, writing
from retrain.system.lock import Lock
from retrain.system.masking import masked
from retrain.system.records import read_json
from retrain.types import Observer, State

if TYPE_CHECKING:
    from retrain.config.schema import Checkpoint

P = ParamSpec("P")
T = TypeVar("T")
ExistingRun = Literal["new", "resume", "auto", "fresh"]
"""Treatment of an existing run: "new" refuses it, "resume" requires it, "auto" continues it if there is one, "fresh"
deletes it."""

CONFIG = "config.resolved.json"
_RECORDS = ("config.toml", CONFIG, "environment.json", "metrics.jsonl", "eval.jsonl", "run_id")
_PAGES_AND_LOGS = ("report.html", "samples.html", "rewards.log", "environment.log")
_FOLDERS = ("rollouts", "eval", "checkpoints", "best", "model", "tensorboard")
_FACTS = ("findings", "looked_at")
"""Entries of status.json that a continued run starts with."""
_ROLLOUT_FILE = re.compile(r"[a-z]+-(\d{6,})\.jsonl\.gz")
_EVALUATION_FILE = re.compile(r"step-(\d{6,})(\..+)?\.jsonl\.gz")


def _on_rank0(method: Callable[Concatenate[RunDirectory, P], T]) -> Callable[Concatenate[RunDirectory, P], T]:
    """Decorate a method so that only rank 0 runs it. Every rank gets its result or its exception."""

    @wraps(method)
    def call(self: RunDirectory, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.ranks.on_rank0(lambda: method(self, *args, **kwargs))

    return call


class RunDirectory:
    """Context manager that owns a run directory.

    Entering it creates the directory and takes its lock, before anything expensive is loaded. Leaving it writes the
    outcome of the run to status.json and releases the lock.

    Of several ranks, rank 0 writes the files. All ranks write and read checkpoints, so the directory must be shared.

    Args:
        path: `runs/NAME`.
        mode: treatment of an existing run.
        settings: `[checkpoint]`: the number of checkpoints to keep, and what happens if saving one fails.
        observe: called with a "message" for every rejected checkpoint and every checkpoint that cannot be saved.
        ranks: the processes that save checkpoints together.

    Attributes:
        restored: path of the checkpoint from which the run continues; None if it starts from zero.
        stop_reason: reason why the run ends before its last step; "" if it does not.
        facts: further entries of status.json, with those of the run that is continued; see `write_facts`.

    Raises:
        ConfigError: on entry: the mode does not allow the existing run, there is none to resume, or another process
            owns it.
        StorageError: the directory cannot be written, or an entry of it is a link.
    """

    restored: Path | None = None
    stop_reason: str = ""

    def __init__(
        self, path: Path, mode: ExistingRun, settings: Checkpoint, observe: Observer, ranks: Ranks = ALONE
    ) -> None:
        self.path = path
        self.mode = mode
        self.ranks = ranks
        self.checkpoints = path / "checkpoints"
        self._settings = settings
        self._observe = observe
        self._lock = Lock(path / "lock")
        self._earlier_status: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self._started: State = {}

    def __enter__(self) -> RunDirectory:
        self._open()
        return self

    @_on_rank0
    def _open(self) -> None:
        if self.path.name in ("", ".."):
            raise ConfigError.at(self.path, "run directory", "is not the name of a directory")
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            # The lock comes first, because two runs that start at once would otherwise both find the directory empty.
            self._lock.acquire()
            try:
                self._prepare_existing()
                self._earlier_status = {} if self.mode == "fresh" else self._stored_status()
                self.facts = {name: self._earlier_status[name] for name in _FACTS if name in self._earlier_status}
                self._write_status({"outcome": "running"} | self.facts)
            except BaseException:
                self._lock.release()
                raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.ranks.rank:
            return
        status: dict[str, Any] = {"outcome": _outcome(error)} | self.facts
        if error is None and self.stop_reason:
            status["stopped"] = self.stop_reason
        if isinstance(error, RetrainError):
            status |= {"exit_code": error.exit_code, "error": str(error).split("\n")[0]}
        if self._earlier_status and (isinstance(error, ConfigError) or self._is_complete):
            status = self._earlier_status  # a resume that was refused or had nothing to do keeps the earlier outcome
        # If the run itself has failed, its error is more useful than a second one about status.json.
        with writing(self.path) if error is None else suppress(OSError):
            self._write_status(status)
            self._lock.release()

    def write_facts(self, facts: dict[str, Any]) -> None:
        """Write further entries to the status.json of the run in progress and of its end. Only rank 0 may call this."""
        self.facts = facts
        with writing(self.path):
            self._write_status({"outcome": "running"} | facts)

    def _prepare_existing(self) -> None:
        """Refuse or delete an existing run, depending on the mode."""
        if self.mode == "fresh":
            for name in (*_RECORDS, *_PAGES_AND_LOGS, *_FOLDERS):
                remove(self.path / name)
        plain_files(self.path, deep=False)  # through a link, files outside the directory would be written or deleted
        existing = self._holds_run()
        if existing and self.mode == "new":
            state = "a finished" if self._stored_status().get("outcome") == "finished" else "an unfinished"
            raise ConfigError.at(
                self.path, "run directory", f"holds {state} run", "--resume auto, --fresh, or another name"
            )
        if not existing and self.mode == "resume":
            raise ConfigError.at(
                self.path, "run directory", "holds no run to resume", "leave out --resume, or check the name"
            )

    def _holds_run(self) -> bool:
        return any((self.path / name).exists() for name in (CONFIG, "metrics.jsonl", "checkpoints"))

    def _stored_status(self) -> dict[str, Any]:
        """Read status.json. Return {} if it cannot be read, because the caller replaces it."""
        with suppress(StorageError):
            return read_json(self.path / "status.json")
        return {}

    @property
    def resuming(self) -> bool:
        """Return whether the mode allows resuming and there is a checkpoint."""
        return self.mode in ("resume", "auto") and self.checkpoints.is_dir() and any(self.checkpoints.iterdir())

    @property
    def _is_complete(self) -> bool:
        return (
            self.mode in ("resume", "auto") and not self.resuming and self._earlier_status.get("outcome") == "finished"
        )

    @_on_rank0
    def complete(self) -> bool:
        """Return whether the run to resume has finished and its checkpoints are deleted, so that no step is left."""
        return self._is_complete

    @_on_rank0
    def write_config(self, source: str, started: Mapping[str, Any]) -> None:
        """Write the configuration as TOML and in resolved form.

        Args:
            source: the configuration as the user wrote it.
            started: "config", the resolved configuration, and "plugins", the hashes of the user's modules. Every
                checkpoint stores both, with secrets masked.
        """
        self._started = {"started_with": {**started, "config": masked(started["config"])}}
        with writing(self.path):
            write_text(self.path / "config.toml", source)
            write_text(self.path / CONFIG, json.dumps(started["config"], indent=2) + "\n")

    @_on_rank0
    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Write environment.json, which records versions and hardware."""
        with writing(self.path):
            write_text(self.path / "environment.json", json.dumps(environment, indent=2) + "\n")

    @_on_rank0
    def previous_config(self, path: Path | None = None) -> dict[str, Any]:
        """Return config.resolved.json of the run that is continued.

        The dict is empty if no run is continued, or if the file is missing or unreadable. The checkpoint stores the
        configuration as well.

        Args:
            path: a checkpoint whose run is continued; None continues the run in this directory.
        Raises:
            ConfigError: `path` is a checkpoint of another run, and this directory already holds a run.
        """
        if path is None and not self.resuming and not self._is_complete:
            return {}
        run = self.path.resolve() if path is None else path.resolve().parent.parent
        if run != self.path.resolve() and self._holds_run():
            problem, fix = f"holds a run already, and {path} belongs to another", "choose another name for the new run"
            raise ConfigError.at(self.path, "run directory", problem, fix)
        with suppress(StorageError):
            return read_json(run / CONFIG)
        return {}

    def restore(self, path: Path | None = None, accept: Callable[[State], None] = lambda _: None) -> State | None:
        """Load a checkpoint, and delete all rows, rollouts and checkpoints of later steps.

        The resumed run writes the later steps again, so its files become equal to those of a run that was never
        interrupted. Nothing is deleted before the checkpoint was verified and accepted.

        Args:
            path: the checkpoint; None selects the newest valid one, if the mode allows resuming.
            accept: called with the state; raises an exception to reject it.
        Returns:
            The state, or None if the run starts from zero.
        Raises:
            StorageError: `path` is invalid; or there are checkpoints, but all of them are invalid.
        """
        state = self.ranks.only_on_rank0(lambda: self._restore(path, accept))
        self.restored = self.ranks.broadcast(self.restored)
        if self.ranks.rank and self.restored is not None:
            return checkpoint.read(self.restored)  # rank 0 has verified it
        return state

    def _restore(self, path: Path | None, accept: Callable[[State], None]) -> State | None:
        loaded = (path, checkpoint.load(path)) if path else None
        if loaded is None and self.resuming:
            loaded = checkpoint.newest(self.checkpoints, self._warn, holds_lock=True)
        self.restored = loaded[0] if loaded else None
        done = checkpoint.step_of(loaded[0]) if loaded else 0
        state = loaded[1] if loaded else None
        if state is not None:
            # Before anything is deleted: a refused state leaves the run as it was.
            accept(state)
        elif (self.path / "metrics.jsonl").exists():
            self._warn("no checkpoint to resume from: starting from step 0")
        with writing(self.path):
            self._rewind(done)
            for root in (self.checkpoints, self.path / "best"):
                checkpoint.drop_after(root, done)
        return state

    def _rewind(self, done: int) -> None:
        """Delete the rows and files of steps >= `done` and of evaluations > `done`; everything if `done` is 0."""
        _keep_rows(self.path / "metrics.jsonl", range(done))
        # The evaluation after `done` steps was made before the checkpoint of that step was saved.
        _keep_rows(self.path / "eval.jsonl", range(done + 1 if done else 0))
        for pattern, folder, steps in (
            (_ROLLOUT_FILE, "rollouts", range(done)),
            (_EVALUATION_FILE, "eval", range(done + 1 if done else 0)),
        ):
            for file in self.path.glob(f"{folder}/*"):
                match = pattern.fullmatch(file.name)
                if match is None or int(match[1]) not in steps:
                    file.unlink()

    @_on_rank0
    def drop_model(self) -> None:
        """Delete the final model of an earlier end of the run, from which further steps lead away."""
        remove(self.path / "model")

    @_on_rank0
    def append(self, name: Literal["metrics.jsonl", "eval.jsonl"], row: Mapping[str, Any]) -> None:
        """Append a row to metrics.jsonl or eval.jsonl."""
        # Not flushed to disk here: saving a checkpoint does it, and a resumed run rewrites all later rows.
        with writing(self.path / name), (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    @_on_rank0
    def write_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]], name: str = "step") -> Path:
        """Write rollouts/NAME-STEP.jsonl.gz and return its path. Equal rows give equal bytes."""
        return _write_compressed(self.path / "rollouts" / f"{name}-{step:06d}.jsonl.gz", rows)

    @_on_rank0
    def write_evaluation(self, step: int, name: str, rows: Iterable[Mapping[str, Any]]) -> Path:
        """Write eval/step-STEP.jsonl.gz, or eval/step-STEP.NAME.jsonl.gz for a named set, and return its path."""
        return write_evaluation(self.path, step, name, rows)

    @_on_rank0
    def is_best(self, key: str, done: int) -> bool:
        """Return whether metric `key` of the evaluation after `done` steps exceeds that of the best checkpoint."""
        # From the file, so that a resumed run compares with the same values as an uninterrupted one.
        values = {row["step"]: row.get(key, -inf) for row in read_rows(self.path / "eval.jsonl")}
        kept = [values.get(checkpoint.step_of(path), -inf) for path in checkpoint.every(self.path / "best")]
        return values.get(done, -inf) > max(kept, default=-inf)

    def save_checkpoint(self, done: int, state: State, *, best: bool = False) -> None:
        """Save a checkpoint.

        Args:
            done: number of completed steps.
            state: the state, see `checkpoint.save`.
            best: replace the best checkpoint, instead of adding to `checkpoints/`.
        Raises:
            StorageError: it cannot be saved.
        """
        self._flush()  # before the checkpoint, because a resumed run relies on the rows up to it
        root, keep = (self.path / "best", 1) if best else (self.checkpoints, self._settings.keep)
        checkpoint.save(root, done, {**state, **self._started}, keep, self.ranks)

    @_on_rank0
    def _flush(self) -> None:
        with writing(self.path):
            for name in ("metrics.jsonl", "eval.jsonl"):
                if (self.path / name).exists():
                    sync(self.path / name)

    def _warn(self, text: str) -> None:
        self._observe("message", {"text": text, "level": "warning"})

    def _write_status(self, status: Mapping[str, Any]) -> None:
        write_text(self.path / "status.json", json.dumps(masked(status)) + "\n")


def write_evaluation(folder: Path, step: int, name: str, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write the completions of an evaluation into FOLDER/eval, where `retrain score FOLDER` finds them.

    Args:
        folder: the run directory.
        step: number of training steps before the evaluation.
        name: name of a set of held-out problems; "" for the run's own held-out problems.
        rows: the held-out problems with their completions.
    Returns:
        The path of the file.
    """
    return _write_compressed(folder / "eval" / f"step-{step:06d}{name and f'.{name}'}.jsonl.gz", rows)


def _write_compressed(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        # mtime=0: the time of writing would make equal rows unequal files.
        write_bytes(path, gzip.compress(text.encode(), compresslevel=5, mtime=0))
    return path


def _keep_rows(path: Path, steps: range) -> None:
    """Delete all rows of a file except those of the given steps, which stay byte for byte."""
    if path.is_file():
        lines = path.read_bytes().split(b"\n")[:-1]  # a kill may have truncated the last line, which is written again
        kept = [line + b"\n" for number, line in enumerate(lines, 1) if parse_row(line, path, number)["step"] in steps]
        write_bytes(path, b"".join(kept))


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return "finished"
    names = {Preempted: "preempted", DivergedError: "diverged", KeyboardInterrupt: "interrupted"}
    return next((name for kind, name in names.items() if isinstance(error, kind)), "failed")
