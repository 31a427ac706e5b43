"""What the sections of a configuration demand of each other, checked before anything loads."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from retrain.config.document import Document, left_out
from retrain.config.presets import leaves, preset_names
from retrain.config.resolve import mixed_labels
from retrain.config.schema import Config
from retrain.config.sections.heldout import Eval
from retrain.errors import did_you_mean, install
from retrain.system.masking import literal_secrets
from retrain.system.model_paths import RANDOM_MODEL, problem_with
from retrain.system.sandbox import missing

_LARGE_LR = 5e-5
"""Full training of a pretrained model at this rate or above usually ruins it."""


def check(config: Config, document: Document) -> None:
    """Record every contradiction between keys as a problem, and every oddity as a warning."""
    checks = (
        _check_batch,
        _check_micro_batch,
        _check_top_p,
        _check_top_k,
        _check_schedule,
        _check_eval,
        _check_stop,
        _check_measured,
    )
    for one in (*checks, _check_paths, _check_model, _check_extras, _check_algorithm, _check_sandbox):
        with left_out(document):
            one(config, document)
    _check_secrets(document)


def _check_secrets(document: Document) -> None:
    for path in literal_secrets(document.data):
        document.warn(
            path,
            "looks like a secret, which is kept as it is in the run's config.toml and config.resolved.json",
            f"set {path[-1]}_env to the name of an environment variable, and read that where the secret is used",
        )


def _check_batch(config: Config, document: Document) -> None:
    training = config.training
    rows = training.batch_size * training.group_size
    if rows % training.minibatches:
        document.refuse(
            ("training", "minibatches"),
            f"{rows} completions per step (batch_size {training.batch_size} x group_size {training.group_size}) "
            f"do not divide into {training.minibatches} equal parts",
            f"use a divisor of {rows}",
        )
    if training.group_size == 1:
        document.warn(
            ("training", "group_size"),
            "a group of one has nothing to be compared with: every group-relative advantage is 0",
            "use 4 to 16",
        )


def _check_micro_batch(config: Config, document: Document) -> None:
    training = config.training
    if training.micro_batch_tokens < training.max_tokens:
        document.refuse(
            ("training", "micro_batch_tokens"),
            f"{training.micro_batch_tokens} tokens do not hold one completion of max_tokens = {training.max_tokens}",
            f"use at least {2 * training.max_tokens}, so that the prompt fits too",
        )


def _check_top_p(config: Config, document: Document) -> None:
    _refuse_truncation(document, "top_p", config.rollout.top_p, 1)


def _check_top_k(config: Config, document: Document) -> None:
    _refuse_truncation(document, "top_k", config.rollout.top_k, 0)


def _refuse_truncation(document: Document, key: str, value: float, off: int) -> None:
    if value != off:
        document.refuse(
            ("rollout", key),
            f"{value} truncates the distribution that completions are drawn from, not the one that is trained",
            f"use {key} = {off}; [eval] {key} may be anything",
        )


def _check_schedule(config: Config, document: Document) -> None:
    optimizer, training = config.optimizer, config.training
    updates = training.max_steps * training.epochs * training.minibatches
    if 0 < updates <= optimizer.warmup_steps:
        document.warn(
            ("optimizer", "warmup_steps"),
            f"the learning rate rises for {optimizer.warmup_steps} steps and the run has {updates}",
            f"use fewer than {updates}",
        )
    if config.warmup.steps and config.warmup.warmup_steps >= config.warmup.steps:
        document.warn(
            ("warmup", "warmup_steps"),
            f"the learning rate rises for {config.warmup.warmup_steps} of {config.warmup.steps} steps",
            "use about a tenth of steps",
        )


def _check_stop(config: Config, document: Document) -> None:
    stop, path = config.training.stop_when, ("training", "stop_when")
    if stop is None:
        return
    if [stop.above, stop.below, stop.patience].count(None) != 2:
        document.refuse(
            path, "takes one of above, below and patience", 'write { metric = "eval/accuracy", above = 0.95 }'
        )
    elif stop.patience and "rows" in stop.model_fields_set:
        document.refuse((*path, "rows"), "patience counts values already", "remove one of the two")


def _check_eval(config: Config, document: Document) -> None:
    names = [one.name for one in config.eval.sets]
    for index, name in enumerate(names):
        at = ("eval", "sets", index, "name")
        if name in names[:index]:
            document.refuse(at, f'two sets are called "{name}"', "rename one of them")
        if name in ("task", "time"):
            document.refuse(at, f'"{name}" is the name of other figures of an evaluation', "choose another")
    if names and config.environments:
        fix = "remove [[eval.sets]], or train in one [environment]"
        document.refuse(("eval", "sets"), "[[environments]] evaluates each of its tasks, and no other set", fix)
    largest, samples = max(config.eval.pass_at, default=0), config.eval.samples
    if largest > samples:
        document.refuse(
            ("eval", "pass_at"),
            f"pass@{largest} needs as many completions per problem, and samples = {samples}",
            f"use samples = {largest}",
        )


def _check_measured(config: Config, document: Document) -> None:
    if not config.eval.sets:  # their figures are known when they are
        check_measured(config, document, {})


def check_measured(config: Config, document: Document, sets: Mapping[str, Eval]) -> None:
    """Refuse a figure that no evaluation measures, in `[checkpoint] best` or `[training] stop_when`."""
    known = [f"eval/{name}" for name in config.eval.shares()] if config.eval.problems or sets else []
    known += [f"eval/{label}/{name}" for label, settings in sets.items() for name in settings.shares()]
    known += [f"eval/{label}/{name}" for label in mixed_labels(config) for name in config.eval.shares()]
    asked: list[tuple[tuple[str, ...], str | None]] = [(("checkpoint", "best"), config.checkpoint.best)]
    if (stop := config.training.stop_when) is not None and stop.event == "eval":
        asked.append((("training", "stop_when", "metric"), stop.metric))
    for path, name in asked:
        if name is not None and name not in known:
            fix = did_you_mean(name, known, f"one of: {', '.join(known)}" if known else "set [eval] problems")
            document.refuse(path, f'no evaluation measures "{name}"', fix)


def _check_model(config: Config, document: Document) -> None:
    model, lr = config.model, config.optimizer.lr
    if problem := problem_with(model.path):
        document.refuse(("model", "path"), *problem)
    elif model.path != RANDOM_MODEL and model.lora is None and lr >= _LARGE_LR:
        document.warn(("optimizer", "lr"), f"{lr:g} is large for training all weights of a real model", "try 1e-6")


def _check_extras(config: Config, document: Document) -> None:
    lora, eight = config.model.lora is not None, config.optimizer.name == "adamw8bit"
    four = config.model.quantization is not None
    for path, used, package, extra in (
        (("model", "lora"), lora, "peft", "lora"),
        (("optimizer", "name"), eight, "bitsandbytes", "8bit"),
        (("model", "quantization"), four, "bitsandbytes", "8bit"),
    ):
        if used and importlib.util.find_spec(package) is None:
            document.refuse(path, f"{package} is not installed", install(extra))
    if four and not lora:
        document.refuse(
            ("model", "quantization"), "weights of 4 bits can only be frozen", "add [model.lora], or leave it out"
        )
    if (four or (eight and not lora)) and config.distributed.shard == "full":
        what = "[model] quantization keeps weights" if four else "adamw8bit keeps its moments"
        fix = "leave quantization out" if four else '[optimizer] name = "adamw"'
        document.refuse(
            ("distributed", "shard"),
            f"{what} in blocks of {64 if four else 256} weights, which cannot be spread over ranks",
            f'use shard = "none", or {fix}',
        )


def _check_paths(config: Config, document: Document) -> None:
    for path, value in leaves(document.data):
        if isinstance(value, str) and "\0" in value:
            document.refuse(path, "holds a NUL character, which no path or name can", "remove it")
    for index, place in enumerate(config.plugins.search_paths):
        if not Path(place).expanduser().is_dir():
            document.refuse(
                ("plugins", "search_paths", index), f'there is no directory "{place}"', "make it, or remove it here"
            )


def _check_algorithm(config: Config, document: Document) -> None:
    if config.algorithm.algorithm_mode not in (None, *preset_names()):
        for key in ("advantage_mode", "transform_mode"):
            if ("algorithm", key) in document.places:
                document.warn(("algorithm", key), "algorithm_mode replaces it", "remove one of the two")


def _check_sandbox(config: Config, document: Document) -> None:
    if config.reward_pool.sandbox != "require":
        return
    reason = "workers = 0 runs rewards in the trainer" if config.reward_pool.workers == 0 else missing()
    if reason:
        problem = f"there is no sandbox for rewards: {reason}"
        document.refuse(("reward_pool", "sandbox"), problem, 'use "auto", which trains without one')
