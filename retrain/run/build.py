"""Build the context of a run from a validated configuration."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from retrain import registry
from retrain.config.loaded_config import LoadedConfig, reward_columns
from retrain.config.rules.credit_rules import check_engine
from retrain.config.schema import Config
from retrain.config.slots import labels
from retrain.engines.capability import choose_engine
from retrain.errors import ComponentError, RetrainError
from retrain.functional.devices import matmul_dtype
from retrain.protocols import ALONE, Ranks, RowSource, Sampler, Task
from retrain.registry import Component
from retrain.registry.call import described
from retrain.rewards.pool import RewardPool
from retrain.run.before.data_checks import check_data, unreadable_sources
from retrain.run.collectors.continuations import Continuations
from retrain.run.run_context import RunContext, TrainState
from retrain.storage.run_directory import RunDirectory
from retrain.system.model_paths import model_location, positions, rope_length
from retrain.system.process import cpu_threads
from retrain.training.cpu_kernels import keep_freed_memory
from retrain.training.layout import Layout
from retrain.training.model.loading import Loaded, load_model
from retrain.training.policy import TorchPolicy
from retrain.training.settings import LoraSettings, PolicySettings, Shard
from retrain.training.warmup import WarmupSettings, warm_start
from retrain.types import ExpertRow, Observer

if TYPE_CHECKING:
    from retrain.environments.env_pool import EnvPool
    from retrain.tracking.tracker_guard import SafeTracker

_VOCABULARY_PROBLEMS = 2000
"""A built-in model's tokenizer is made from the texts of this many problems."""


def build(loaded: LoadedConfig, directory: RunDirectory, observe: Observer) -> RunContext:
    """Build everything that a run needs, and run the warm start. Every rank calls this.

    Raises:
        ComponentError: a component asks for a resource that this run does not have.
        ConfigError: the configuration reads fields that the data do not have.
        DataError: the data cannot be used.
        StorageError: the model cannot be read.
    """
    config = loaded.config
    observe("phase", {"name": "loading the task and the model"})
    tasks = {
        name: config_of_set.task(config_of_set.config.training.seed)
        for name, config_of_set in {"": loaded, **loaded.sets}.items()
    }
    # With the tasks of the run, so that data are read once.
    check_data(loaded, tasks)
    task = tasks[""]
    if (curriculum := loaded.optional("curriculum")) is not None:
        task: Task = curriculum.build({"seed": config.training.seed, "task": task})
    # Before the model is loaded, which takes minutes.
    for _, error in unreadable_sources(loaded):
        raise error
    context = build_sampling(loaded, directory, task, observe)
    model, resources, ranks = context.trained.loaded, context.trained.resources, directory.ranks
    for text in _model_warnings(config, model, task, context.trained.policy.device):
        observe("message", {"text": text, "level": "warning"})
    context.pool = reward_pool(loaded, ranks, directory.path)
    context.env_pool = build_env_pool(loaded, model, ranks, directory.path)
    if context.env_pool is None:
        # Continuations need the sampler, which did not exist when the resources were made.
        continue_from: Continuations = resources["continue_from"]
        continue_from.begin(config, model, context.sampler, context.pool)
    context.row_sources = _row_sources(loaded, resources, observe)
    # With several ranks, each of them would record every step.
    trackers = () if ranks.rank else loaded.all("tracker")
    context.trackers = _trackers(trackers, resources, observe)
    context.sets = {
        name: _measured(context, config_of_set, loaded, tasks[name]) for name, config_of_set in loaded.sets.items()
    }
    return context


def _model_warnings(config: Config, model: Loaded, task: Task, device: torch.device) -> Iterator[str]:
    """Yield what the model or its chat template does unexpectedly in this run."""
    prompt = task.problem(0).prompt
    if warning := model.chat.warning(prompt):
        yield warning
    if model.chat.dated(prompt):
        yield (
            "the chat template writes today's date into prompts, so that this run's prompts change from day to day; "
            "fix it by [model] chat_params, if the template has a variable for it (Llama 3: date_string)"
        )
    fixed = rope_length(model.model)
    if config.training.max_tokens + (config.training.max_prompt_tokens or math.inf) > fixed:
        yield (
            f"the rotary frequencies of this model hold up to {fixed:g} tokens; with a longer row they "
            "change for its whole micro-batch, and trainer and sampler disagree; set [training] max_prompt_tokens so "
            "that prompt and max_tokens stay below"
        )
    if config.model.dtype == "bfloat16" and matmul_dtype(device) is torch.float32:
        yield (
            '[model] dtype = "bfloat16": this processor has no instructions for it, and float32 is several times '
            'faster; set [model] dtype = "auto"'
        )


