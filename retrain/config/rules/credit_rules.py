"""Rules about components: requirements of rewards, credit, loss terms and sampling on each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields

from retrain import registry
from retrain.algorithms.graph.objective import source_of
from retrain.algorithms.graph.plain_functions import TransformContext, missing_fields
from retrain.config.loaded_config import LoadedConfig, brings, is_correction, ratio_of, reward_columns
from retrain.config.schema import Config
from retrain.errors import ComponentError, did_you_mean
from retrain.registry import Component, Finding
from retrain.rewards.signatures import form_of

_OVERLAP, _MODE = ("rollout", "overlap"), ("rollout", "mode")
_TRANSFORMS = ("algorithm", "transform_mode")


def answers(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Require that each reward has a known form, and that the task has answers if the reward reads them."""
    for index, reward in enumerate(loaded.all("reward")):
        path = ("rewards", index, "name")
        try:
            required = form_of(reward).required
        except ComponentError as error:
            yield Finding(path, error.problem, error.fix)
            continue
        for task in loaded.all("task"):
            if "answer" in required and task.params.get("answer_field") == "":
                problem = (
                    f'reward "{reward.name}" reads the answer, but with [{task.name}] answer_field = "" rows have none'
                )
                yield Finding(path, problem, "set answer_field to the column, or choose a reward without an answer")


def idle(loaded: LoadedConfig) -> dict[int, str]:
    """Find rewards that do not affect any advantage, because nothing reads the sum of rewards.

    Returns:
        Index of the reward -> reason.
    """
    rewards, used = loaded.all("reward"), loaded.contributing
    reads = {*loaded.objective(exact=False).reads, *(name for stage in used for name in stage.reads)}
    if {"rewards", "reward_parts", "turn_rewards"} & reads:
        return {}
    credit = next((stage.name for stage in used if stage.kind in ("advantage", "algorithm", "transform")), "the loss")
    reason = f'"{credit}" does not read the sum of rewards, so this one does not affect training'
    judges = [index for index, reward in enumerate(rewards) if registry.reward.traits_of(reward).correctness]
    return {
        index: reason + (" unless the rewards before it return None" if index in judges else "")
        for index, reward in enumerate(rewards)
        # The first reward that measures correctness decides `correct`, whatever reads the sum.
        if reward.params["weight"] != 0 and index not in (judges or [0])[:1]
    }


