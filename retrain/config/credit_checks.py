"""What the components of a run demand of each other and of the data."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path as FilePath
from types import MappingProxyType

from retrain import registry
from retrain.algorithms.graph.column_graph import Stage
from retrain.algorithms.graph.objective import Objective, source_of
from retrain.algorithms.graph.pipeline import Pipeline
from retrain.config.document import Document
from retrain.config.positions import Path
from retrain.config.resolve import LoadedConfig, Resolved, division, is_correction, labels
from retrain.config.schema import Config
from retrain.errors import ComponentError, ConfigError, DataError, install
from retrain.protocols import Task
from retrain.registry import Bound, Component
from retrain.rewards.signatures import form_of
from retrain.system.files import NO_FILE_FIX, no_file
from retrain.system.model_paths import RANDOM_MODEL, model_location
from retrain.types import POLICY_COLUMNS, Problem

_OVERLAP = ("rollout", "overlap")
_SHOWN = 10
"""Rows that a mistake names."""
_HELDOUT, _DEMONSTRATIONS = 64, 1000
"""Problems that are looked at before training, however many the file asks for; those that are left out may still be
refused when they are reached."""


def check_credit(
    config: Config, document: Document, resolved: Resolved, objective: Objective, graph: Sequence[Stage]
) -> None:
    """Record combinations that cannot do what they are for, and warn of those that hardly can.

    Args:
        graph: the stages of credit in order, signals included.
    """
    _check_mismatch(document, resolved)
    _check_filter(config, document, resolved)
    _check_terms(config, document, objective)
    _check_continued(config, document, graph)
    for index, why in idle_rewards(resolved, objective, graph).items():
        fix = "give it weight = 0 to record it alone, or choose an advantage_mode that reads rewards"
        document.warn(("rewards", index, "name"), why, fix)


def _check_continued(config: Config, document: Document, graph: Sequence[Stage]) -> None:
    """Record why completions of this run cannot be continued from their middle, where a stage does that."""
    for stage in (one for one in graph if "problems" in one.reads):
        path = ("algorithm", "algorithm_mode")
        if config.environment.name is not None:
            problem = f'"{stage.name}" continues completions from their middle, where an environment cannot be put back'
            document.refuse(path, problem, "use other credit, such as turn_returns")
        if config.rollout.overlap:
            document.refuse(
                path, f'"{stage.name}" needs the sampler, which is ahead of it', "use [rollout] overlap = 0"
            )


def idle_rewards(resolved: Resolved, objective: Objective, graph: Sequence[Stage]) -> dict[int, str]:
    """Rewards that change no advantage, by index, with the reason: nothing reads the sum that they are part of."""
    if any("rewards" in (*stage.reads, *objective.reads) for stage in graph):
        return {}
    credit = next(stage.name for stage in graph if stage.kind in ("advantage", "algorithm"))
    reason = f'"{credit}" does not read the sum of rewards, so this one trains nothing'
    judges = [
        index for index, one in enumerate(resolved.all("reward")) if one.component.traits.get("correctness", True)
    ]
    return {
        index: reason + (" unless the rewards before it have no opinion" if index in judges else "")
        for index, one in enumerate(resolved.all("reward"))
        if one.params["weight"] != 0 and index not in judges[:1]
    }


def _check_mismatch(document: Document, resolved: Resolved) -> None:
    corrections = [stage for stage in resolved.all("transform") if is_correction(stage)]
    path = ("algorithm", "transform_mode")
    for stage in corrections:
        if why := _no_correction(stage):
            document.refuse(path, f'"{stage.name}" says correction=True and {why}', "drop correction=True, or mend it")
    if len(corrections) > 1:
        document.refuse(
            path,
            f"{' and '.join(stage.name for stage in corrections)} correct for the sampler, and one correction undoes "
            "the need of the other",
            "keep one",
        )


def _no_correction(stage: Bound) -> str:
    """Why a transform cannot be made in the update; nothing if it can."""
    component = stage.component
    if component.stateful or component.contract != "columns":
        return "is no function of columns"
    if component.traits.get("writes", "advantages") != "advantages":
        return f"changes {component.traits['writes']}, not advantages"
    return "reads logprobs, which would be trained through it: read old_logprobs" if "logprobs" in stage.reads else ""


def _check_filter(config: Config, document: Document, resolved: Resolved) -> None:
    bound = resolved.one("filter")
    if config.rollout.resamples and not bound.component.traits.get("drops", True):
        problem = f'filter = "{bound.name}" keeps every group: there is nothing to replace'
        document.warn(("rollout", "resample"), problem, "name a filter")


def _check_terms(config: Config, document: Document, objective: Objective) -> None:
    training = config.training
    updates = training.epochs * training.minibatches
    blind = {one.name for one in registry.components("signal", trait="judges") if not one.traits["judges"]}
    blind |= {"logprobs", "response_mask", *POLICY_COLUMNS}  # columns that do not tell how good a completion is
    ungraded = [term for term in objective.terms if set(term.reads) <= blind]
    if len(ungraded) == len(objective.terms) and "expert" not in objective.sources:
        document.warn(("loss",), "no term reads the advantages: rewards teach the policy nothing", 'add "ppo_clip"')
    for term in objective.terms:
        if updates > 1 and source_of(term) == "policy" and "advantages" in term.reads and _on_policy(term.reads):
            document.warn(
                ("loss",),
                f'"{term.name}" has no ratio, and of {updates} updates per step only the first is of the policy that '
                "sampled",
                "use ppo_clip or cispo, or one epoch and one minibatch",
            )


def _on_policy(reads: Sequence[str]) -> bool:
    return "old_logprobs" not in reads and "sampler_logprobs" not in reads


def check_expert(config: Config, document: Document, terms: Sequence[Bound]) -> None:
    """Record what keeps expert rows from being trained on.

    Args:
        terms: of the loss, in the order of the configuration.
    """
    sources = {source_of(term): index for index, term in enumerate(terms) if term.params["weight"] != 0}
    if "expert" in sources:
        _check_file(config, document, terms[sources["expert"]].name, sources["expert"])
        _check_room(config, document)
    elif config.expert.path is not None:
        fix = 'add [[loss]] name = "sft", or remove the table'
        document.warn(("expert",), "no loss term trains on expert rows", fix)


def _check_file(config: Config, document: Document, term: str, index: int) -> None:
    path = config.expert.path
    if path is None:
        document.refuse(
            ("loss", index, "name"),
            f'"{term}" trains on expert rows, and no file is named that has them',
            'add [expert] path = "FILE.jsonl"; `retrain task export` writes one for a task with worked solutions',
        )
    elif problem := no_file(path):
        document.refuse(("expert", "path"), problem, NO_FILE_FIX, DataError.exit_code)
    elif not path.endswith((".jsonl", ".parquet")):
        document.refuse(("expert", "path"), f'"{path}" is neither .jsonl nor .parquet', "convert or rename it")
    elif path.endswith(".parquet") and importlib.util.find_spec("pyarrow") is None:
        document.refuse(("expert", "path"), "pyarrow is not installed", install("parquet"))


def _check_room(config: Config, document: Document) -> None:
    """Group-relative advantages need at least one prompt beside the expert's rows."""
    batch, group = config.training.batch_size, config.training.group_size
    prompts, rows = division(config, expert=True)
    if prompts < 1:
        most = int((1 - 1 / batch) * 1000) / 1000
        document.refuse(
            ("expert", "ratio"),
            f"{rows} of {batch * group} rows are an expert's: no room for a prompt with {group} completions",
            f"use a ratio of at most {most:g}" if batch > 1 else "raise [training] batch_size",
        )


