"""A run that has been trained, opened again to evaluate, sample or export it."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from weakref import finalize

from retrain import registry
from retrain.config.document import Document
from retrain.config.load import LoadedConfig, validate
from retrain.config.resolve import AUTO
from retrain.config.schema import Config
from retrain.errors import ConfigError, ConfigProblem, EngineError, StorageError
from retrain.run.run_context import RunContext, SamplingContext, TrainState
from retrain.storage import checkpoint
from retrain.storage.own_runs import CONFIG, is_own
from retrain.storage.run_directory import RunDirectory
from retrain.storage.run_files import read_rows, understood
from retrain.storage.trust import refuse_foreign
from retrain.system.files import plain_files
from retrain.system.records import read_json
from retrain.types import Observer, State

_SAMPLING = frozenset({"task", "engine"})
_SCORING = _SAMPLING | {"environment", "reward"}
"""Kinds of components that sampling and scoring take from a run; the others train it."""


def reopen(
    target: Path,
    overrides: Sequence[str],
    observe: Observer,
    *,
    trust: bool = False,
    trained: bool = True,
    credit: bool = False,
) -> RunContext:
    """The context of a finished or interrupted run, with its trained weights in policy and sampler.

    Nothing is written to the run. What the engine hands over in files is in a temporary directory while the context
    lives.

    Args:
        target: a run directory (its final model, or else its newest valid checkpoint), `best` or a checkpoint in one.
        overrides: `key=value`, as after `--set`.
        trust: run code and reach servers that the run's configuration names, though somebody else may have written it.
        trained: take the trained weights; otherwise those that the run started from.
        credit: give credit as the run does; otherwise only what samples and scores is the run's own.
    Raises:
        ConfigError: there is no run at this path, an override does not fit, or the run is not to be trusted.
        StorageError: there is no valid checkpoint, or it cannot be trusted.
        EngineError: the run's engine cannot be used here.
    """
    run, saved = _locate(target, observe) if trained else (target, None)
    from retrain.run.build import build  # torch and transformers take seconds to import

    needs = None if credit else _SCORING
    loaded = stored(run, overrides, trained and saved is None, needs=needs, trust=trust)
    with _opening(loaded, observe) as directory:
        return _synced(build(loaded, directory, observe), run, saved, trained)


def reopen_sampler(
    target: Path, overrides: Sequence[str], observe: Observer, *, trust: bool = False
) -> SamplingContext:
    """What answers prompts with the trained weights, without rewards, environment and trackers; otherwise `reopen`."""
    run, saved = _locate(target, observe)
    from retrain.run.build import build_sampling

    loaded = stored(run, overrides, saved is None, needs=_SAMPLING, trust=trust)
    with _opening(loaded, observe) as directory:
        task = loaded.task(loaded.config.training.seed)
        return _synced(build_sampling(loaded, directory, task, observe), run, saved)


@contextmanager
def _opening(loaded: LoadedConfig, observe: Observer) -> Generator[RunDirectory]:
    """A temporary run directory: what the engine writes is no part of the run, which may go on."""
    folder = TemporaryDirectory(prefix="retrain-")
    directory = RunDirectory(Path(folder.name), "auto", loaded.config.checkpoint, observe)
    finalize(directory, folder.cleanup)
    try:
        yield directory
    except EngineError as error:
        engine = loaded.components.optional("engine")
        if engine is not None and registry.engine.traits_of(engine.component).remote:
            raise EngineError(f"{error}; or sample here: --set rollout.engine=torch") from error
        raise


_P = TypeVar("_P", bound=SamplingContext)


def _synced(context: _P, run: Path, saved: State | None, trained: bool = True) -> _P:
    """The context with the trained weights in the sampler."""
    try:
        if trained:
            _restore(context, run, saved)
        context.sync(context.policy.step)
    except BaseException:
        context.close()
        raise
    return context


def each_checkpoint(
    run: Path, overrides: Sequence[str], observe: Observer, *, trust: bool = False
) -> Iterator[RunContext]:
    """The context with the weights of every checkpoint of a run, the oldest first; one that is not valid is left out.

    It is the same context every time, closed at the end.

    Raises:
        ConfigError: there is no run with a checkpoint at this path.
    """
    context: RunContext | None = None
    try:
        for path in reversed(checkpoint.every(run / "checkpoints")):
            if reason := checkpoint.problem(path):
                observe("message", {"text": f"checkpoint {path}: {reason}; left out", "level": "warning"})
            elif context is None:
                context = reopen(path, overrides, observe, trust=trust)
                yield context
            else:
                _restore(context, run, checkpoint.load(path))
                context.sync(context.policy.step)
                yield context
    finally:
        if context is not None:
            context.close()
    if context is None:
        fix = "give runs/NAME of a run that has saved one"
        raise ConfigError([ConfigProblem(str(run), 0, 0, "run", "has no valid checkpoint", fix)])


def reopen_trained(target: Path, observe: Observer, *, trust: bool = False) -> TrainState:
    """The trained weights and signals of a run or checkpoint alone, to write them elsewhere.

    The run's engine need not be there: nothing samples.

    Raises:
        ConfigError: there is no run at this path, or it is not to be trusted.
        StorageError: there is no valid checkpoint, or it cannot be trusted.
    """
    run, saved = _locate(target, observe)
    from retrain.run.build import build_trained

    needs = frozenset() if saved is None else frozenset({"task", "signal"})
    with understood(run):
        signals = () if saved is None else tuple(saved["signals"])
    loaded = stored(run, (f"rollout.engine={AUTO}",), saved is None, needs=needs, signals=signals, trust=trust)
    trained = build_trained(loaded, RunDirectory(run, "auto", loaded.config.checkpoint, observe), observe)
    _restore(trained, run, saved)
    return trained


def _restore(trained: TrainState, run: Path, saved: State | None) -> None:
    """Load a checkpoint; without one the final model has been loaded already, but for an adapter."""
    if saved is None:
        trained.steps, trained.final = len(read_rows(run / "metrics.jsonl")), run / "model"
        if trained.policy.adapter is not None:
            trained.policy.load_adapter(trained.final / "adapter")
    else:
        with understood(run):
            trained.restore(saved)


def stored(
    run: Path,
    overrides: Sequence[str],
    final: bool,
    *,
    needs: Set[str] | None = None,
    signals: Collection[str] = (),
    trust: bool = False,
) -> LoadedConfig:
    """The configuration that a run was started with, overridden.

    Args:
        final: take the run's saved model instead of what the run started from: with LoRA its adapter on its base.
        needs: kinds of components that are used; None for all. Of a run that is not the user's own nothing else is
            taken.
        signals: those of a checkpoint, which are computed as well.
        trust: see `reopen`.
    Raises:
        ConfigError: the run is not the user's own, and its configuration names code or servers.
    """
    file = run / CONFIG
    data: dict[str, Any] = read_json(file)
    if not data:
        raise StorageError(f"{file} is missing; restore it from a copy")
    data.pop("components", None)
    trust = trust or is_own(run)
    paths: Sequence[str] = ()
    with understood(file):
        if final:
            _start_from_final(run / "model", data)
        if not trust:
            paths = [path for path in data.pop("plugins", {}).get("search_paths", ()) if isinstance(path, str)]
            data = data if needs is None else _needed(data, needs, signals)
        data["logging"] = data.get("logging", {}) | {"trackers": []}
    document = Document(str(file), data=data)
    chosen = [document.override(override) for override in overrides]
    if not trust:
        refuse_foreign(document, chosen, paths)
    return validate(document)


def _needed(data: Mapping[str, Any], needs: Set[str], signals: Collection[str]) -> dict[str, Any]:
    """A stored configuration without what components of other kinds read: the defaults take their place."""
    task = ("task", "tasks", "environment", "environments") if "task" in needs else ()
    scoring = ("rewards", "reward_pool") if "reward" in needs else ()
    sections = {"model", "training", "optimizer", "distributed", "warmup", "eval", *task, *scoring}
    found = {
        name: data[name]
        for name in data
        if name in sections or (name not in Config.model_fields and _reads(name, needs))
    }
    found["training"] = {
        key: found["training"][key] for key in found["training"] if key not in ("curriculum", "stop_when")
    }
    found["rollout"] = {"engine": data["rollout"]["engine"]} if "engine" in needs else {}
    if "reward" not in needs:
        found["eval"] = {**found["eval"], "sets": []}
        found["rewards"] = [{"name": "overlong"}]  # it is never built, and it fits every task: it reads no answer
        _without_environment(found)
    found["logging"] = {"observe": [name for name in signals if name in registry.names("signal")]}
    return found


def _without_environment(data: dict[str, Any]) -> None:
    """Keep the tasks of the environments alone."""
    data.pop("environment", None)
    if mixed := data.pop("environments", None):
        data["tasks"] = [
            {
                "name": one["task"],
                "params": one["task_params"],
                "label": one["label"] or one["name"],
                "weight": one["weight"],
            }
            for one in mixed
        ]


def _reads(table: str, needs: Set[str]) -> bool:
    """Whether a registered component of one of these kinds, or one that another package installs, reads a table."""
    kinds = {one.kind for one in registry.components(tables=[table])}
    return bool(kinds & needs) or any(table in registry.names(kind) for kind in needs)


def _is_exact(engine: registry.Component) -> bool:
    return registry.engine.traits_of(engine).exact


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
            for engine in filter(_is_exact, registry.components("engine")):
                data[engine.table] = data.get(engine.table, {}) | {"dtype": "float32"}


def _locate(target: Path, observe: Observer) -> tuple[Path, State | None]:
    """(run directory, state of its newest checkpoint or None for the final model).

    It is read at once: a run that is under way may have deleted the checkpoint by the time that the model is built.
    """
    if (target / CONFIG).is_file():
        plain_files(target, deep=False)
        if (target / "model" / "config.json").is_file():
            plain_files(target / "model")
            return target, None
        found = checkpoint.newest(target / "checkpoints", lambda text: observe("message", {"text": text}), own=False)
        if found is not None:
            return target, found[1]
        problem, fix = "has neither a final model nor a checkpoint yet", "wait for the first one"
        with suppress(StorageError):
            if read_json(target / "status.json").get("outcome") == "finished":
                problem = "is finished, and its model and checkpoints are deleted ([campaign] keep)"
                fix = f"train it again: retrain train {target / 'config.toml'} --fresh"
    elif target.parent.name in ("checkpoints", "best") and target.is_dir():
        plain_files(target.parent.parent, deep=False)
        return target.parent.parent, checkpoint.load(target)
    elif (
        target.name == "best"
        and not target.is_symlink()
        and (found := checkpoint.newest(target, lambda _: None, own=False)) is not None
    ):
        return target.parent, found[1]
    else:
        there = ", ".join(one.name for one in sorted(target.parent.glob("step-*")))
        fix = f"there are {there}" if there else "give runs/NAME or runs/NAME/checkpoints/step-000100"
        problem = "is not a run"
    raise ConfigError([ConfigProblem(str(target), 0, 0, "run", problem, fix)])