def _measured(context: RunContext, config_of_set: LoadedConfig, loaded: LoadedConfig, task: Task) -> RunContext:
    """Return the context for one of `[[eval.sets]]`, with its settings and task.

    It shares the reward pool of training unless the set configures rewards of its own.
    """
    pool = context.pool
    if config_of_set.config.rewards != loaded.config.rewards:
        pool = reward_pool(config_of_set, context.ranks, context.directory.path)
    return replace(context, config=config_of_set.config, task=task, pool=pool)


def build_sampling(loaded: LoadedConfig, directory: RunDirectory, task: Task, observe: Observer) -> RunContext:
    """Build what samples from a model: a context without rewards, environment, row sources and trackers."""
    config, ranks = loaded.config, directory.ranks
    observe("phase", {"name": "loading the model"})
    if config.rollout.continuous and ranks.size > 1:
        raise ComponentError('[rollout] mode = "continuous" needs a single rank', 'set mode = "steps" and overlap')
    trained = build_trained(loaded, directory.path, ranks, observe)
    sampler = _sampler(trained.engine, trained.resources, ranks)
    if config.rollout.continuous:
        from retrain.engines.delegating import for_continuous_sampling

        sampler = for_continuous_sampling(sampler)
    observe("message", {"text": sampler.describe(), "level": "info"})
    model, training, columns = trained.loaded, config.training, tuple(reward_columns(loaded.all("reward")))
    device, mask = trained.policy.device, config.rollout.mask_truncated
    return RunContext(
        trained=trained,
        config=config,
        directory=directory,
        observe=observe,
        sampler=sampler,
        task=task,
        chat=model.chat,
        # A context for sampling scores nothing; `build` replaces the pool.
        pool=RewardPool(()),
        layout=Layout(model.pad_id, device, training.max_tokens, mask, columns),
        prompts=loaded.division[0],
    )


def build_trained(loaded: LoadedConfig, run: Path, ranks: Ranks, observe: Observer) -> TrainState:
    """Build the model and everything that training changes, without sampler, rewards and trackers."""
    config = loaded.config
    device = choose_device(config.training.device)
    if ranks.size > 1 and ":" in config.training.device:
        raise ComponentError(
            f'[training] device = "{device}" is one GPU, and each rank has its own', 'set it to "cuda"'
        )
    model = initial_model(loaded, device, observe, ranks)
    policy = TorchPolicy(model.model, _policy_settings(config, device, model, ranks), ranks, model.source)
    if policy.settings.rounds:
        text = "the weights are bfloat16 numbers, rounded at random after each step so that small updates count"
        observe("message", {"text": text, "level": "info"})
    engine = loaded.optional("engine") or loaded.named("engine", choose_engine(policy.model)[0])
    assert engine is not None
    if config.rollout.ahead:
        check_engine(engine)
    # With overlap the batch is stale, even if the engine computes the trainer's own log-probs.
    exact = registry.engine.traits_of(engine).exact and not config.rollout.ahead
    objective = loaded.objective(exact)
    pipeline = loaded.pipeline_of(objective)
    resources = {
        "policy": policy,
        "model": policy.adapter or policy.model,  # with LoRA, sample from base plus adapter
        "model_path": model_location(config.model.path),
        "tokenizer": model.tokenizer,
        "chat": model.chat,
        "device": policy.device,
        "trainer_dtype": policy.settings.dtype,
        "run_dir": run,
        "continue_from": Continuations(),
    } | loaded.resources
    pipeline.build(resources)
    return TrainState(
        config=config,
        run=run,
        ranks=ranks,
        loaded=model,
        policy=policy,
        engine=engine,
        plan=loaded,
        resources=resources,
        pipeline=pipeline,
        objective=objective,
    )


def _row_sources(loaded: LoadedConfig, resources: Mapping[str, Any], observe: Observer) -> dict[str, RowSource]:
    """Build the row sources by name, each with the number of rows that it provides per step."""
    prompts, counts = loaded.division
    shared = {**resources, "prompt_count": prompts, "observe": observe}
    return {
        name: source.build({**shared, "label": name, "row_count": count})
        for (name, source), count in zip(loaded.sources.items(), counts, strict=True)
    }


