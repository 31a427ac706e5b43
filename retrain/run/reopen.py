"""Reopen a finished or interrupted run, to evaluate, sample from or export it."""

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
"""Kinds of components that sampling and scoring use; the other kinds are used in training only."""


def reopen(
    target: Path,
    overrides: Sequence[str],
    observe: Observer,
    *,
    trust: bool = False,
    trained: bool = True,
    credit: bool = False,
) -> RunContext:
    """Return the context of a finished or interrupted run, with its weights in policy and sampler.

    Nothing is written to the run's directory. Files for the engine go to a temporary directory,
    which is deleted with the context.

    Args:
        target: a run directory, its `best`, or one of its checkpoints. A run directory selects its
            final model, or its newest valid checkpoint if it has no final model.
        overrides: `key=value`, as after `--set`.
        trust: run the code and connect to the servers that the run's configuration names, even if
            somebody else may have written it.
        trained: load the trained weights; otherwise keep the run's initial weights.
        credit: build the run's credit assignment, too; otherwise use only its components for
            sampling and scoring.
    Raises:
        ConfigError: there is no run at this path, an override is invalid, or the run needs `trust`.
        StorageError: there is no valid checkpoint, or it needs `trust`.
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
    """Return a context for sampling only, without rewards, environment and trackers; see `reopen`."""
    run, saved = _locate(target, observe)
    from retrain.run.build import build_sampling

    loaded = stored(run, overrides, saved is None, needs=_SAMPLING, trust=trust)
    with _opening(loaded, observe) as directory:
        task = loaded.task(loaded.config.training.seed)
        return _synced(build_sampling(loaded, directory, task, observe), run, saved)


@contextmanager
def _opening(loaded: LoadedConfig, observe: Observer) -> Generator[RunDirectory]:
    """Yield a temporary run directory, because the engine must not write to a run that may resume.

    If a remote engine fails inside the block, the error names an alternative.
    """
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
    """Load the trained weights into policy and sampler, and return the context."""
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
    """Yield the context with the weights of each checkpoint of a run, from the oldest to the newest.

    Invalid checkpoints are skipped with a warning. The same context is yielded every time, and it is
    closed at the end.

    Raises:
        ConfigError: there is no run with a checkpoint at this path.
    """
    context: RunContext | None = None
    try:
        for path in reversed(checkpoint.every(run / "checkpoints")):
            if reason := checkpoint.problem(path):
                observe("message", {"text": f"checkpoint {path}: {reason}; it is skipped", "level": "warning"})
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
    """Return only the trained weights and signals of a run or checkpoint, to export them.

    Nothing samples, so the run's engine need not be installed or reachable.

    Raises:
        ConfigError: there is no run at this path, or the run needs `trust`.
        StorageError: there is no valid checkpoint, or it needs `trust`.
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
    """Load a checkpoint, or without one the final model's adapter.

    `stored` has already selected the other weights of the final model.
    """
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
    """Return the configuration that a run was started with, with overrides.

    Args:
        final: start from the run's final model instead of its initial model. With LoRA this selects
            the base, and the adapter is loaded later.
        needs: kinds of components that are used; None for all. If the run is not the user's own,
            settings of other kinds are ignored.
        signals: names of the signals whose state the checkpoint holds; they are built as well.
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
    """Return a stored configuration in which settings of kinds that are not needed have defaults."""
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
        found["rewards"] = [{"name": "overlong"}]  # never built; it is valid with every task, since it reads no answer
        _without_environment(found)
    found["logging"] = {"observe": [name for name in signals if name in registry.names("signal")]}
    return found


def _without_environment(data: dict[str, Any]) -> None:
    """Remove the environments from a configuration, and keep their tasks."""
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
    """Return True if a component of one of these kinds, built-in or installed, reads the table."""
    kinds = {one.kind for one in registry.components(tables=[table])}
    return bool(kinds & needs) or any(table in registry.names(kind) for kind in needs)


def _is_exact(engine: registry.Component) -> bool:
    return registry.engine.traits_of(engine).exact


def _start_from_final(model: Path, data: dict[str, Any]) -> None:
    """Change a configuration so that it starts from a final model.

    A LoRA adapter and its base stay unmerged, as in training. If the base no longer exists, the
    configuration uses the merged weights, which the embedded engine must then not round.
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


def _without_weights(run: Path) -> tuple[str, str]:
    """Return problem and fix of a run directory that holds neither a model nor a checkpoint."""
    with suppress(StorageError):
        outcome = read_json(run / "status.json").get("outcome")
        if outcome == "finished":
            problem = "is finished, and its model and checkpoints are deleted ([campaign] keep)"
            return problem, f"train it again: retrain train {run / 'config.toml'} --fresh"
        if outcome not in (None, "running"):
            fix = f"continue it: retrain train {run / 'config.toml'} --resume auto"
            return "ended before its first checkpoint", fix
    return "has neither a final model nor a checkpoint yet", "wait for the first one"


def _locate(target: Path, observe: Observer) -> tuple[Path, State | None]:
    """Return the run directory, and the state of the selected checkpoint, or None for the final model.

    The checkpoint is read now, because a run in progress may delete it before the model is built.

    Raises:
        ConfigError: there is no run at this path, or it has no weights yet.
    """

    def warn(text: str) -> None:
        observe("message", {"text": text, "level": "warning"})

    if (target / CONFIG).is_file():
        plain_files(target, deep=False)
        if (target / "model" / "config.json").is_file():
            plain_files(target / "model")
            return target, None
        found = checkpoint.newest(target / "checkpoints", warn, own=False)
        if found is not None:
            return target, found[1]
        problem, fix = _without_weights(target)
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