def compared_rewards(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Refuse a baseline of greedy completions for a reward that compares the completions of a group."""
    for index, reward in enumerate(loaded.all("reward")):
        with suppress(ComponentError):  # an unknown form: `answers` reports it
            if "greedy_rewards" in loaded.pipeline.reads and form_of(reward).name == "group":
                problem = f'"{reward.name}" compares the completions of a group, and the greedy one is scored alone'
                fix = "use an advantage that compares within the group, such as grpo"
                yield Finding(("rewards", index, "name"), problem, fix)


def decoupled_rewards(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Require as many rewards, or parts of their scores, as an advantage compares."""
    count = len(reward_columns(loaded.all("reward")))
    for slot, component in loaded.slots.items():
        if slot.kind == "advantage" and count < registry.advantage.traits_of(component).least_rewards:
            problem = f"{component.name} normalises each reward on its own, and the run has {count}"
            fix = 'list two [[rewards]] at least, or a judge with a rubric, or use advantage_mode = "grpo_std"'
            yield Finding(slot.path, problem, fix)


def continuations(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Refuse credit that continues completions from a prefix in runs that cannot: environments and overlap."""
    path = ("algorithm", "algorithm_mode")
    for stage in loaded.pipeline.graph:
        if "continue_from" not in stage.needs:
            # A resumed run builds the batch of a step that was sampled ahead from its rollouts alone. The teacher has a
            # rule of its own.
            is_foreign = stage.source != "built-in"
            if config.rollout.ahead and is_foreign and "problems" in stage.reads:
                problem = f'"{stage.name}" reads the problems, which a step that is sampled ahead loses when it resumes'
                ahead = ("rollout", "mode" if config.rollout.continuous else "overlap")
                yield Finding(ahead, problem, f"set [rollout] {_paused(config)}")
            continue
        if config.environment.name is not None:
            problem = f'"{stage.name}" continues completions from a prefix, and training replays no environment'
            yield Finding(path, problem, "use other credit, such as turn_returns")
        if config.rollout.ahead:
            problem = f'"{stage.name}" needs the sampler, which is busy with later steps'
            yield Finding(path, problem, f"set [rollout] {_paused(config)}")


def contexts(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Refuse a plain function that reads a field that its context does not have."""
    for slot, component in loaded.slots.items():
        for name in missing_fields(component.target) if component.contract == "context" else ():
            field_names = [item.name for item in fields(TransformContext)]
            fix = did_you_mean(name, field_names, f"its fields: {', '.join(field_names)}")
            yield Finding(slot.path, f'"{component.name}" reads {name} of its context, which has no such field', fix)


def corrections(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Require at most one correction for the sampler, by the loss or by a transform that the update can compute."""
    corrections = [stage for stage in loaded.all("transform") if is_correction(stage)]
    for stage in corrections:
        if why := _no_correction(stage):
            problem = f'"{stage.name}" declares correction=True but {why}'
            yield Finding(_TRANSFORMS, problem, "remove correction=True, or fix the transform")
    # Importance weights would multiply, whereas a token can be dropped twice without harm.
    weights = [stage.name for stage in corrections if not registry.transform.traits_of(stage).drops_only]
    anchored = [term.name for term in loaded.objective(exact=False).terms if "sampler_logprobs" in term.reads]
    if weights and anchored:
        problem = f'"{weights[0]}" corrects twice: "{anchored[0]}" compares with the sampler\'s log-probs itself'
        yield Finding(_TRANSFORMS, problem, f"remove {weights[0]}, or use a loss that reads old_logprobs")
    if len(weights) > 1:
        names = " and ".join(weights)
        problem = f"{names} correct for the sampler, and only one correction is needed"
        yield Finding(_TRANSFORMS, problem, "keep one")


def _no_correction(stage: Component) -> str:
    """Return why the update cannot compute a transform; "" if it can."""
    if stage.stateful or stage.contract != "columns":
        return "is not a function of columns"
    if (writes := registry.transform.traits_of(stage).writes) != "advantages":
        return f"changes {writes}, not advantages"
    return "reads logprobs, so gradients would flow through it: read old_logprobs" if "logprobs" in stage.reads else ""


def expert_rows(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Require a source of expert rows for terms that train on them."""
    terms = {source_of(term): index for index, term in enumerate(loaded.all("loss")) if term.params["weight"] != 0}
    sources = {slot: source for slot, source in loaded.slots.items() if slot.kind == "source"}
    if "expert" in terms and not any(brings(source, "expert") for source in sources.values()):
        index = terms["expert"]
        problem = f'"{loaded.all("loss")[index].name}" trains on expert rows, and no file of them is set'
        fix = 'add [expert] path = "FILE.jsonl"; `retrain task export` writes one for a task with worked solutions'
        yield Finding(("loss", index, "name"), problem, fix)


def own_rows(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Require that a step has at least one prompt besides the rows of sources."""
    batch, group = config.training.batch_size, config.training.group_size
    used = [source for source in loaded.sources.values() if ratio_of(source)]
    prompts, rows = loaded.division
    if prompts < 1:
        whose = "expert rows" if not any(brings(source, "rollouts") for source in used) else "rows of sources"
        problem = f"{sum(rows)} of {batch * group} rows are {whose}: no room for a prompt with {group} completions"
        # Rounded down, so that the number in the message is valid itself.
        most = int((1 - 1 / batch) * 1000) / 1000
        together = "" if len(used) == 1 else " together"
        # With one prompt per step no ratio leaves room for it.
        fix = f"use a ratio of at most {most:g}{together}" if batch > 1 else "raise [training] batch_size"
        slot = next(slot for slot, source in loaded.slots.items() if source is used[0])
        yield Finding((*slot.params_path, registry.source.traits_of(used[0]).ratio), problem, fix)


def stored_rollouts(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Refuse credit that needs the problems of the step if a source brings other rollouts."""
    brought = [source for source in loaded.all("source") if brings(source, "rollouts")]
    for stage in loaded.pipeline.graph if brought else ():
        if "continue_from" in stage.needs or "problems" in stage.reads:
            problem = f'"{stage.name}" needs the problems of the step, and "{brought[0].name}" brings other rollouts'
            yield Finding(("algorithm", "algorithm_mode"), problem, "use other credit, or leave out the source")


def overlap(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Require components that can sample and score while the policy is updated, if `overlap` is set."""
    if not config.rollout.ahead:
        return
    engine, group_filter = loaded.optional("engine"), loaded.one("filter")
    by_outcomes = loaded.pipeline.judges_rollouts
    path = _MODE if config.rollout.continuous else _OVERLAP
    # With "auto" the model decides, so `build` checks the engine that is chosen.
    if engine is not None:
        try:
            check_engine(engine)
        except ComponentError as error:
            yield Finding(path, error.problem, error.fix)
    if config.reward_pool.workers == 0:
        problem = (
            "with [reward_pool] workers = 0 rewards run in the trainer's process and share its random generators and "
            "signal handlers"
        )
        yield Finding(path, problem, f"set {_paused(config)}, or workers >= 1")
    if config.rollout.continuous:  # the filter judges in the trainer's thread, between updates
        return
    if config.rollout.resamples and not by_outcomes:
        problem = f'resampling needs "{group_filter.name}", which reads scores of the policy, and updates change these'
        fix = 'set overlap = 0, resample = "none", or a filter that reads only outcomes, such as "accuracy_band"'
        yield Finding(_OVERLAP, problem, fix)
    elif by_outcomes and group_filter.stateful:
        problem = f'the filter "{group_filter.name}" is a class: its state would depend on timing'
        yield Finding(_OVERLAP, problem, "set overlap = 0, or use a function as filter")


def _paused(config: Config) -> str:
    """Return the setting with which sampling pauses during updates."""
    return 'mode = "steps"' if config.rollout.continuous else "overlap = 0"


def continuous(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Require that the keys of continuous sampling and of sampling ahead do not stand beside each other."""
    if not config.rollout.continuous:
        for key in ("in_flight", "max_staleness"):
            if ("rollout", key) in loaded.places:
                fix = 'set mode = "continuous", or remove it'
                yield Finding(("rollout", key), 'has no effect with mode = "steps"', fix)
        return
    if config.rollout.overlap:
        fix = f"remove overlap, and set max_staleness = {config.rollout.overlap}"
        yield Finding(_OVERLAP, 'has no effect with mode = "continuous", which always samples ahead', fix)


def check_engine(engine: Component) -> None:
    """Raise ComponentError if an engine cannot sample while the trainer updates the policy."""
    if not registry.engine.traits_of(engine).concurrent:
        raise ComponentError(
            f'engine "{engine.name}" does not declare that it can sample while the policy is updated: it may share '
            "random generators or settings of the process with the trainer",
            'set [rollout] overlap = 0 and mode = "steps", or engine = "torch" or "vllm-server"; declare '
            "`concurrent=True` in your own",
        )
