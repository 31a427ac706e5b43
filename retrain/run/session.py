"""Run `retrain train`: from a configuration to a saved model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from retrain.config.loaded_config import LoadedConfig
from retrain.errors import ConfigError, StorageError, UserCodeError
from retrain.protocols import ALONE, Ranks
from retrain.report.run_summary import summary
from retrain.run.findings import Evidence, RunFindings
from retrain.run.run_context import RunContext
from retrain.run.stop_signal import Stop, StopCondition
from retrain.storage import checkpoint
from retrain.storage.run_directory import ExistingRun, RunDirectory
from retrain.storage.run_environment import environment
from retrain.storage.run_files import config_changes, flatten, read_rows, understood
from retrain.system.process import launched
from retrain.system.records import read_json
from retrain.types import Observer, State

_PROMPTS = 8
"""Number of problems whose prompts the findings read."""

Around = Callable[[RunContext], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Resume:
    """Treatment of an earlier run of the same name.

    Attributes:
        mode: "new" refuses it, "resume" requires it, "auto" continues it if it exists, and "fresh"
            deletes it.
        path: checkpoint to continue from; None selects the newest valid one.
        allow_change: dotted keys whose values may differ from those of the earlier run.
    """

    mode: ExistingRun = "new"
    path: Path | None = None
    allow_change: Sequence[str] = ()


def run(
    loaded: LoadedConfig, resume: Resume, observe: Observer, ranks: Ranks | None = None, around: Around = nullcontext
) -> Path:
    """Train from a configuration, and return the run directory. Every rank calls this.

    Errors that need no torch are raised before torch and transformers are imported, which takes
    seconds.

    Args:
        ranks: the processes that train together; None reads them from the environment variables of
            the launcher.
        around: returns a context manager; training runs inside it.
    Raises:
        RetrainError: the run failed or was stopped; the class decides the exit code.
    """
    own_ranks = _join(loaded) if ranks is None else ranks
    with own_ranks.during("the run"):
        path = _run(loaded, resume, observe if own_ranks.rank == 0 else lambda *_: None, own_ranks, around)
    # The caller leaves ranks that it joined itself.
    if ranks is None:
        own_ranks.leave()
    return path


def _join(loaded: LoadedConfig) -> Ranks:
    """Join the ranks that this process was launched with."""
    if not launched():
        return ALONE
    from retrain.run.build import choose_device
    from retrain.training.distributed.ranks import join

    return join(choose_device(loaded.config.training.device).type, loaded.config.distributed.timeout_s)


def _run(loaded: LoadedConfig, resume: Resume, observe: Observer, ranks: Ranks, around: Around) -> Path:
    began = time.perf_counter()
    path, resolved = loaded.directory, loaded.resolved()
    earlier = _earlier(resume, path)
    opened = RunDirectory(path, resume.mode, loaded.config.checkpoint, observe, ranks)
    # The handlers come first: a signal that arrives while the directory is opened must end in its status.json too.
    with Stop(observe=observe, held=True) as stop, opened as directory, stop.at_once():
        previous = directory.previous_config(resume.path)
        started = {"config": resolved, "plugins": _hashes(loaded), "ranks": ranks.size}
        if previous:  # checked before torch is imported; `_accept` checks the checkpoint itself
            from retrain.run.reopen import changed_settings

            changes = changed_settings(previous, resolved, resume.allow_change, earlier)
            if directory.complete():
                _end_complete(path, changes, observe)
                return path
        from retrain.run.loop import torch_of_its_own, train

        with understood(path):
            state = directory.restore(resume.path, partial(_accept, started, resume, observe, earlier))
        directory.write_config(_source(loaded), started)
        before = _environment_of(earlier)  # read now, because the build writes that of this process
        with torch_of_its_own(), closing(_built(loaded, directory, observe)) as context:
            try:
                start, cursor = _restore(context, state, resume, before)
                with around(context):
                    train(context, stop, start, cursor, state)
                finish(context, time.perf_counter() - began)
            except UserCodeError as error:
                note = f"after {context.trained.steps} steps"
                if not str(error).endswith(note):  # an error from another rank has the note already
                    error.add_note(note)
                raise
    return path


def _hashes(loaded: LoadedConfig) -> dict[str, str]:
    """Return the hash of each module of the user's code, by name."""
    every = (component for config in (loaded, *loaded.sets.values()) for component in config.slots.values())
    if not (components_of_user := [component for component in every if component.source != "built-in"]):
        return {}
    from retrain.registry.sources import source_hashes

    return source_hashes(components_of_user)


def _earlier(resume: Resume, path: Path) -> Path:
    """Return the directory of the run to continue; raise ConfigError if `--resume` names no checkpoint."""
    if resume.path is None:
        return path
    if not checkpoint.is_one(resume.path):
        fix = "give auto, or runs/NAME/checkpoints/step-000100"
        raise ConfigError.at("--resume", str(resume.path), "is not a checkpoint", fix)
    return resume.path.resolve().parents[1]


def _end_complete(path: Path, changes: Sequence[str], observe: Observer) -> None:
    """Report that a finished run without checkpoints has nothing to resume.

    Raises:
        ConfigError: the configuration has changed, and training with it needs a checkpoint.
    """
    problem = "is finished, and its checkpoints are deleted"
    if changes:
        fix = "train it again with --fresh, or choose another name"
        raise ConfigError.at(path, "run directory", problem, fix)
    observe("message", {"text": f"{path} {problem}: there is nothing to resume", "level": "info"})


