"""Reopen a finished or interrupted run, to evaluate, sample from, export or resume it."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, overload
from weakref import finalize

from retrain import registry
from retrain.config.document import Document, show
from retrain.config.foreign_values import ForeignValue, in_components, in_sections
from retrain.config.load import LoadedConfig, validate
from retrain.config.schema import Config
from retrain.config.slots import AUTO
from retrain.errors import ConfigError, ConfigProblem, EngineError, RetrainError, StorageError
from retrain.protocols import ALONE
from retrain.registry.foreign_code import FIX, refused
from retrain.run.run_context import BASE_DIGESTS, RunContext, TrainState
from retrain.storage import checkpoint
from retrain.storage.run_directory import CONFIG, RunDirectory
from retrain.storage.run_files import config_changes, flatten, read_rows, understood, with_current_keys
from retrain.system.files import plain_files
from retrain.system.masking import masked
from retrain.system.records import read_json
from retrain.types import Observer, State

_CREDIT = ("algorithm", "loss", "expert", "source")
_SCORING = ("rewards", "reward_pool", "environment", "eval")
UNUSED: Mapping[str, Sequence[str]] = {
    "weights": (*_CREDIT, *_SCORING),
    "sampler": (*_CREDIT, *_SCORING),
    "scored": _CREDIT,
}
"""Parts of a reopened run -> the sections of its configuration that these parts do not need."""
_CREDIT_KEYS = (("training", "curriculum"), ("training", "stop_when"), ("logging", "observe"), ("checkpoint", "best"))
"""Keys of other sections that name credit or metrics of it."""


@overload
def reopen(
    target: Path, overrides: Sequence[str], observe: Observer, parts: Literal["weights"], *, trust: bool = False
) -> TrainState: ...
@overload
def reopen(
    target: Path,
    overrides: Sequence[str],
    observe: Observer,
    parts: Literal["all", "scored", "sampler", "initial"] = "all",
    *,
    trust: bool = False,
) -> RunContext: ...
def reopen(
    target: Path,
    overrides: Sequence[str],
    observe: Observer,
    parts: Literal["all", "scored", "sampler", "weights", "initial"] = "all",
    *,
    trust: bool = False,
) -> RunContext | TrainState:
    """Return a finished or interrupted run, with its weights in policy and sampler.

    Nothing is written to the run's directory. Files for the engine go to a temporary directory,
    which is deleted with the context.

    Args:
        target: a run directory, its `best`, or one of its checkpoints. A run directory selects its
            final model, or its newest valid checkpoint if it has no final model.
        overrides: `key=value`, as after `--set`.
        parts: "scored" leaves out credit, loss and row sources, which need not be importable here. "sampler" also
            leaves out rewards, environment and trackers. "weights" also leaves out the sampler, so the run's engine
            need not be installed or reachable. "initial" is everything, with the weights that the run started from.
        trust: run all code and connect to the servers that the run's configuration names.
    Raises:
        ConfigError: there is no run at this path, an override is invalid, or the run needs `trust`.
        StorageError: there is no valid checkpoint, or it needs `trust`.
        EngineError: the run's engine cannot be used here.
    """
    run, saved = (target, None) if parts == "initial" else _locate(target, observe)
    from retrain.run.build import build, build_sampling, build_trained  # torch takes seconds to import

    # The engine of the run need not be installed here.
    chosen = (*overrides, f"rollout.engine={AUTO}") if parts == "weights" else overrides
    # Signals that were trained with the policy are exported with it, and only the credit knows them.
    unused = UNUSED.get(parts, ()) if not (saved and saved["signals"]) else ()
    loaded = stored(run, chosen, saved is None and parts != "initial", unused, trust=trust)
    if parts == "weights":
        trained = build_trained(loaded, run, ALONE, observe)
        _restore(trained, run, saved, observe)
        return trained
    with _opening(loaded, observe) as directory:
        if parts == "sampler":
            context = build_sampling(loaded, directory, loaded.task(loaded.config.training.seed), observe)
        else:
            context = build(loaded, directory, observe)
        try:
            if parts != "initial":
                _restore(context.trained, run, saved, observe)
            context.sync(context.trained.policy.step)
        except BaseException:
            context.close()
            raise
    return context


@contextmanager
def _opening(loaded: LoadedConfig, observe: Observer) -> Generator[RunDirectory]:
    """Yield a temporary run directory, because the engine must not write to a run that may resume.

    If a remote engine fails inside the block, the error names an alternative.
    """
    folder = TemporaryDirectory(prefix="retrain-")
    directory = RunDirectory(Path(folder.name), "auto", loaded.config.checkpoint, observe)
    # The folder is needed as long as the context holds its directory.
    finalize(directory, folder.cleanup)
    try:
        yield directory
    except EngineError as error:
        engine = loaded.optional("engine")
        if engine is not None and registry.engine.traits_of(engine).remote:
            raise EngineError(f"{error}; or sample here: --set rollout.engine=torch") from error
        raise


def each_checkpoint(
    run: Path,
    overrides: Sequence[str],
    observe: Observer,
    parts: Literal["all", "scored"] = "all",
    *,
    trust: bool = False,
) -> Iterator[RunContext]:
    """Yield the context with the weights of each checkpoint of a run, from the oldest to the newest.

    Invalid checkpoints are skipped with a warning. The same context is yielded every time, and it is
    closed at the end.

    Raises:
        ConfigError: there is no run with a checkpoint at this path.
    """
    context: RunContext | None = None
    try:
        # `every` returns the newest first.
        for path in reversed(checkpoint.every(run / "checkpoints")):
            if reason := checkpoint.problem(path):
                observe("message", {"text": f"checkpoint {path}: {reason}; it is skipped", "level": "warning"})
            elif context is None:
                context = reopen(path, overrides, observe, parts, trust=trust)
                yield context
            else:
                _restore(context.trained, run, checkpoint.load(path), observe)
                context.sync(context.trained.policy.step)
                yield context
    finally:
        if context is not None:
            context.close()
    if context is None:
        fix = "give runs/NAME of a run that has saved one"
        raise ConfigError.at(run, "run", "has no valid checkpoint", fix)


def _restore(trained: TrainState, run: Path, saved: State | None, observe: Observer) -> None:
    """Load a checkpoint, or without one the final model's adapter.

    `stored` has already selected the other weights of the final model.
    """
    if saved is None:
        trained.steps, trained.final = len(read_rows(run / "metrics.jsonl")), run / "model"
        if trained.policy.adapter is not None:
            trained.policy.load_adapter(trained.final / "adapter")
            _compare_base(trained, read_json(trained.final / "adapter" / BASE_DIGESTS), observe)
    else:
        with understood(run):
            trained.restore(saved, observe)
            _compare_base(trained, saved["loop"]["data"].get("model", {}), observe)


def _compare_base(trained: TrainState, digests: Mapping[str, Any], observe: Observer) -> None:
    """Warn if the model at `[model] path` has changed since the run, so that its adapter is on another base.

    Args:
        digests: `TrainState.digests` of the run; empty if they are unknown.
    """
    import torch

    from retrain.training.reference import sample_digest

    changed = {name for name, digest in digests.items() if trained.digests.get(name) != digest}
    if "weights" in changed:
        base = trained.policy.reference_weights()
        # Another machine may hold the same weights in another data type.
        if digests["weights"] in (sample_digest(base, dtype) for dtype in (torch.bfloat16, torch.float32)):
            changed.remove("weights")
    if changed:
        text = f"{trained.config.model.path}: {', '.join(sorted(changed))} changed since the run was trained on it"
        fix = "restore that model, or what is opened here is not what was trained"
        observe("message", {"text": f"{text}; {fix}", "level": "warning"})


def stored(
    run: Path, overrides: Sequence[str], final: bool, unused: Sequence[str] = (), *, trust: bool = False
) -> LoadedConfig:
    """Return the configuration that a run was started with, with overrides.

    Args:
        unused: sections to leave out, with the tables of the components that only they name.
        final: start from the run's final model instead of its initial model. With LoRA this selects
            the base, and the adapter is loaded later.
        trust: see `reopen`.
    Raises:
        ConfigError: the configuration names code or servers, and neither `trust` nor an override allows them.
    """
    file = run / CONFIG
    data: dict[str, Any] = read_json(file)
    if not data:
        raise StorageError(f"{file} is missing; restore it from a copy")
    components = data.pop("components", {})
    with understood(file):
        _leave_out(unused, data, components)
        if final:
            _start_from_final(run / "model", data)
        data = with_current_keys(data)
        # What is opened here must not report to the trackers of the run.
        data["logging"] = data.get("logging", {}) | {"trackers": []}
    document = Document(str(file), data=data)
    chosen = [path for path in document.override_all(overrides) if path]
    if trust:
        return validate(document)
    # Before the validation, in which these values take effect.
    _refuse(document.file, in_sections(document), chosen)
    with refused(run):
        loaded = validate(document)
    _refuse(document.file, in_components(loaded), chosen)
    return loaded


def _leave_out(sections: Sequence[str], data: dict[str, Any], components: Mapping[str, Any]) -> None:
    """Remove sections of a stored configuration, and the tables that only their components read."""
    if not sections:
        return
    kept = {name for name, kind in registry.KINDS.items() if kind.key and kind.key[0] not in sections} - {"curriculum"}
    # [[environments]] stays, because its entries also name the tasks.
    kept |= {"environment"} if data.get("environments") else set()
    brought = any(component["source"] != "built-in" for kind in kept for component in components.get(kind, ()))
    left_out = {component["name"].rpartition(".")[2] for kind in {*components} - kept for component in components[kind]}
    for name in {*data} - {*Config.model_fields}:
        readers = registry.components(tables=[name])
        # A table that is unknown before the user's own code is imported can only be that of a component of theirs.
        if not (any(reader.kind in kept for reader in readers) if readers else brought and name not in left_out):
            del data[name]
    for section in sections:
        data.pop(section, None)
    for section, key in _CREDIT_KEYS:
        data.get(section, {}).pop(key, None)


def _refuse(file: str, values: Iterable[ForeignValue], chosen: Sequence[tuple[str | int, ...]]) -> None:
    """Raise ConfigError with all values that no override on the command line has set."""
    refused_values = [value for value in values if not any(value.path[: len(path)] == path for path in chosen)]
    if refused_values:
        raise ConfigError(
            [
                ConfigProblem(file, 0, 0, show(value.path), f"{value.value} {value.effect}", FIX)
                for value in refused_values
            ]
        )


def _start_from_final(model: Path, data: dict[str, Any]) -> None:
    """Change a configuration so that it starts from a final model.

    A LoRA adapter and its base stay unmerged, as in training. If the base no longer exists, the
    configuration uses the merged weights, which the embedded engine must then not round.
    """
    from retrain.training.model.pretrained import is_here

    table = data["model"]
    adapted, made = (model / "adapter").is_dir(), model / "base"
    # The final model has its warm start already.
    data["warmup"] |= {"steps": 0}
    if adapted and made.is_dir():
        table |= {"path": str(made), "revision": None}
    elif not adapted or not is_here(table["path"], table["revision"]):
        table |= {"path": str(model), "revision": None, "quantization": None}
        for section in filter(lambda section: isinstance(section, dict), data.values()):
            # [model.lora], and the keys of engines' tables such as [vllm] lora.
            section.pop("lora", None)
        if adapted:
            for engine in registry.components("engine"):
                if registry.engine.traits_of(engine).exact:
                    data[engine.table] = data.get(engine.table, {}) | {"dtype": "float32"}


def _without_weights(run: Path) -> tuple[str, str]:
    """Return problem and fix of a run directory that holds neither a model nor a checkpoint."""
    with suppress(StorageError):
        outcome = read_json(run / "status.json").get("outcome")
        if outcome == "finished":
            problem = "is finished, and its model and checkpoints are deleted ([campaign] keep)"
            return problem, f"train it again: retrain train {run / 'config.toml'} --fresh"
        if outcome not in (None, "running"):
            fix = "continue it: repeat its command with --resume auto, or that of its campaign"
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
        newest = checkpoint.newest(target / "checkpoints", warn, holds_lock=False)
        if newest is not None:
            return target, newest[1]
        problem, fix = _without_weights(target)
    elif target.parent.name in ("checkpoints", "best") and target.is_dir():
        plain_files(target.parent.parent, deep=False)
        return target.parent.parent, checkpoint.load(target)
    elif (
        target.name == "best"
        and not target.is_symlink()
        and (newest := checkpoint.newest(target, lambda _: None, holds_lock=False)) is not None
    ):
        return target.parent, newest[1]
    else:
        there = ", ".join(checkpoint_path.name for checkpoint_path in sorted(target.parent.glob("step-*")))
        fix = f"there are {there}" if there else "give runs/NAME or runs/NAME/checkpoints/step-000100"
        problem = "is not a run"
    raise ConfigError.at(target, "run", problem, fix)


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any], allowed: Sequence[str], run: Path) -> list[str]:
    """Return the changes of the settings of an earlier run, without secrets; see `config_changes`.

    Keys that are newer than that run get their defaults. Finding the defaults imports the code that
    the configuration names. The earlier run may come from somebody else: if it names code that
    needs trust and that `new` does not name, only its own keys are compared.

    Args:
        run: directory of the earlier run, from which nothing is imported.
    """
    old = with_current_keys(old)
    old_leaves = dict(flatten(masked(old)))
    document, current = (
        Document("config.resolved.json", data=copy.deepcopy({**config, "plugins": new["plugins"]}))
        for config in (old, new)
    )
    for config in (document, current):
        # The stored configuration lists its components, which is no section.
        config.data.pop("components", None)
    if {*in_sections(document)} <= {*in_sections(current)}:
        with suppress(RetrainError), refused(run):  # if it is invalid by today's rules, compare its own keys only
            old_leaves = dict(flatten(masked(validate(document).resolved()))) | old_leaves
    return config_changes(old_leaves, masked(new), allowed)


def accept_checkpoint(
    state: State, started: Mapping[str, Any], allowed: Sequence[str], observe: Observer, run: Path
) -> None:
    """Compare the settings and plug-ins of a checkpoint's run with this run's, and warn of changes.

    Secrets are not compared and never shown.

    Args:
        state: the checkpoint.
        started: settings, plug-in hashes and number of ranks of this run.
        allowed: keys that `--allow-change` names.
        run: directory of the earlier run.
    Raises:
        ConfigError: a setting or plug-in has changed that `allowed` does not name.
    """
    saved_facts = state["started_with"]
    changes = changed_settings(saved_facts["config"], started["config"], allowed, run)
    old, new = ({"plugins": facts["plugins"]} for facts in (saved_facts, started))
    changes += config_changes(old, new, allowed)
    if (saved := saved_facts["ranks"]) != started["ranks"]:
        count = started["ranks"]
        changes.append(f"ranks: {saved} -> {count}; sums round differently, so results are not bit-identical")
    for change in changes:
        observe("message", {"text": f"resuming with {change}", "level": "warning"})
