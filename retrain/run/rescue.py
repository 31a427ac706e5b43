"""Save the state of training when an engine or the storage fails."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from retrain.errors import EngineError, RetrainError, StorageError
from retrain.run.collectors.collector import Collector
from retrain.run.stop_signal import Stop
from retrain.storage.run_directory import RunDirectory
from retrain.storage.run_files import read_rows


@contextmanager
def saving(directory: RunDirectory, collector: Collector, stop: Stop, start: int, done: int) -> Generator[None]:
    """Save the state after `done` steps if the block fails with an engine or storage error.

    The error is raised again, with a note on what was saved. If a signal has asked the run to stop,
    an engine error becomes that of the stop: the signal may have stopped the inference servers as well.

    Args:
        start: steps done when training began; nothing is saved if `done` equals it.
    """
    try:
        yield
    except (EngineError, StorageError) as error:
        if done == start and not stop.requested:
            raise
        kind = EngineError if isinstance(error, EngineError) else StorageError
        saved = "" if done == start else f"; {_rescue(directory, collector, done)}"
        if stop.requested and kind is EngineError:
            raise stop.stopped(f": {error}{saved}") from error
        raise kind(f"{error}{saved}") from error


def _rescue(directory: RunDirectory, collector: Collector, done: int) -> str:
    """Save the state after `done` steps, and describe where a resumed run continues.

    Nothing is saved if the metrics row of the last step is missing, because a resumed run would
    never write it.
    """
    try:
        recorded = directory.ranks.on_rank0(lambda: read_rows(directory.path / "metrics.jsonl"))
    except RetrainError:
        # Rows that cannot be read are missing for a resumed run as well.
        recorded = []
    if not recorded or recorded[-1]["step"] != done - 1:
        return f"step {done} is not saved, because its metrics are not; --resume auto continues before it"
    try:
        directory.save_checkpoint(done, collector.state_dict(done))
    except RetrainError as error:
        return f"step {done} could not be saved either: {error}"
    return f"a checkpoint of step {done} is written; --resume auto continues from there"
