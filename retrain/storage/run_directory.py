"""The run directory: its lock, its files, and how a resumed run continues them.

runs/NAME/
    config.toml  config.resolved.json  environment.json   what was asked for, what that meant, and where
    signature.json                                        proves to the user who trained it that the run is theirs
    metrics.jsonl  eval.jsonl                             one row per step, one per evaluation
    rollouts/step-000010.jsonl.gz                         completions of a step with their credit
    checkpoints/step-000100/                              see retrain.storage.checkpoint
    best/step-000080/                                     the checkpoint whose evaluation was best, if asked for
    model/                                                final weights in the transformers format
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

from retrain.errors import ConfigError, ConfigProblem, DivergedError, Preempted, RetrainError, StorageError
from retrain.protocols import ALONE, Ranks
from retrain.storage import checkpoint
from retrain.storage.own_runs import CONFIG, SIGNATURE, sign
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
"""Treatment of an existing run of that name: new refuses, resume requires, auto continues, fresh deletes."""

_FILES = (
    "config.toml",
    CONFIG,
    SIGNATURE,
    "environment.json",
    "metrics.jsonl",
    "eval.jsonl",
    "report.html",
    "samples.html",
    "run_id",
)
_FOLDERS = ("rollouts", "eval", "checkpoints", "best", "model")
_ROLLOUTS = re.compile(r"[a-z]+-(\d{6,})\.jsonl\.gz")
_EVALUATIONS = re.compile(r"step-(\d{6,})(\..+)?\.jsonl\.gz")


def _on_rank0(
    method: Callable[Concatenate[RunDirectory, P], T],
) -> Callable[Concatenate[RunDirectory, P], T]:
    """Decorate a method that rank 0 alone runs; every rank gets its result or its error."""

    @wraps(method)
    def call(self: RunDirectory, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.ranks.on_rank0(lambda: method(self, *args, **kwargs))

    return call


class RunDirectory:
    """Context manager that owns a run directory from the first check to the final status.

    Entering it makes the directory and takes its lock before anything expensive is loaded; leaving it
    writes how the run ended to status.json and frees the lock.

    Of several ranks, rank 0 writes the files. All ranks write and read checkpoints, so the directory must be one that
    all of them see.

    Args:
        path: `runs/NAME`.
        mode: what to do with an existing run.
        settings: `[checkpoint]`: how many to keep, and what a failed save does.
        observe: called with rejected checkpoints and failed saves ("message").
        ranks: the processes that save checkpoints together.

    Attributes:
        restored: the checkpoint that the run continues from.
        stopped: why the run ends before its last step; empty if it does not.

    Raises:
        ConfigError: an existing run and no permission to touch it, nothing to resume, or another
            process owns it.
        StorageError: the directory cannot be written, or an entry of it is a link.
    """

    restored: Path | None = None
    stopped: str = ""

    def __init__(
        self, path: Path, mode: ExistingRun, settings: Checkpoint, observe: Observer, ranks: Ranks = ALONE
    ) -> None:
        self.path, self.mode, self.ranks = path, mode, ranks
        self.checkpoints = path / "checkpoints"
        self._settings, self._observe = settings, observe
        self._lock = Lock(path / "lock")
        self._earlier: dict[str, Any] = {}
        self._started: State = {}

    def __enter__(self) -> RunDirectory:
        self._open()
        return self

    @_on_rank0
    def _open(self) -> None:
        if self.path.name in ("", ".."):
            raise ConfigError([ConfigProblem(str(self.path), 0, 0, "run directory", "is not a name of its own")])
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            # First of all: two runs that start at once would both find the directory free.
            self._lock.acquire()
            try:
                self._admit()
                self._earlier = {} if self.mode == "fresh" else self._stored_status()
                self._write_status({"outcome": "running"})
            except BaseException:
                self._lock.release()
                raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.ranks.rank:
            return
        status: dict[str, Any] = {"outcome": _outcome(error)}
        if error is None and self.stopped:
            status["stopped"] = self.stopped
        if isinstance(error, RetrainError):
            status |= {"exit_code": error.exit_code, "error": str(error).split("\n")[0]}
        if self._earlier and (isinstance(error, ConfigError) or self._complete):
            status = self._earlier  # a refused or needless resume does not change how the run itself ended
        # What ended the run is the better message, even where the full disk that ended it keeps this from being said.
        with writing(self.path) if error is None else suppress(OSError):
            self._write_status(status)
            self._lock.release()

    def _admit(self) -> None:
        """Refuse or clear what is there, according to the mode."""
        if self.mode == "fresh":
            for name in (*_FILES, *_FOLDERS):
                remove(self.path / name)
        plain_files(self.path, deep=False)  # Behind a link, files of another directory would be written and deleted.
        existing = self._existing()
        if existing and self.mode == "new":
            state = "a finished" if self._stored_status().get("outcome") == "finished" else "an unfinished"
            raise ConfigError([self._problem(f"holds {state} run", "--resume auto, --fresh, or another name")])
        if not existing and self.mode == "resume":
            raise ConfigError([self._problem("holds no run to resume", "leave out --resume, or check the name")])

    def _existing(self) -> bool:
        return any((self.path / name).exists() for name in (CONFIG, "metrics.jsonl", "checkpoints"))

    def _problem(self, problem: str, fix: str) -> ConfigProblem:
        return ConfigProblem(str(self.path), 0, 0, "run directory", problem, fix)

    def _stored_status(self) -> dict[str, Any]:
        """Read status.json; empty if it cannot be read, because it is rewritten next."""
        with suppress(StorageError):
            return read_json(self.path / "status.json")
        return {}

    @property
    def resuming(self) -> bool:
        """Return whether the mode continues a run and a checkpoint exists."""
        return self.mode in ("resume", "auto") and self.checkpoints.is_dir() and any(self.checkpoints.iterdir())

    @property
    def _complete(self) -> bool:
        return self.mode in ("resume", "auto") and not self.resuming and self._earlier.get("outcome") == "finished"

    @_on_rank0
    def complete(self) -> bool:
        """Return True where the run to resume is finished, and its checkpoints are deleted: no step is left to do."""
        return self._complete

    @_on_rank0
    def write_config(self, source: str, started: Mapping[str, Any]) -> None:
        """Write the TOML as given, and its resolved configuration.

        Args:
            started: "config", the resolved configuration, and "plugins", hashes of the user's modules: every
                checkpoint holds them, without secrets.
        """
        self._started = {"started_with": {**started, "config": masked(started["config"])}}
        with writing(self.path):
            write_text(self.path / "config.toml", source)
            write_text(self.path / CONFIG, json.dumps(started["config"], indent=2) + "\n")
            sign(self.path)

    @_on_rank0
    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Write environment.json: versions and hardware."""
        with writing(self.path):
            write_text(self.path / "environment.json", json.dumps(environment, indent=2) + "\n")

    @_on_rank0
    def previous_config(self, path: Path | None = None) -> dict[str, Any]:
        """Return config.resolved.json of the run that is continued: the run of checkpoint `path`, or this one.

        Empty if the file is missing or unreadable: the checkpoint holds the configuration as well.

        Raises:
            ConfigError: `path` is a checkpoint of another run, and this directory holds one already.
        """
        if path is None and not self.resuming and not self._complete:
            return {}
        run = self.path.resolve() if path is None else path.resolve().parent.parent
        if run != self.path.resolve() and self._existing():
            problem, fix = f"holds a run of its own, and {path} is of another", "another name for the new run"
            raise ConfigError([self._problem(problem, fix)])
        with suppress(StorageError):
            return read_json(run / CONFIG)
        return {}

    def restore(self, path: Path | None = None, accept: Callable[[State], None] = lambda _: None) -> State | None:
        """The state of checkpoint `path`, or of the newest valid one, with every file rewound to it.

        None to start from zero.

        Rows, rollouts and checkpoints of steps after it are dropped, because the resumed run writes them
        again: its files end up equal to those of a run that was never interrupted. Nothing is dropped
        before the checkpoint is known to be good.

        Args:
            accept: refuses a state by raising; nothing has been dropped by then.
        Raises:
            StorageError: `path`, or every checkpoint there is, is not valid.
        """
        state = self.ranks.only_on_rank0(lambda: self._restore(path, accept))
        self.restored = self.ranks.broadcast(self.restored)
        if self.ranks.rank and self.restored is not None:
            return checkpoint.read(self.restored)  # rank 0 has verified it
        return state

    def _restore(self, path: Path | None, accept: Callable[[State], None]) -> State | None:
        found = (path, checkpoint.load(path)) if path else None
        if found is None and self.resuming:
            found = checkpoint.newest(self.checkpoints, self._say, own=True)
        self.restored = found[0] if found else None
        done, state = (checkpoint.step_of(found[0]), found[1]) if found else (0, None)
        if state is not None:
            accept(state)
        elif (self.path / "metrics.jsonl").exists():
            self._say("there is no checkpoint to resume from: starting from step 0")
        with writing(self.path):
            self._rewind(done)
            for root in (self.checkpoints, self.path / "best"):
                checkpoint.drop_after(root, done)
        return state

    def _rewind(self, done: int) -> None:
        """Keep steps 0 to `done` - 1 and the evaluations up to `done`; nothing if no step was done."""
        _keep_rows(self.path / "metrics.jsonl", range(done))
        _keep_rows(self.path / "eval.jsonl", range(done + 1 if done else 0))
        for pattern, place, steps in (
            (_ROLLOUTS, "rollouts", range(done)),
            (_EVALUATIONS, "eval", range(done + 1 if done else 0)),
        ):
            for file in self.path.glob(f"{place}/*"):
                match = pattern.fullmatch(file.name)
                if match is None or int(match[1]) not in steps:
                    file.unlink()

    @_on_rank0
    def append(self, name: Literal["metrics.jsonl", "eval.jsonl"], row: Mapping[str, Any]) -> None:
        """Append a row to one of the run's records."""
        # A checkpoint flushes the files to disk; a resumed run rewrites all later rows.
        with writing(self.path / name), (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    @_on_rank0
    def write_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]], name: str = "step") -> Path:
        """Write rollouts/NAME-STEP.jsonl.gz; equal rows give equal bytes."""
        return _write_packed(self.path / "rollouts" / f"{name}-{step:06d}.jsonl.gz", rows)

    @_on_rank0
    def write_evaluation(self, step: int, name: str, rows: Iterable[Mapping[str, Any]]) -> Path:
        """Write eval/step-STEP.jsonl.gz, or with the name of a set eval/step-STEP.NAME.jsonl.gz."""
        return write_evaluation(self.path, step, name, rows)

    @_on_rank0
    def is_best(self, key: str, done: int) -> bool:
        """Return whether figure `key` of the evaluation after `done` steps exceeds the best checkpoint's."""
        values = {row["step"]: row.get(key, -inf) for row in read_rows(self.path / "eval.jsonl")}
        kept = [values.get(checkpoint.step_of(path), -inf) for path in checkpoint.every(self.path / "best")]
        return values.get(done, -inf) > max(kept, default=-inf)

    def save_checkpoint(self, done: int, state: State, *, best: bool = False) -> bool:
        """Save the state after `done` steps; `on_save_error` decides whether a failure ends the run.

        Args:
            best: save it as the best so far, in place of the last that was.
        Returns:
            whether it is saved.
        """
        try:
            # Before the checkpoint: a resumed run keeps the rows up to it, so they must be on the disk by then.
            self._flush()
            root, keep = (self.path / "best", 1) if best else (self.checkpoints, self._settings.keep)
            checkpoint.save(root, done, {**state, **self._started}, keep, self.ranks)
        except StorageError as error:
            if self._settings.on_save_error == "stop":
                raise
            self._say(str(error))
            return False
        return True

    @_on_rank0
    def _flush(self) -> None:
        with writing(self.path):
            for name in ("metrics.jsonl", "eval.jsonl"):
                if (self.path / name).exists():
                    sync(self.path / name)

    def _say(self, text: str) -> None:
        self._observe("message", {"text": text, "level": "warning"})

    def _write_status(self, status: Mapping[str, Any]) -> None:
        write_text(self.path / "status.json", json.dumps(masked(status)) + "\n")


def write_evaluation(folder: Path, step: int, name: str, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write the completions of an evaluation into FOLDER/eval, where `retrain score FOLDER` finds them.

    Args:
        step: training steps before the evaluation.
        name: of a set of held-out problems; "": the run's own problems.
    """
    return _write_packed(folder / "eval" / f"step-{step:06d}{name and f'.{name}'}.jsonl.gz", rows)


def _write_packed(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        write_bytes(path, gzip.compress(text.encode(), compresslevel=5, mtime=0))
    return path


def _keep_rows(path: Path, steps: range) -> None:
    """Rewrite the file with the rows of these steps, each once, byte for byte."""
    if path.is_file():
        lines = path.read_bytes().split(b"\n")[:-1]  # a kill can cut off the last line; it is written again
        kept = [line + b"\n" for number, line in enumerate(lines, 1) if parse_row(line, path, number)["step"] in steps]
        write_bytes(path, b"".join(kept))


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return "finished"
    names = {Preempted: "preempted", DivergedError: "diverged", KeyboardInterrupt: "interrupted"}
    return next((name for kind, name in names.items() if isinstance(error, kind)), "failed")
