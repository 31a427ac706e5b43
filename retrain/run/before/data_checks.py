"""Checks of the data before a model is loaded: problems, reference answers, demonstrations and expert rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from retrain import registry
from retrain.config.document import Document
from retrain.config.loaded_config import LoadedConfig
from retrain.config.positions import KeyPath
from retrain.config.schema import Config
from retrain.config.slots import labels
from retrain.errors import ComponentError, DataError
from retrain.protocols import Task
from retrain.registry import Component
from retrain.rewards.signatures import form_of
from retrain.run.before.environment_checks import check_interpreter
from retrain.system.model_paths import RANDOM_MODEL, model_location
from retrain.types import Problem

_SHOWN = 10
"""Largest number of rows that an error lists."""
_HELDOUT, _DEMONSTRATIONS = 64, 1000
"""Largest numbers of problems that are checked before training. Later problems are checked when training uses them."""
_SAMPLE_S = 1.0
"""Processor time for generating held-out problems, in seconds."""


def check_data(loaded: LoadedConfig, built: Mapping[str, Task] = MappingProxyType({})) -> None:
    """Report errors in data and environments that training would otherwise meet only after it has loaded the model.

    Args:
        loaded: the configuration.
        built: tasks of the run (under the name "") and of its `[[eval.sets]]`. If empty, tasks are built here, except
            for data sets that may have to be downloaded (trait `remote`), and the demonstrations of the warm start are
            checked as well.

    Raises:
        ConfigError: all errors with their places.
        UserCodeError: a task raised an exception.
    """
    if loaded.config.environment.python is not None and labels(loaded.config):
        check_interpreter(loaded)
    document = Document(loaded.file, loaded.text, places=dict(loaded.places))
    _check_groups_of_one(loaded, document)
    _check_micro_batches(loaded, document)
    sets = {entry.name: index for index, entry in enumerate(loaded.config.eval.sets)}
    for name, config in {"": loaded, **loaded.sets}.items():
        at = ("eval", "sets", sets[name], "name") if name else ("task", "name")
        if not built and any(registry.task.traits_of(task).remote for task in config.all("task")):
            continue
        try:
            # The warm start imitates the problems of its own seed; held-out problems are the same for all seeds.
            task = built[name] if built else config.task(loaded.config.warmup.seed)
            _check_task(config, task, document, () if not name else at)
            if not name and not built and loaded.config.warmup.steps:
                _check_demonstrations(loaded.config, task, document)
        except ComponentError as error:
            document.refuse(at, error.problem, error.fix)
        except DataError as error:
            document.refuse(at, str(error), "", DataError.exit_code)
    if not built:
        for path, error in unreadable_sources(loaded):
            document.refuse(path, str(error), "", DataError.exit_code)
    document.stop()


def _check_groups_of_one(loaded: LoadedConfig, document: Document) -> None:
    """Refuse groups of one completion whose credit is always 0, or which the filter always drops."""
    if loaded.config.training.group_size > 1:
        return
    from retrain.run.before.probe import gives_no_credit  # imports torch

    if gives_no_credit(loaded):
        problem = "a group of one completion has nothing to be compared with, so no step trains on anything"
        fix = 'use 4 to 16, or [algorithm] filter = "none" with credit that needs no group, as vanilla or [critic]'
        document.refuse(("training", "group_size"), problem, fix)


def _check_micro_batches(loaded: LoadedConfig, document: Document) -> None:
    """Refuse a loss of the user whose values depend on the rows of its micro-batch."""
    objective = loaded.objective(exact=False)
    for slot, term in loaded.slots.items():
        if slot.kind == "loss" and term in objective.terms and term.source != "built-in":
            from retrain.run.before.probe import depends_on_rows  # imports torch, as the module of the loss does

            if depends_on_rows(term, objective):
                problem = "its values on a row depend on the other rows, of which a micro-batch has only some"
                fix = "compute the statistic of the batch in a signal that reads logprobs, and let the loss read that"
                document.refuse(slot.path, problem, fix)


def _check_task(loaded: LoadedConfig, task: Task, document: Document, only_measured: KeyPath) -> None:
    """Record errors if a task's problems do not meet the requirements of evaluation, rewards and chat template.

    Args:
        loaded: the configuration.
        task: task with the problems.
        document: document that receives the errors.
        only_measured: path of the key that names an evaluation set, whose task is not trained on; () for the run.
    Raises:
        DataError: the task has no problem to train on.
    """
    config = loaded.config
    # An evaluation set may hold out every row, and then has no training problem to time.
    most = _HELDOUT if only_measured else min(_HELDOUT, _affordable(task))
    heldout = task.heldout(min(config.eval.problems, most)) if config.eval.problems else []
    if config.eval.problems and not heldout:
        problem = f"{config.eval.problems} held-out problems were asked for, and the task has none"
        fix = "let the task hold out more of its data, or set [eval] problems = 0 to train without evaluation"
        document.refuse(only_measured or ("eval", "problems"), problem, fix, DataError.exit_code)
    # A function, because each reward reads the problems anew.
    _check_problems(loaded, lambda: chain(heldout, task.finite()), document, only_measured)
    for problem in [*heldout[:1], *([] if only_measured else [task.problem(0)])]:
        _check_columns(loaded, problem, document)
        # A prompt of messages cannot be rendered without a template.
        is_chat = config.model.chat == "on" or not isinstance(problem.prompt, str)
        if is_chat and _has_chat_template(config) is False:
            text = f"the prompts are chats, and {config.model.path} has no chat template to render them"
            fix = 'use an instruct model, or text prompts without a system_prompt, and chat = "auto"'
            document.refuse(("model", "path"), text, fix, DataError.exit_code)


def _affordable(task: Task) -> int:
    """Estimate the number of held-out problems that can be generated in `_SAMPLE_S`, if one in eight is held out."""
    task.problem(0)  # the first one may load the data
    began = time.process_time()
    task.problem(1)
    # 1e-9: the clock may not have moved.
    return max(1, int(_SAMPLE_S / (8 * (time.process_time() - began) + 1e-9)))


def _check_problems(
    loaded: LoadedConfig, problems: Callable[[], Iterable[Problem]], document: Document, at: KeyPath
) -> None:
    """Record an error for problems that a reward cannot score, by its traits `answers` and `problems`.

    A run with an environment is not checked, because only training shows which episodes the rewards score.
    """
    if labels(loaded.config):
        return
    for index, reward in enumerate(loaded.all("reward")):
        check = _check_of(reward)
        wrong = {problem.place or problem.id: why for problem in problems() if (why := check(problem))} if check else {}
        if wrong:
            listed = "; ".join(f"{name}: {text}" for name, text in [*wrong.items()][:_SHOWN])
            more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            fix = f'correct these rows, or the settings of "{reward.name}", or use another reward'
            document.refuse(at or ("rewards", index, "name"), f"{listed}{more}", fix, DataError.exit_code)


def _check_of(reward: Component) -> Callable[[Problem], str] | None:
    """Return a function that says why a reward cannot score a problem, or ""; None if it can score all."""
    traits = registry.reward.traits_of(reward)
    answers, problems, params = traits.answers, traits.problems, reward.params
    if answers is None and problems is None:
        return None
    return lambda problem: (
        (answers(problem.answer) if answers else "") or (problems(params, problem.facts) if problems else "")
    )


def _check_demonstrations(config: Config, task: Task, document: Document) -> None:
    """Record an error if a problem of the warm start has no demonstration."""
    field = "replies" if labels(config) else "solution"
    count = min(config.warmup.problems, config.warmup.steps * config.warmup.batch_size, _DEMONSTRATIONS)
    lacking = next(
        (problem for problem in map(task.problem, range(count)) if getattr(problem, field) in (None, ())), None
    )
    if lacking is not None:
        text = f"the warm start imitates worked solutions, and problem {lacking.id!r} has no {field}"
        fix = "set [warmup] steps = 0, or give the task solutions"
        document.refuse(("warmup", "steps"), text, fix, DataError.exit_code)


def _check_columns(loaded: LoadedConfig, problem: Problem, document: Document) -> None:
    """Record an error if a reward with the signature of another trainer reads a column that the data do not have."""
    columns = {"completion": "", "answer": problem.answer, "problem": problem.facts, "completion_ids": ()}
    for index, reward in enumerate(loaded.all("reward")):
        form = form_of(reward)
        try:
            if form.name not in ("retrain", "group"):
                form.arguments([{name: columns[name] for name in form.reads}])
        except ValueError as error:
            fix = "rename the column, or the parameter"
            document.refuse(("rewards", index, "name"), f'reward "{reward.name}": {error}', fix, DataError.exit_code)


def _has_chat_template(config: Config) -> bool | None:
    """Return True if the model has a chat template; None if the model must be downloaded to know."""
    if config.model.path == RANDOM_MODEL or config.model.chat == "off":
        return False
    folder = Path(model_location(config.model.path))
    if not folder.is_dir():
        return None
    file = folder / "tokenizer_config.json"
    has_template = file.is_file() and "chat_template" in file.read_text(encoding="utf-8", errors="replace")
    # Newer versions of transformers write the template to a file of its own.
    return has_template or any(folder.glob("*chat_template*"))


def unreadable_sources(loaded: LoadedConfig) -> Iterator[tuple[KeyPath, DataError]]:
    """Read the files of the sources in use; yield errors with the keys that name the files."""
    for slot, source in loaded.in_use.items():
        read = registry.source.traits_of(source).read if slot.kind == "source" else None
        if read is not None and (path := source.params[read[0]]) is not None:
            at = (*slot.params_path, read[0])
            try:
                read_rows: Any = read[1](path)
            except DataError as error:
                yield at, error
                continue
            problems = cast("list[Any]", read_rows) if isinstance(read_rows, list) else []
            chat = next((row for row in problems if isinstance(row, Problem) and _is_chat(row)), None)
            if chat is not None and _has_chat_template(loaded.config) is False:
                fix = "use an instruct model, or rows of text or of a single message of the user"
                text = f"{chat.id}: the row is a chat, and {loaded.config.model.path} renders none; {fix}"
                yield at, DataError(text)


def _is_chat(row: Problem) -> bool:
    """Return True if a prompt needs a chat template; a single message of the user counts as text without one."""
    return not isinstance(row.prompt, str) and [message["role"] for message in row.prompt] != ["user"]