def check_overlap(config: Config, document: Document, resolved: Resolved, pipeline: Pipeline) -> None:
    """Record why batches of this configuration cannot be collected beside the update."""
    if not config.rollout.overlap:
        return
    engine, judge = resolved.optional("engine"), resolved.one("filter")
    if engine is not None:
        try:
            check_engine(engine.component)
        except ComponentError as error:
            document.refuse(_OVERLAP, error.problem, error.fix)
    if config.reward_pool.workers == 0:
        problem = "with [reward_pool] workers = 0 rewards run beside the trainer and share its generators and signals"
        document.refuse(_OVERLAP, problem, "use overlap = 0, or a worker")
    if config.rollout.resamples and not pipeline.judges_rollouts:
        document.refuse(
            _OVERLAP,
            f'to replace groups, "{judge.name}" reads what the policy scores, and that changes meanwhile',
            'use overlap = 0, resample = "none", or a filter of outcomes alone such as "accuracy_band"',
        )
    elif pipeline.judges_rollouts and judge.component.stateful:
        problem = f'the filter "{judge.name}" is a class: what it remembers would depend on timing'
        document.refuse(_OVERLAP, problem, "use overlap = 0, or a function")


def check_engine(engine: Component) -> None:
    """ComponentError if an engine cannot sample while the trainer updates."""
    if not engine.traits.get("concurrent", False):
        raise ComponentError(
            f'engine "{engine.name}" shares generators or settings of the process with the '
            "trainer, and does not say that it can sample while the policy is updated",
            'use [rollout] overlap = 0, or engine = "torch" or "vllm-server"; your own says `concurrent=True`',
        )


def check_data(loaded: LoadedConfig, built: Mapping[str, Task] = MappingProxyType({})) -> None:
    """Refuse what training would refuse of its data after it has loaded the model, or after the warm start.

    Args:
        built: the tasks of the run and of its `[[eval.sets]]`, the run's with the name "". Without them they are built
            here, but for data sets that may have to be fetched (trait `remote`), and what the warm start imitates is
            checked as well.

    Raises:
        ConfigError: every mistake with its place; UserCodeError: a task of the user's raised.
    """
    document = Document(loaded.file, loaded.text, places=dict(loaded.places))
    sets = {entry.name: index for index, entry in enumerate(loaded.config.eval.sets)}
    for name, one in {"": loaded, **loaded.sets}.items():
        at = ("eval", "sets", sets[name], "name") if name else ("task", "name")
        if not built and any(task.component.traits.get("remote") for task in one.components.all("task")):
            continue
        try:
            # The problems that the warm start imitates are those of its seed; all seeds have the same held-out ones.
            task = built[name] if built else one.task(loaded.config.warmup.seed)
            _check_task(one, task, document, () if not name else at)
            if not name and not built and loaded.config.warmup.steps:
                _check_demonstrations(loaded.config, task, document)
        except DataError as error:
            document.refuse(at, str(error), "", DataError.exit_code)
    if not built:
        _check_expert_rows(loaded, document)
    if document.problems:
        raise ConfigError(list(dict.fromkeys(document.problems)))


