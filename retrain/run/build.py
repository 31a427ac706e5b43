"""From a validated configuration to the parts of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from retrain.algorithms.graph.pipeline import Pipeline
from retrain.config.credit_checks import check_data, check_engine
from retrain.config.resolve import LoadedConfig, labels
from retrain.config.schema import Config
from retrain.engines.capability import choose_engine, positions
from retrain.errors import ComponentError, DataError, RetrainError
from retrain.functional.devices import matmul_dtype
from retrain.protocols import ALONE, Ranks, Task
from retrain.registry import Bound
from retrain.registry.call import described
from retrain.rewards.pool import RewardPool
from retrain.run.continuations import Continuations
from retrain.run.rank_edges import Pool, SharedPool, build_sampler
from retrain.run.run_parts import Experts, Parts, SamplingParts, Trained
from retrain.storage.run_directory import RunDirectory
from retrain.system.model_paths import model_location
from retrain.system.process import cpu_threads, keep_freed_memory
from retrain.tracking.tracker_guard import Guard
from retrain.training.layout import Layout
from retrain.training.model.loading import Loaded, load_model
from retrain.training.policy import TorchPolicy
from retrain.training.settings import LoraSettings, PolicySettings, Shard
from retrain.training.warmup import WarmupSettings, warm_start
from retrain.types import ExpertRow, Observer, Problem

if TYPE_CHECKING:
    from retrain.environments.world import World

_VOCABULARY_PROBLEMS = 2000
"""Problems whose texts a built-in model's tokenizer is made from."""


def build(loaded: LoadedConfig, directory: RunDirectory, observe: Observer) -> Parts:
    """Build everything a run needs, warm start included; each of the directory's ranks calls it.

    Raises:
        ComponentError: a part of the run that a component asks for does not exist.
        ConfigError: training wants something of the data that they do not have. DataError: they cannot be used.
        StorageError: the model cannot be read.
    """
    config, components = loaded.config, loaded.components
    observe("phase", {"name": "loading the task and the model"})
    tasks = {name: one.task(one.config.training.seed) for name, one in {"": loaded, **loaded.sets}.items()}
    check_data(loaded, tasks)
    task = tasks[""]
    if (curriculum := components.optional("curriculum")) is not None:
        task: Task = curriculum.build({"seed": config.training.seed, "task": task})
    prompts, expert_rows = loaded.division
    said: list[Problem] = []
    if expert_rows:
        from retrain.data.expert_file import read_experts

        said = read_experts(str(config.expert.path))
    sampling = build_sampling(loaded, directory, task, observe)
    model = sampling.loaded
    experts = _experts(config, model, said, expert_rows, observe) if said else None
    ranks = directory.ranks
    if warning := model.chat.warning(task.problem(0).prompt):
        observe("message", {"text": warning, "level": "warning"})
    max_tokens = config.training.max_tokens
    parts = Parts(
        **vars(sampling),
        pool=_pool(loaded, ranks),
        layout=Layout(model.pad_id, sampling.policy.device, max_tokens, config.rollout.mask_truncated),
        prompts=prompts,
        world=build_world(loaded, model, ranks),
        experts=experts,
        trackers=_trackers(() if ranks.rank else components.all("tracker"), sampling.resources, observe),
    )
    sampling.resources["continue_from"].parts = ref(parts)
    parts.sets = {name: _measured(parts, one, loaded, tasks[name]) for name, one in loaded.sets.items()}
    return parts


def _measured(parts: Parts, one: LoadedConfig, loaded: LoadedConfig, task: Task) -> Parts:
    """The parts as one of `[[eval.sets]]` needs them: its settings and task, and its rewards if it has its own."""
    pool = parts.pool if one.config.rewards == loaded.config.rewards else _pool(one, parts.ranks)
    return replace(parts, config=one.config, task=task, pool=pool)


def build_sampling(loaded: LoadedConfig, directory: RunDirectory, task: Task, observe: Observer) -> SamplingParts:
    """Build the model and what samples from it."""
    trained = build_trained(loaded, directory, observe)
    sampler = build_sampler(trained.engine, trained.resources, directory.ranks)
    observe("message", {"text": sampler.describe(), "level": "info"})
    return SamplingParts(**vars(trained), sampler=sampler, task=task, chat=trained.loaded.chat)


