"""A run that has been trained, opened again to evaluate, sample or export it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import finalize

from retrain import registry
from retrain.config.document import Document
from retrain.config.load import validate
from retrain.config.resolve import AUTO, LoadedConfig
from retrain.errors import ConfigError, ConfigProblem, EngineError, StorageError
from retrain.run.run_parts import Parts, Trained
from retrain.storage import checkpoint
from retrain.storage.run_directory import RunDirectory
from retrain.storage.run_files import read_rows, understood
from retrain.system.records import read_json
from retrain.types import Observer, State


def reopen(target: Path, overrides: Sequence[str], observe: Observer, *, trained: bool = True) -> Parts:
    """The parts of a finished or interrupted run, with its trained weights in policy and sampler.

    Nothing is written to the run. What the engine hands over in files is in a temporary directory while the parts live.

    Args:
        target: a run directory (its final model, or else its newest valid checkpoint), `best` or a checkpoint in one.
        overrides: `key=value`, as after `--set`.
        trained: take the trained weights; otherwise those that the run started from.
    Raises:
        ConfigError: there is no run at this path, or an override does not fit.
        StorageError: there is no valid checkpoint, or it cannot be trusted.
        EngineError: the run's engine cannot be used here.
    """
    run, saved = _locate(target, observe) if trained else (target, None)
    from retrain.run.build import build  # torch and transformers take seconds to import

    loaded, parts = stored(run, overrides, final=trained and saved is None), None
    folder = TemporaryDirectory(prefix="retrain-")  # what the engine writes is no part of the run, which may go on
    try:
        parts = build(loaded, RunDirectory(Path(folder.name), "auto", loaded.config.checkpoint, observe), observe)
        finalize(parts, folder.cleanup)
        if trained:
            _restore(parts, run, saved)
        parts.sync(parts.policy.step)
    except BaseException as error:
        if parts is not None:
            parts.close()
        engine = loaded.components.optional("engine")
        if isinstance(error, EngineError) and engine is not None and engine.component.traits.get("elsewhere", False):
            raise EngineError(f"{error}; or sample here: --set rollout.engine=torch") from error
        raise
    return parts


def each_checkpoint(run: Path, overrides: Sequence[str], observe: Observer) -> Iterator[Parts]:
    """The parts with the weights of every checkpoint of a run, the oldest first; one that is not valid is left out.

    They are the same parts every time, closed at the end.

    Raises:
        ConfigError: there is no run with a checkpoint at this path.
    """
    parts: Parts | None = None
    try:
        for path in reversed(checkpoint.every(run / "checkpoints")):
            if reason := checkpoint.problem(path):
                observe("message", {"text": f"checkpoint {path}: {reason}; left out", "level": "warning"})
            elif parts is None:
                parts = reopen(path, overrides, observe)
                yield parts
            else:
                _restore(parts, run, checkpoint.load(path))
                parts.sync(parts.policy.step)
                yield parts
    finally:
        if parts is not None:
            parts.close()
    if parts is None:
        fix = "give runs/NAME of a run that has saved one"
        raise ConfigError([ConfigProblem(str(run), 0, 0, "run", "has no valid checkpoint", fix)])


def reopen_trained(target: Path, observe: Observer) -> Trained:
    """The trained weights and signals of a run or checkpoint alone, to write them elsewhere.

    The run's engine need not be there: nothing samples.

    Raises:
        ConfigError: there is no run at this path.
        StorageError: there is no valid checkpoint, or it cannot be trusted.
    """
    run, saved = _locate(target, observe)
    from retrain.run.build import build_trained

    loaded = stored(run, (f"rollout.engine={AUTO}",), final=saved is None)
    trained = build_trained(loaded, RunDirectory(run, "auto", loaded.config.checkpoint, observe), observe)
    _restore(trained, run, saved)
    return trained


def _restore(trained: Trained, run: Path, saved: State | None) -> None:
    """Load a checkpoint; without one the final model has been loaded already, but for an adapter."""
    if saved is None:
        trained.steps, trained.final = len(read_rows(run / "metrics.jsonl")), run / "model"
        if trained.policy.adapter is not None:
            trained.policy.load_adapter(trained.final / "adapter")
    else:
        with understood(run):
            trained.restore(saved)


def stored(run: Path, overrides: Sequence[str], final: bool) -> LoadedConfig:
    """The configuration that a run was started with, overridden.

    Args:
        final: take the run's saved model instead of what the run started from: with LoRA its adapter on its base.
    """
    data: dict[str, Any] = read_json(run / "config.resolved.json")
    if not data:
        raise StorageError(f"{run / 'config.resolved.json'} is missing; restore it from a copy")
    data.pop("components", None)
    with understood(run / "config.resolved.json"):
        if final:
            _start_from_final(run / "model", data)
        data["logging"] |= {"trackers": []}
    document = Document(str(run / "config.resolved.json"), data=data)
    for override in overrides:
        document.override(override)
    return validate(document)


def _start_from_final(model: Path, data: dict[str, Any]) -> None:
    """Have a configuration start from a final model.

    Adapter and base stay apart, as they were trained. Where the base has gone, the merged weights are all there is,
    and the embedded engine must not round them.
    """
    from retrain.training.model.loading import is_here

    table = data["model"]
    adapted, made = (model / "adapter").is_dir(), model / "base"
    data["warmup"] |= {"steps": 0}
    if adapted and made.is_dir():
        table |= {"path": str(made), "revision": None}
    elif not adapted or not is_here(table["path"], table["revision"]):
        table |= {"path": str(model), "revision": None, "quantization": None}
        for section in filter(lambda section: isinstance(section, dict), data.values()):
            section.pop("lora", None)
        if adapted:
            for engine in registry.components("engine", trait="exact"):
                data[engine.table] = data.get(engine.table, {}) | {"dtype": "float32"}


def _locate(target: Path, observe: Observer) -> tuple[Path, State | None]:
    """(run directory, state of its newest checkpoint or None for the final model).

    It is read at once: a run that is under way may have deleted the checkpoint by the time that the model is built.
    """
    if (target / "config.resolved.json").is_file():
        if (target / "model" / "config.json").is_file():
            return target, None
        found = checkpoint.newest(target / "checkpoints", lambda text: observe("message", {"text": text}), own=False)
        if found is not None:
            return target, found[1]
        problem, fix = "has neither a final model nor a checkpoint yet", "wait for the first one"
    elif target.parent.name in ("checkpoints", "best") and target.is_dir():
        return target.parent.parent, checkpoint.load(target)
    elif target.name == "best" and (found := checkpoint.newest(target, lambda _: None, own=False)) is not None:
        return target.parent, found[1]
    else:
        there = ", ".join(one.name for one in sorted(target.parent.glob("step-*")))
        fix = f"there are {there}" if there else "give runs/NAME or runs/NAME/checkpoints/step-000100"
        problem = "is not a run"
    raise ConfigError([ConfigProblem(str(target), 0, 0, "run", problem, fix)])
