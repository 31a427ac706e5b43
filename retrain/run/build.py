"""From a validated configuration to the parts of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from retrain import registry
from retrain.algorithms.graph.objective import Objective
from retrain.algorithms.graph.pipeline import Pipeline
from retrain.config.load import LoadedConfig
from retrain.config.overlap_checks import check_engine
from retrain.config.resolve import AUTO
from retrain.config.schema import Config
from retrain.data.expert_file import read_experts
from retrain.engines.capability import choose_engine, positions
from retrain.errors import ComponentError, RetrainError
from retrain.functional.devices import matmul_dtype
from retrain.protocols import Policy, Sampler, Task
from retrain.registry import Bound
from retrain.rewards.pool import RewardPool
from retrain.run.expert_rows import build_experts
from retrain.run.run_parts import Parts, Trained
from retrain.storage.run_directory import RunDirectory
from retrain.tracking.tracker_guard import Guard
from retrain.training.model.loading import Loaded, load_model
from retrain.training.policy import TorchPolicy
from retrain.training.settings import LoraSettings, PolicySettings
from retrain.training.warmup import WarmupSettings, warm_start
from retrain.types import Layout, Observer

_VOCABULARY_PROBLEMS = 2000
"""Problems whose texts a built-in model's tokenizer is made from."""


def build(loaded: LoadedConfig, directory: RunDirectory, observe: Observer) -> Parts:
    """Build everything a run needs, warm start included.

    Raises:
        ComponentError: a part of the run that a component asks for does not exist.
        DataError: the task's data cannot be used.
        StorageError: the model cannot be read.
    """
    config, components = loaded.config, loaded.components
    observe("phase", {"name": "loading the task and the model"})
    task: Task = components.one("task").build({"seed": config.training.seed})
    prompts, expert_rows = loaded.division
    said = read_experts(str(config.expert.path)) if expert_rows else []
    trained, engine, resources = _trained(loaded, directory, observe)
    model = trained.loaded
    experts = build_experts(config, model, said, expert_rows, observe) if said else None
    sampler: Sampler = engine.build(resources)
    observe("message", {"text": sampler.describe(), "level": "info"})
    if warning := model.chat.warning(task.problem(0).prompt):
        observe("message", {"text": warning, "level": "warning"})
    max_tokens = config.training.max_tokens
    return Parts(
        **vars(trained),
        sampler=sampler,
        task=task,
        pool=reward_pool(loaded),
        chat=model.chat,
        layout=Layout(model.pad_id, trained.policy.device, max_tokens, config.rollout.mask_truncated),
        room=positions(model.model) - max_tokens,
        prompts=prompts,
        experts=experts,
        trackers=trackers(components.all("tracker"), resources, observe),
    )


def build_trained(loaded: LoadedConfig, directory: RunDirectory, observe: Observer) -> Trained:
    """Build the model and everything that training changes; nothing that samples, scores or is reported to."""
    return _trained(loaded, directory, observe)[0]


def _trained(
    loaded: LoadedConfig, directory: RunDirectory, observe: Observer
) -> tuple[Trained, Bound, Mapping[str, Any]]:
    """What is trained, the engine that is to sample, and the parts of the run that components may ask for."""
    config = loaded.config
    if config.training.threads:
        torch.set_num_threads(config.training.threads)
    device = choose_device(config.training.device)
    model = initial_model(loaded, device, observe)
    policy = TorchPolicy(model.model, policy_settings(config, device))
    engine = choose(loaded, policy.model)
    if config.rollout.overlap:
        check_engine(engine.component)
    exact = engine.component.traits.get("exact", False) and not config.rollout.overlap
    pipeline, objective = credit(loaded, exact=exact)
    resources = resources_of(config, model, policy, directory)
    pipeline.build(resources)
    trained = Trained(
        config=config,
        loaded=model,
        policy=policy,
        pipeline=pipeline,
        objective=objective,
        directory=directory,
        observe=observe,
    )
    return trained, engine, resources


def trackers(bound: Iterable[Bound], resources: Mapping[str, Any], observe: Observer) -> list[Guard]:
    """The sinks of metrics that can be built; what keeps another from it is told, and training goes on without it."""
    built: list[Guard] = []
    for tracker in bound:
        try:
            built.append(Guard(tracker.name, tracker.build(resources), observe))
        except RetrainError:
            raise
        except Exception as error:  # a library may raise anything, and none of it is worth a run
            text = f"tracker {tracker.name} cannot be built: {type(error).__name__}: {error}; training goes on without"
            observe("message", {"text": text, "level": "warning"})
    return built