def build_trained(loaded: LoadedConfig, directory: RunDirectory, observe: Observer) -> Trained:
    """Build the model and everything that training changes; nothing that samples, scores or reports."""
    config, components = loaded.config, loaded.components
    device, ranks = choose_device(config.training.device), directory.ranks
    if ranks.size > 1 and ":" in config.training.device:
        raise ComponentError(
            f'[training] device = "{device}" is one GPU, and each rank has its own', 'set it to "cuda"'
        )
    model = initial_model(loaded, device, observe, ranks)
    policy = TorchPolicy(model.model, _policy_settings(config, device, model.model, ranks), ranks, model.source)
    engine = components.optional("engine") or components.named("engine", choose_engine(policy.model)[0])
    assert engine is not None
    if config.rollout.overlap:
        check_engine(engine.component)
    # A batch that was sampled a step ahead is stale even where the engine computes the trainer's own log-probs.
    objective = components.objective(exact=engine.component.traits.get("exact", False) and not config.rollout.overlap)
    pipeline = Pipeline.resolve(components.stages(objective.signals), components.signal)
    resources = {
        "policy": policy,
        "model": policy.adapter or policy.model,  # with adapters its own weights are not what is sampled
        "model_path": model_location(config.model.path),
        "tokenizer": model.tokenizer,
        "device": policy.device,
        "run_dir": directory.path,
        "continue_from": Continuations(),
    } | loaded.resources
    pipeline.build(resources)
    return Trained(
        config=config,
        loaded=model,
        policy=policy,
        engine=engine,
        components=components,
        resources=resources,
        pipeline=pipeline,
        objective=objective,
        directory=directory,
        observe=observe,
    )


def _experts(config: Config, model: Loaded, problems: Sequence[Problem], per_step: int, observe: Observer) -> Experts:
    """Tokenize what the expert says; rows that are longer than the model's context are left out and counted.

    Raises:
        DataError: a row cannot be rendered, or none fits the model.
    """
    from retrain.data.expert_file import ExpertBuffer, fingerprint

    settings, limit = config.expert, positions(model.model)
    every = [model.chat.conversation(problem, all_turns=settings.all_assistant_turns) for problem in problems]
    rows = [row for row in every if len(row.ids) <= limit]
    if len(rows) < len(every):
        text = (
            f"{settings.path}: {len(every) - len(rows)} of {len(every)} rows are longer than the model's {limit} tokens"
        )
        if not rows:
            raise DataError(f"{text}; shorten them, or train a model with a longer context")
        observe("message", {"text": f"{text}; they are left out", "level": "warning"})
    keys = [row.prompt_ids for row in rows] if settings.same_prompts else []
    return Experts(per_step, ExpertBuffer(rows, config.training.seed, keys), fingerprint(problems))


def _trackers(bound: Iterable[Bound], resources: Mapping[str, Any], observe: Observer) -> list[Guard]:
    """The trackers that can be built. A warning says why another one cannot; the run trains without it."""
    built: list[Guard] = []
    for tracker in bound:
        try:
            built.append(Guard(tracker.name, tracker.build(resources), observe))
        except RetrainError:
            raise
        except Exception as error:  # a library may raise anything, and a run must not end for it
            text = f"tracker {tracker.name} cannot be built: {described(error)}; training goes on without"
            observe("message", {"text": text, "level": "warning"})
    return built