def _check_task(loaded: LoadedConfig, task: Task, document: Document, only_measured: Path) -> None:
    """Record what evaluation, rewards and chat template want of a task's problems and do not find.

    Args:
        only_measured: the name of an evaluation set, whose task is not trained on; () of the run itself.
    Raises:
        DataError: the task has no problem to train on.
    """
    config = loaded.config
    heldout = task.heldout(min(config.eval.problems, _HELDOUT)) if config.eval.problems else []
    if config.eval.problems and not heldout:
        problem = f"{config.eval.problems} held-out problems were asked for, and the task has none"
        fix = "let the task hold out more of its data; for training alone, [eval] problems = 0"
        document.refuse(only_measured or ("eval", "problems"), problem, fix, DataError.exit_code)
    _check_answers(loaded, lambda: chain(heldout, task.finite()), document, only_measured)
    for problem in [*heldout[:1], *([] if only_measured else [task.problem(0)])]:
        _check_columns(loaded, problem, document)
        is_chat = config.model.chat == "on" or not isinstance(problem.prompt, str)
        if is_chat and _has_chat_template(config) is False:
            text = f"the prompts are chats, and {config.model.path} has no chat template to render them"
            fix = 'use an instruct model, or text prompts without a system_prompt, and chat = "auto"'
            document.refuse(("model", "path"), text, fix, DataError.exit_code)


def _check_answers(
    loaded: LoadedConfig, problems: Callable[[], Iterable[Problem]], document: Document, at: Path
) -> None:
    """Refuse reference answers that a reward cannot compare with, as its trait `answers` says.

    Where an environment answers the model, nothing tells before training which episodes the rewards score.
    """
    if labels(loaded.config):
        return
    for index, reward in enumerate(loaded.components.all("reward")):
        check = reward.component.traits.get("answers")
        wrong = {one.id: text for one in problems() if (text := check(one.answer))} if check else {}
        if wrong:
            listed = "; ".join(f"{name}: {text}" for name, text in [*wrong.items()][:_SHOWN])
            more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            fix = f'correct these rows, or compare with another reward than "{reward.name}"'
            document.refuse(at or ("rewards", index, "name"), f"{listed}{more}", fix, DataError.exit_code)


def _check_demonstrations(config: Config, task: Task, document: Document) -> None:
    """The warm start needs something to imitate of each of its problems."""
    what = "replies" if labels(config) else "solution"
    count = min(config.warmup.problems, config.warmup.steps * config.warmup.batch_size, _DEMONSTRATIONS)
    lacking = next((one for one in map(task.problem, range(count)) if getattr(one, what) in (None, ())), None)
    if lacking is not None:
        text = f"the warm start imitates worked solutions, and problem {lacking.id!r} has no {what}"
        fix = "set [warmup] steps = 0, or give the task solutions"
        document.refuse(("warmup", "steps"), text, fix, DataError.exit_code)


def _check_columns(loaded: LoadedConfig, problem: Problem, document: Document) -> None:
    """Rewards of other trainers read columns of the data by their names."""
    known = {"completion": "", "answer": problem.answer, "problem": problem.facts, "completion_ids": ()}
    for index, reward in enumerate(loaded.components.all("reward")):
        form = form_of(reward.component)
        try:
            if form.name != "retrain":
                form.arguments([{name: known[name] for name in form.reads}])
        except ValueError as error:
            fix = "rename the column, or the parameter"
            document.refuse(("rewards", index, "name"), f'reward "{reward.name}": {error}', fix, DataError.exit_code)


def _has_chat_template(config: Config) -> bool | None:
    """Whether the model at this path has one; None where only loading it tells."""
    if config.model.path == RANDOM_MODEL or config.model.chat == "off":
        return False
    folder = FilePath(model_location(config.model.path))
    if not folder.is_dir():
        return None
    known = "chat_template" in _text(folder / "tokenizer_config.json")
    return known or any(folder.glob("*chat_template*"))


def _text(file: FilePath) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _check_expert_rows(loaded: LoadedConfig, document: Document) -> None:
    if "expert" in loaded.objective.sources and loaded.config.expert.path is not None:
        from retrain.data.expert_file import read_experts

        try:
            read_experts(loaded.config.expert.path)
        except DataError as error:
            document.refuse(("expert", "path"), str(error), "", DataError.exit_code)
