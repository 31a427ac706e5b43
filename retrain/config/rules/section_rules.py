"""Rules that check only keys of sections: model, optimizer, batch sizes, evaluation."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from retrain.config.loaded_config import LoadedConfig
from retrain.config.reported_metrics import metric_problem
from retrain.config.schema import Config
from retrain.config.sections.heldout import Eval
from retrain.config.slots import mixed_labels
from retrain.errors import did_you_mean, install
from retrain.registry import Finding
from retrain.system.files import expanded
from retrain.system.model_paths import problem_with, stored_config


def model_path(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Require that the model is a directory, a name on the hub or a built-in model."""
    if problem := problem_with(config.model.path):
        yield Finding(("model", "path"), *problem)


def quantization(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Require adapters if the weights are quantized."""
    if config.model.quantization and config.model.lora is None:
        problem = "4-bit weights cannot be trained"
        yield Finding(("model", "quantization"), problem, "add [model.lora], or remove quantization")


def run_folder(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Refuse a variable in the path of the runs, which would become a folder of that name."""
    if "$" in config.logging.dir:
        problem = f'"{config.logging.dir}" has a "$", and variables are not replaced in a configuration'
        yield Finding(("logging", "dir"), problem, 'write the path itself, or "~" for the home directory')


def positions(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Require that completions leave room for a prompt in the model's context, if its config.json is local."""
    limit = _positions(config.model.path)
    budgets = {("training", "max_tokens"): config.training.max_tokens, ("eval", "max_tokens"): config.eval.max_tokens}
    for path, most in budgets.items():
        # Equal is too long as well: a prompt has at least one token.
        if limit and most and most >= limit:
            problem = f"{most} tokens of completion leave no room for a prompt in the model's {limit} positions"
            yield Finding(path, problem, f"use at most {limit} minus the tokens of the longest prompt")


def _positions(path: str) -> int | None:
    """Return the model's context length in tokens; None if its config.json is not local or does not contain it."""
    stored = stored_config(path)
    for config in (stored, stored.get("text_config")):  # multimodal models nest the text model's
        if isinstance(config, dict) and isinstance(limit := config.get("max_position_embeddings"), int):
            return limit
    return None


def rounding(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Check that `[model] rounding` fits the data type."""
    model, path = config.model, ("model", "rounding")
    if model.rounding == "stochastic":
        if model.lora is not None:
            problem = "with [model.lora] only float32 adapters are trained, and rounding loses none of their updates"
            yield Finding(path, problem, 'use rounding = "nearest"')
        elif model.dtype == "float32":
            problem = 'with dtype = "float32" no weight is rounded'
            yield Finding(path, problem, 'use dtype = "auto", or rounding = "nearest"')


def gpu_or_cpu(device: str) -> Literal["cuda", "cpu"]:
    """Return the kind of device that `[training] device` means on this machine, without importing torch."""
    # The driver of NVIDIA makes this file; importing torch to ask would take seconds.
    return "cuda" if device != "cpu" and Path("/dev/nvidiactl").exists() else "cpu"


def extras(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Require that the libraries that keys of [model] and [optimizer] need are installed."""
    for path, used, package, extra in (
        (("model", "lora"), config.model.lora, "peft", "lora"),
        (("optimizer", "name"), config.optimizer.name == "adamw8bit", "bitsandbytes", "8bit"),
        (("model", "quantization"), config.model.quantization, "bitsandbytes", "8bit"),
    ):
        # Not imported, because both packages import torch.
        if used and importlib.util.find_spec(package) is None:
            yield Finding(path, f"{package} is not installed", install(extra))


def blocks(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Refuse to shard tensors that are quantized in blocks."""
    four, eight = config.model.quantization is not None, config.optimizer.name == "adamw8bit"
    if config.distributed.shard == "full" and (four or (eight and config.model.lora is None)):
        # Block sizes of bitsandbytes: 64 weights in nf4, 256 values in an 8-bit moment.
        cause, size = ("[model] quantization keeps weights", 64) if four else ("adamw8bit keeps its moments", 256)
        fix = "remove quantization" if four else '[optimizer] name = "adamw"'
        problem = f"{cause} in blocks of {size} weights, which cannot be sharded"
        yield Finding(("distributed", "shard"), problem, f'use shard = "none", or {fix}')


def minibatches(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Require that a step divides into equal minibatches."""
    training = config.training
    rows = training.batch_size * training.group_size
    if rows % training.minibatches:
        yield Finding(
            ("training", "minibatches"),
            f"{rows} completions per step (batch_size {training.batch_size} x group_size {training.group_size}) "
            f"do not divide into {training.minibatches} equal parts",
            f"use a divisor of {rows}",
        )


def micro_batch(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Require that a micro-batch has room for one completion."""
    limit, most = config.training.micro_batch_tokens, config.training.max_tokens
    if limit < most:
        problem = f"{limit} tokens are fewer than one completion of max_tokens = {most}"
        fix = f"use at least {2 * most}, so that the prompt fits as well"
        yield Finding(("training", "micro_batch_tokens"), problem, fix)


def stop_when(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Require exactly one condition in `stop_when`, on a metric that the steps of this run report."""
    stop, path = config.training.stop_when, ("training", "stop_when")
    if stop is None:
        return
    if [stop.above, stop.below, stop.patience].count(None) != 2:
        fix = 'write { metric = "eval/accuracy", above = 0.95 }'
        yield Finding(path, "needs exactly one of above, below and patience", fix)
    # `unmeasured` checks the metrics of evaluations, when the evaluation sets are known.
    if stop.event == "step" and (mistake := metric_problem(stop.metric, loaded)):
        yield Finding((*path, "metric"), *mistake)


def eval_sets(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Require distinct names of evaluation sets, and no sets beside `[[environments]]`."""
    names = [entry.name for entry in config.eval.sets]
    for index, name in enumerate(names):
        at = ("eval", "sets", index, "name")
        if name in names[:index]:
            yield Finding(at, f'two sets are called "{name}"', "rename one of them")
        # eval/task/... and eval/time/... are metrics of every evaluation.
        if name in ("task", "time"):
            yield Finding(at, f'"{name}" is reserved for other metrics of an evaluation', "choose another name")
    if names and config.environments:
        fix = "remove [[eval.sets]], or train in one [environment]"
        yield Finding(("eval", "sets"), "with [[environments]] only their own tasks are evaluated", fix)


def pass_at(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Require at least k completions per problem for pass@k."""
    largest, samples = max(config.eval.pass_at, default=0), config.eval.samples
    if largest > samples:
        problem = f"pass@{largest} needs {largest} completions per problem, and samples = {samples}"
        yield Finding(("eval", "pass_at"), problem, f"use samples = {largest}")


def measured(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Call `unmeasured` for a run without `[[eval.sets]]`; with them it is called after the sets are validated."""
    if not config.eval.sets:
        yield from unmeasured(config, {})


def unmeasured(config: Config, sets: Mapping[str, Eval]) -> Iterator[Finding]:
    """Refuse metrics in `[checkpoint] best` or `[training] stop_when` that no evaluation measures.

    Args:
        config: the sections.
        sets: name of each evaluation set -> its settings.
    """
    measured = [f"eval/{name}" for name in config.eval.shares()] if config.eval.problems or sets else []
    measured += [f"eval/{label}/{name}" for label, settings in sets.items() for name in settings.shares()]
    measured += [f"eval/{label}/{name}" for label in mixed_labels(config) for name in config.eval.shares()]
    asked: list[tuple[tuple[str, ...], str | None]] = [(("checkpoint", "best"), config.checkpoint.best)]
    if (stop := config.training.stop_when) is not None and stop.event == "eval":
        asked.append((("training", "stop_when", "metric"), stop.metric))
    for path, name in asked:
        if name is not None and name not in measured:
            fix = did_you_mean(name, measured, f"one of: {', '.join(measured)}" if measured else "set [eval] problems")
            yield Finding(path, f'no evaluation measures "{name}"', fix)


def replaced(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Refuse `advantage_mode` beside an `algorithm_mode` that replaces it."""
    path = ("algorithm", "advantage_mode")
    if loaded.optional("algorithm") and path in loaded.places:
        yield Finding(path, "algorithm_mode replaces it", "remove one of the two")


def search_paths(config: Config) -> Iterator[Finding]:
    """Require that plug-in directories exist; called before anything is imported from them."""
    for index, folder in enumerate(config.plugins.search_paths):
        if not expanded(folder).is_dir():
            problem, fix = f'there is no directory "{folder}"', "create it, or remove it here"
            yield Finding(("plugins", "search_paths", index), problem, fix)
