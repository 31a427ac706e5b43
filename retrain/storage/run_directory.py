"""The run directory: who may write it, what it holds, and how a resumed run continues its files.

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
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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

ExistingRun = Literal["new", "resume", "auto", "fresh"]
"""What an existing run of that name means: new refuses, resume requires, auto continues, fresh deletes it."""

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
_FOLDERS = ("rollouts", "checkpoints", "best", "model")
_ROLLOUTS = re.compile(r"[a-z]+-(\d{6,})\.jsonl\.gz")


class RunDirectory:
    """Context manager that owns a run directory from the first check to the final status.

    Entering it makes the directory and takes its lock before anything expensive is loaded; leaving it
    writes how the run ended to status.json and frees the lock.

    Args:
        path: `runs/NAME`.
        mode: what to do with an existing run.
        settings: `[checkpoint]`: how many to keep, and what a failed save does.
        observe: called with rejected checkpoints and failed saves ("message").

    Attributes:
        ranks: who saves checkpoints together. restored: the checkpoint that the run continues from.
        stopped: why the run ends before its last step; empty if it does not.

    Raises:
        ConfigError: an existing run and no permission to touch it, nothing to resume, or another
            process owns it.
        StorageError: the directory cannot be written, or an entry of it is a link.
    """

    ranks: Ranks = ALONE
    restored: Path | None = None
    stopped: str = ""

    def __init__(self, path: Path, mode: ExistingRun, settings: Checkpoint, observe: Observer) -> None:
        self.path, self.mode = path, mode
        self.checkpoints = path / "checkpoints"
        self._settings, self._observe = settings, observe
        self._lock = Lock(path / "lock")
        self._earlier: dict[str, Any] = {}
        self._started: State = {}

    def __enter__(self) -> RunDirectory:
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
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        status: dict[str, Any] = {"outcome": _outcome(error)}
        if error is None and self.stopped:
            status["stopped"] = self.stopped
        if isinstance(error, RetrainError):
            status |= {"exit_code": error.exit_code, "error": str(error).split("\n")[0]}
        if isinstance(error, ConfigError) and self._earlier:
            status = self._earlier  # a refused resume says nothing of how the run itself ended
        # What ended the run is the better message, even where the full disk that ended it keeps this from being said.
        with writing(self.path) if error is None else suppress(OSError):
            self._write_status(status)
            self._lock.release()

    def _admit(self) -> None:
        """Refuse or clear what is there, according to the mode."""
        if self.mode == "fresh":
            for name in (*_FILES, *_FOLDERS):
                remove(self.path / name)
        plain_files(self.path, deep=False)  # what is written and deleted behind a link would be another directory's
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
        """How the run ended; what cannot be read says nothing, and is about to be written anew."""
        with suppress(StorageError):
            return read_json(self.path / "status.json")
        return {}

    @property
    def resuming(self) -> bool:
        """There is a checkpoint to continue from, and the mode says to."""
        return self.mode in ("resume", "auto") and self.checkpoints.is_dir() and any(self.checkpoints.iterdir())

    def write_config(self, source: str, started: Mapping[str, Any]) -> None:
        """Write the TOML as it was, and what it resolved to.

        Args:
            started: "config", the resolved configuration, and "plugins", hashes of the user's modules: every
                checkpoint holds them, without secrets.
        """
        self._started = {"started_with": {**started, "config": masked(started["config"])}}
        with writing(self.path):
            write_text(self.path / "config.toml", source)
            write_text(self.path / CONFIG, json.dumps(started["config"], indent=2) + "\n")
            sign(self.path)

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Write where it runs."""
        with writing(self.path):
            write_text(self.path / "environment.json", json.dumps(environment, indent=2) + "\n")

    def previous_config(self, path: Path | None = None) -> dict[str, Any]:
        """config.resolved.json of the run that is continued: that of checkpoint `path`, or else this one.

        Empty if there is none, or if it cannot be read: the checkpoint holds it as well.

        Raises:
            ConfigError: `path` is a checkpoint of another run, and this directory holds one already.
        """
        if path is None and not self.resuming:
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
        for file in self.path.glob("rollouts/*"):
            match = _ROLLOUTS.fullmatch(file.name)
            if match is None or int(match[1]) >= done:
                file.unlink()

    def append(self, name: Literal["metrics.jsonl", "eval.jsonl"], row: Mapping[str, Any]) -> None:
        """Append a row to one of the run's records."""
        # Not flushed to disk here: a checkpoint does that, and a resumed run writes all later rows again.
        with writing(self.path / name), (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def write_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]], name: str = "step") -> Path:
        """Write rollouts/NAME-STEP.jsonl.gz; equal rows give equal bytes."""
        path = self.path / "rollouts" / f"{name}-{step:06d}.jsonl.gz"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            text = "".join(json.dumps(row) + "\n" for row in rows)
            write_bytes(path, gzip.compress(text.encode(), compresslevel=5, mtime=0))
        return path

    def is_best(self, key: str, done: int) -> bool:
        """Whether figure `key` of the evaluation after `done` steps is greater than that of the best checkpoint."""
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

    def _flush(self) -> None:
        with writing(self.path):
            for name in ("metrics.jsonl", "eval.jsonl"):
                if (self.path / name).exists():
                    sync(self.path / name)

    def _say(self, text: str) -> None:
        self._observe("message", {"text": text, "level": "warning"})

    def _write_status(self, status: Mapping[str, Any]) -> None:
        write_text(self.path / "status.json", json.dumps(masked(status)) + "\n")


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