def _trackers(trackers: Iterable[Component], resources: Mapping[str, Any], observe: Observer) -> list[SafeTracker]:
    """Build the trackers. If one cannot be built, warn and train without it."""
    built: list[SafeTracker] = []
    for tracker in trackers:
        from retrain.tracking.tracker_guard import SafeTracker

        try:
            built.append(SafeTracker(tracker.name, tracker.build(resources), observe))
        # A missing extra or an invalid parameter is a mistake of the user, and ends the run.
        except RetrainError:
            raise
        except Exception as error:  # a tracking library may raise anything; it must not end the run
            text = f"tracker {tracker.name} cannot be built: {described(error)}"
            text += "; training continues without it"
            observe("message", {"text": text, "level": "warning"})
    return built


def choose_device(device: str) -> torch.device:
    """Return the device that `[training] device` selects; "auto" prefers a GPU.

    Raises:
        ComponentError: a GPU was selected and torch sees none.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ComponentError(f'[training] device = "{device}", but torch sees no GPU', 'set it to "auto" or "cpu"')
    return torch.device(device)


def product_dtype(config: Config, device: torch.device) -> Any:
    """Return the name of the dtype of matrix products: `[model] dtype`, with "auto" resolved."""
    if config.model.dtype != "auto":
        return config.model.dtype
    return "bfloat16" if matmul_dtype(device) is torch.bfloat16 else "float32"


def initial_model(loaded: LoadedConfig, device: torch.device, observe: Observer, ranks: Ranks = ALONE) -> Loaded:
    """Return the model before RL: loaded or built in, and warm-started on worked solutions.

    Tokenizer, initial weights and demonstrations derive from `[warmup] seed` and not from the
    run's seed. Runs with different seeds start from the same weights, which they share in a cache.
    """
    config = loaded.config
    # Trained weights are loaded as float32: bfloat16 would round them, also when a run is reopened.
    dtype = product_dtype(config, device) if config.model.lora else "float32"
    four = config.model.quantization is not None
    # Quantized or sharded weights are read tensor by tensor later, but a warm start needs all of them now.
    model, teacher = untrained_model(loaded, dtype, empty=bool(four or ranks.mesh) and not config.warmup.steps)
    # The number depends on the size of the model, so it is not known before.
    torch.set_num_threads(_threads(loaded, device, model.model, ranks))
    keep_freed_memory()
    # A model with a source has no values yet, which a move to the device would need.
    if model.source is None:
        model.model.to(device)  # pyright: ignore[reportArgumentType]
    if config.warmup.steps:
        warmup = config.warmup
        dtype = product_dtype(config, device)
        settings = WarmupSettings(**warmup.model_dump(exclude={"problems"}), dtype=dtype)
        problems = [teacher.problem(i) for i in range(min(warmup.problems, warmup.steps * warmup.batch_size))]
        observe("phase", {"name": "warm start"})
        rows: list[ExpertRow] = []
        if (pool := build_env_pool(loaded, model, ranks)) is not None:
            from retrain.run.demonstrations import played

            rows = ranks.rollouts.on_rank0(partial(played, model.chat, pool, problems, warmup.seed))
            pool.close()
        if warm_start(model, problems, settings, observe, rows=rows, ranks=ranks):
            observe("message", {"text": "warm start: weights taken from the cache", "level": "info"})
    if four:
        from retrain.training.model.quantized import quantize

        model = quantize(model, device)
    return model


def _threads(loaded: LoadedConfig, device: torch.device, model: Any, ranks: Ranks) -> int:
    """Return the number of CPU threads of this process: `[training] threads`, with "auto" resolved.

    Ranks on this machine share the cores, as do trainer and sampler when they work concurrently.
    """
    asked, engine = loaded.config.training.threads, loaded.optional("engine")
    if asked not in ("auto", 0):
        return int(asked)
    if device.type != "cpu":
        # OMP_NUM_THREADS or 1: beside a GPU the CPU only starts kernels.
        return cpu_threads(0, sys.maxsize)
    separate_device = engine is not None and registry.engine.traits_of(engine).remote
    # 0: as for the largest model, whatever the size of this one.
    size = sum(p.numel() for p in model.parameters()) if asked == "auto" else sys.maxsize
    # Sampler and trainer would otherwise take the cores from each other.
    at_once = 2 if loaded.config.rollout.ahead and not separate_device else 1
    # The ranks on this machine share its cores; `ranks` also counts those on others.
    return cpu_threads(size, at_once * int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size)))


def build_env_pool(
    loaded: LoadedConfig, model: Loaded, ranks: Ranks = ALONE, directory: Path | None = None
) -> EnvPool | None:
    """Return the pool of environment processes, or None without an environment.

    Only rank 0 starts the processes. What they print is in `environment.log` of the run directory, if there is one.
    """
    config = loaded.config
    if not labels(config):
        return None
    from retrain.environments.env_pool import EnvPool
    from retrain.run.before.environment_checks import launch

    size, most = max(1, config.environment.workers), config.reward_pool.max_failed
    start = replace(launch(loaded), log=str(directory / "environment.log") if directory else "")
    pool = EnvPool(start, size, context=positions(model.model), max_failed=most)
    ranks.only_on_rank0(pool.start)
    return pool


def untrained_model(loaded: LoadedConfig, dtype: str = "float32", *, empty: bool = False) -> tuple[Loaded, Task]:
    """Return the model of `[model] path`, and the task that the warm start demonstrates.

    A built-in model's tokenizer is made from the texts of that task.

    Args:
        empty: see `load_model`.
    """
    model, teacher = loaded.config.model, loaded.task(loaded.config.warmup.seed)
    made = load_model(
        model.path,
        revision=model.revision,
        dtype=dtype,
        trust_remote_code=model.trust_remote_code,
        problems=map(teacher.problem, range(_VOCABULARY_PROBLEMS)),
        empty=empty,
    )
    return replace(made, mode=model.chat, chat_params=model.chat_params), teacher


def _policy_settings(config: Config, device: torch.device, model: Loaded, ranks: Ranks) -> PolicySettings:
    """Return the settings of the policy, collected from several sections."""
    training, lora = config.training, config.model.lora
    optimizer, rounding = config.optimizer.model_dump(), config.model.rounding
    return PolicySettings(
        **training.model_dump(include={"temperature", "micro_batch_tokens", "epochs", "minibatches", "compile"}),
        optimizer=optimizer.pop("name"),
        **optimizer,
        # The schedule of the learning rate counts optimizer steps.
        total_steps=training.max_steps * training.epochs * training.minibatches,
        dtype=product_dtype(config, device),
        rounding=("stochastic" if model.in_bfloat16 else "nearest") if rounding == "auto" else rounding,
        seed=training.seed,
        gradient_checkpointing=config.model.gradient_checkpointing,
        lora=LoraSettings(**lora.model_dump(), seed=training.seed) if lora else None,
        quantization=config.model.quantization,
        shard=_shard(config, device, model.model, ranks),
        offload=config.distributed.offload,
    )


def _shard(config: Config, device: torch.device, model: Any, ranks: Ranks) -> Shard:
    """Return `[distributed] shard` with "auto" resolved: "full" or "none".

    - FSDP2 cannot shard 8-bit optimizer moments or 4-bit weights: "none".
    - A single rank gains nothing from FSDP2 unless it offloads weights to CPU memory: "none".
    - With LoRA on a GPU: "none" if the frozen base fits into half of the GPU's memory.
    - Otherwise "full".
    """
    chosen, blocks = config.distributed.shard, config.optimizer.name == "adamw8bit" or config.model.quantization
    if chosen != "auto":
        return chosen
    if blocks or (ranks.size == 1 and config.distributed.offload != "all"):
        return "none"
    if config.model.lora is None or device.type != "cuda":
        return "full"
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return "none" if 2 * size <= torch.cuda.get_device_properties(device).total_memory else "full"


def _sampler(engine: Component, resources: Mapping[str, Any], ranks: Ranks) -> Sampler:
    if ranks.mesh is None:
        return engine.build(resources)
    from retrain.run.distributed_wrappers import build_sampler

    return build_sampler(engine, resources, ranks)


def reward_pool(loaded: LoadedConfig, ranks: Ranks = ALONE, directory: Path | None = None) -> RewardPool:
    """Return the pool of worker processes that score completions.

    What they print is in `rewards.log` of the run directory, if there is one.
    """
    settings, paths = loaded.config.reward_pool.model_dump(), loaded.config.plugins.search_paths
    training = loaded.config.training
    # With mode = "continuous" a call has the completions of one group, and the limit is that of a step.
    settings["window"] = training.batch_size * training.group_size if loaded.config.rollout.continuous else 1
    log = str(directory / "rewards.log") if directory else ""
    return RewardPool(loaded.rewards, search_paths=paths, log=log, ranks=ranks.rollouts, **settings)