def choose_device(device: str) -> torch.device:
    """The device that `[training] device` means here; ComponentError if there is no such GPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ComponentError(f'[training] device = "{device}", but torch sees no GPU', 'set it to "auto" or "cpu"')
    return torch.device(device)


def _dtype(config: Config, device: torch.device) -> Any:
    """The name of the dtype that `[model] dtype` means on this device."""
    if config.model.dtype != "auto":
        return config.model.dtype
    return "bfloat16" if matmul_dtype(device) is torch.bfloat16 else "float32"


def initial_model(loaded: LoadedConfig, device: torch.device, observe: Observer, ranks: Ranks = ALONE) -> Loaded:
    """The model before RL: loaded or made, and warm-started on the task's worked solutions.

    Tokenizer, initial weights and demonstrations derive from `[warmup] seed`, not from the run's seed: runs
    with different seeds start from the same weights, and find them in the cache.
    """
    config = loaded.config
    # Weights that are trained become float32: through bfloat16 they, and a reopened run, would lose digits.
    dtype, four = _dtype(config, device) if config.model.lora else "float32", config.model.quantization is not None
    model, teacher = untrained_model(loaded, dtype, empty=bool(four or ranks.mesh) and not config.warmup.steps)
    torch.set_num_threads(_threads(loaded, device, model.model, ranks))
    keep_freed_memory()
    if model.source is None:
        model.model.to(device)  # pyright: ignore[reportArgumentType]
    if config.warmup.steps:
        warmup = config.warmup
        dtype = _dtype(config, device)
        settings = WarmupSettings(**warmup.model_dump(exclude={"problems"}), dtype=dtype)
        problems = [teacher.problem(i) for i in range(min(warmup.problems, warmup.steps * warmup.batch_size))]
        observe("phase", {"name": "warm start"})
        rows: list[ExpertRow] = []
        if (world := build_world(loaded, model, ranks)) is not None:
            from retrain.run.demonstrations import played

            rows = ranks.rollouts.first(partial(played, model.chat, world, problems, warmup.seed))
            world.close()
        if warm_start(model, problems, settings, observe, rows=rows, ranks=ranks):
            observe("message", {"text": "warm start: weights taken from the cache", "level": "info"})
    if four:
        from retrain.training.model.quantized import quantize

        model = quantize(model, device)
    return model


def _threads(loaded: LoadedConfig, device: torch.device, model: Any, ranks: Ranks) -> int:
    """What `[training] threads` means here: ranks of this machine, and a sampler that works at the same time, share."""
    asked, engine = loaded.config.training.threads, loaded.components.optional("engine")
    if asked not in ("auto", 0):
        return int(asked)
    if device.type != "cpu":
        return cpu_threads(0, sys.maxsize)
    apart = engine is not None and engine.component.traits.get("elsewhere", False)
    size = sum(p.numel() for p in model.parameters()) if asked == "auto" else sys.maxsize
    at_once = 2 if loaded.config.rollout.overlap and not apart else 1
    return cpu_threads(size, at_once * int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size)))


def build_world(loaded: LoadedConfig, model: Loaded, ranks: Ranks = ALONE) -> World | None:
    """The environment, with its processes, which rank 0 alone has; None without one."""
    config = loaded.config
    if not labels(config):
        return None
    from retrain.config.environment_checks import launch
    from retrain.environments.contract import Limits
    from retrain.environments.world import World
    from retrain.environments.world_pool import WorldPool

    start = launch(config, loaded.components)
    pools: list[WorldPool] = []

    def start_pools() -> None:
        try:
            pools.extend(WorldPool(start) for _ in range(max(1, config.environment.workers)))
        except BaseException:
            for pool in pools:
                pool.close()
            raise

    ranks.first(start_pools)
    engine = loaded.components.optional("engine")
    turn = nullcontext() if engine and engine.component.traits.get("elsewhere") else Lock()
    limits = Limits(*next(iter(start.hellos.values())).limits)
    return World(pools, limits, positions(model.model), config.reward_pool.max_failed, turn=turn)


def untrained_model(loaded: LoadedConfig, dtype: str = "float32", *, empty: bool = False) -> tuple[Loaded, Task]:
    """The model as `[model] path` has it, and the task whose texts a built-in's tokenizer is made from.

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
    return replace(made, mode=model.chat), teacher


def _policy_settings(config: Config, device: torch.device, model: Any, ranks: Ranks) -> PolicySettings:
    """How the policy is trained, from the sections that decide it."""
    training, lora = config.training, config.model.lora
    optimizer = config.optimizer.model_dump()
    return PolicySettings(
        **training.model_dump(include={"temperature", "micro_batch_tokens", "epochs", "minibatches"}),
        optimizer=optimizer.pop("name"),
        **optimizer,
        total_steps=training.max_steps * training.epochs * training.minibatches,
        dtype=_dtype(config, device),
        gradient_checkpointing=config.model.gradient_checkpointing,
        lora=LoraSettings(**lora.model_dump(), seed=training.seed) if lora else None,
        quantization=config.model.quantization,
        shard=_shard(config, device, model, ranks),
        offload=config.distributed.offload,
    )


def _shard(config: Config, device: torch.device, model: Any, ranks: Ranks) -> Shard:
    """What `[distributed] shard` means here.

    LoRA's frozen base stays whole where it takes half a GPU at most. One rank has nothing to spread: FSDP2 would only
    cost it time, unless it is to move the weights to the processor's memory. FSDP2 cannot spread 8-bit moments, nor
    weights of 4 bits.
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


def _pool(loaded: LoadedConfig, ranks: Ranks) -> Pool:
    return SharedPool(lambda: reward_pool(loaded), ranks) if ranks.size > 1 else reward_pool(loaded)


def reward_pool(loaded: LoadedConfig) -> RewardPool:
    """The processes that score completions."""
    settings = loaded.config.reward_pool.model_dump()
    return RewardPool(loaded.rewards, search_paths=loaded.config.plugins.search_paths, **settings)