def choose_device(device: str) -> torch.device:
    """The device that `[training] device` means here; ComponentError if there is no such GPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ComponentError(f'[training] device = "{device}", but torch sees no GPU', 'set it to "auto" or "cpu"')
    return torch.device(device)


def model_dtype(config: Config, device: torch.device) -> Any:
    """The name of the dtype that `[model] dtype` means on this device."""
    if config.model.dtype != "auto":
        return config.model.dtype
    return "bfloat16" if matmul_dtype(device) is torch.bfloat16 else "float32"


def initial_model(loaded: LoadedConfig, device: torch.device, observe: Observer) -> Loaded:
    """The model before RL: loaded or made, and warm-started on the task's worked solutions.

    Tokenizer, initial weights and demonstrations derive from `[warmup] seed`, not from the run's seed: runs
    with different seeds start from the same weights, and find them in the cache.
    """
    config = loaded.config
    # Weights that are trained become float32: through bfloat16 they, and a reopened run, would lose digits.
    model, teacher = untrained_model(loaded, model_dtype(config, device) if config.model.lora else "float32")
    model.model.to(device)  # pyright: ignore[reportArgumentType]
    if config.warmup.steps:
        warmup = config.warmup
        settings = WarmupSettings(
            steps=warmup.steps,
            batch_size=warmup.batch_size,
            lr=warmup.lr,
            warmup_steps=warmup.warmup_steps,
            dtype=model_dtype(config, device),
            seed=warmup.seed,
        )
        problems = list(_Problems(teacher, min(warmup.problems, warmup.steps * warmup.batch_size)))
        observe("phase", {"name": "warm start"})
        if warm_start(model, problems, settings, observe, cache=warmup.cache):
            observe("message", {"text": "warm start: weights taken from the cache", "level": "info"})
    return model


def untrained_model(loaded: LoadedConfig, dtype: str = "float32") -> tuple[Loaded, Task]:
    """The model as `[model] path` has it, and the task whose texts a built-in's tokenizer is made from."""
    model, teacher = loaded.config.model, loaded.components.one("task").build({"seed": loaded.config.warmup.seed})
    made = load_model(
        model.path,
        revision=model.revision,
        dtype=dtype,
        trust_remote_code=model.trust_remote_code,
        problems=_Problems(teacher, _VOCABULARY_PROBLEMS),
    )
    return replace(made, mode=model.chat), teacher


class _Problems:
    """The first `count` training problems, made when asked for."""

    def __init__(self, task: Task, count: int) -> None:
        self._task, self._count = task, count

    def __iter__(self) -> Any:
        return (self._task.problem(index) for index in range(self._count))


def policy_settings(config: Config, device: torch.device) -> PolicySettings:
    """How the policy is trained, from the sections that say so."""
    optimizer, training, lora = config.optimizer, config.training, config.model.lora
    return PolicySettings(
        temperature=training.temperature,
        micro_batch_tokens=training.micro_batch_tokens,
        optimizer=optimizer.name,
        lr=optimizer.lr,
        betas=optimizer.betas,
        weight_decay=optimizer.weight_decay,
        eps=optimizer.eps,
        warmup_steps=optimizer.warmup_steps,
        schedule=optimizer.schedule,
        total_steps=training.max_steps * training.epochs * training.minibatches,
        max_grad_norm=optimizer.max_grad_norm,
        dtype=model_dtype(config, device),
        gradient_checkpointing=config.model.gradient_checkpointing,
        epochs=training.epochs,
        minibatches=training.minibatches,
        lora=LoraSettings(**lora.model_dump(), seed=training.seed) if lora else None,
    )


def resources_of(config: Config, model: Loaded, policy: Policy, directory: RunDirectory) -> dict[str, Any]:
    """The parts of the run that a component may ask for, by name."""
    return {
        "policy": policy,
        "model": policy.adapter or policy.model,  # with adapters its own weights are not what is sampled
        "model_path": config.model.path,
        "tokenizer": model.tokenizer,
        "device": policy.device,
        "run_dir": directory.path,
    } | config.resources


def choose(loaded: LoadedConfig, model: Any) -> Bound:
    """The engine that the configuration names, or the one that suits the model."""
    named = loaded.components.optional("engine")
    if named is not None:
        return named
    assert loaded.config.rollout.engine == AUTO
    name, _ = choose_engine(model)
    bound = loaded.components.named("engine", name)
    return bound or registry.find("engine", name).bind()


def credit(loaded: LoadedConfig, exact: bool) -> tuple[Pipeline, Objective]:
    """The credit pipeline and the objective, with the signals that each of them reads."""
    components = loaded.components
    objective = components.objective(exact)
    return Pipeline.resolve(components.stages(objective.signals), components.signal), objective


def reward_pool(loaded: LoadedConfig) -> RewardPool:
    """The processes that score completions."""
    rewards = [(bound, float(bound.params["weight"])) for bound in loaded.components.all("reward")]
    settings = loaded.config.reward_pool.model_dump()
    return RewardPool(rewards, search_paths=loaded.config.plugins.search_paths, **settings)