def _built(loaded: LoadedConfig, directory: RunDirectory, observe: Observer) -> RunContext:
    """Build the context of the run.

    The environment is recorded before the build, in case the build fails. It is recorded again
    afterwards, because the number of threads depends on the model.
    """
    from retrain.run.build import build

    ranks = {"ranks": directory.ranks.size}
    directory.write_environment(environment() | ranks)
    context = build(loaded, directory, observe)
    directory.write_environment(environment() | ranks)
    if (settings := context.config.training.stop_when) is not None:
        context.observe = StopCondition(settings, directory, observe)
    return context


def _source(loaded: LoadedConfig) -> str:
    """Return the text of the TOML file, followed by the command line's overrides as comments."""
    flags = [f"# {' '.join(flag.split())}\n" for flag in loaded.overrides]
    # The config.toml of a run holds its overrides already; a resumed run must not repeat them.
    new = [flag for flag in flags if flag not in loaded.text]
    return "\n".join([loaded.text, "".join(new)]) if new else loaded.text


def _accept(started: Mapping[str, Any], resume: Resume, observe: Observer, run: Path, state: State) -> None:
    """Call `accept_checkpoint`, which a run without a checkpoint does not import."""
    from retrain.run.reopen import accept_checkpoint

    accept_checkpoint(state, started, resume.allow_change, observe, run)


def _environment_of(run: Path) -> dict[str, Any]:
    """Return the entries of a run's environment.json that change its numbers; {} if there is no such file."""
    with suppress(StorageError):
        recorded = read_json(run / "environment.json")
        return dict(flatten({name: recorded.get(name) for name in ("packages", "cpu", "threads", "devices")}))
    return {}


def _restore(context: RunContext, state: State | None, resume: Resume, before: Mapping[str, Any]) -> tuple[int, int]:
    """Load a checkpoint if there is one, prepare the findings, and return (steps done, cursor of the task).

    Args:
        before: `_environment_of` the run that is continued.
    """
    start = cursor = 0
    if state is not None:
        with understood(context.directory.path):
            # The file at the same path may have changed; the cursor would then select other problems.
            for change in config_changes(state["loop"]["data"], context.data, resume.allow_change):
                context.observe("message", {"text": f"resuming with {change}", "level": "warning"})
            start, cursor = context.load_state_dict(state)
        now = _environment_of(context.directory.path)
        if others := [
            f"{name} {value} -> {now[name]}" for name, value in before.items() if value != now.get(name, value)
        ]:
            text = (
                f"the steps from here on may differ in rounding from those of an uninterrupted run: {', '.join(others)}"
            )
            context.observe("message", {"text": text, "level": "warning"})
        context.observe("message", {"text": f"resumed after step {start}", "level": "info"})
        logged = _logged(context.directory.path) if context.trackers else []
        for tracker in context.trackers:
            tracker.resumed(logged)
    context.findings = _findings(context, start)
    return start, cursor


def _logged(run: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return what trackers were given before a resume, in this order: step, metrics."""
    rows = [(row["step"], 1, "", row) for row in read_rows(run / "metrics.jsonl")]
    # The evaluation after s steps comes before the metrics of step s, which is the next one.
    rows += [(row["step"], 0, "eval/", row) for row in read_rows(run / "eval.jsonl")]
    rows.sort(key=lambda row: row[:2])
    return [
        (step, {f"{prefix}{name}": value for name, value in row.items() if name != "step"})
        for step, _, prefix, row in rows
    ]


def _findings(context: RunContext, start: int) -> RunFindings | None:
    """Return the findings of a run that has done `start` steps; None on other ranks than 0, or if they are off."""
    if context.ranks.rank or not context.config.logging.findings:
        context.directory.facts = {}
        return None
    rows, evals = (read_rows(context.directory.path / f"{name}.jsonl") for name in ("metrics", "eval"))
    # A resumed run has said this already, and a program's prompts are not known yet.
    problems = map(context.task.problem, range(_PROMPTS)) if start == 0 and context.episode_source is None else ()
    components = context.trained.plan
    evidence = Evidence(
        config=context.config,
        rewards=components.all("reward"),
        losses=components.all("loss"),
        hidden=context.chat.hidden,
        written=context.chat.written.values(),
        prompts=[problem.prompt for problem in problems if isinstance(problem.prompt, str)],
        rows=[*rows],
        evals=[*evals],
    )
    return RunFindings(evidence, start, context.directory, context.observe)


def finish(context: RunContext, seconds: float) -> None:
    """Save the model in transformers format with its card, and report a summary of the run."""
    from retrain.run.export import export

    folder, run = context.directory.path / "model", context.directory.path
    export(context.trained, folder)
    repeated = context.findings.after_run() if context.findings is not None else ""
    with understood(run):
        text = summary(read_rows(run / "metrics.jsonl"), read_rows(run / "eval.jsonl"))
    text += f" It ended early: {context.directory.stop_reason}." if context.directory.stop_reason else ""
    for best in checkpoint.every(run / "best"):
        text += f" The best by {context.config.checkpoint.best} is {best}."
    text += f" {repeated[:1].upper()}{repeated[1:]}." if repeated else ""
    shown = f"Curves and samples: retrain report {run}"
    context.observe("done", {"text": f"{text} It took {seconds / 60:.1f} minutes; the model is in {folder}. {shown}"})
