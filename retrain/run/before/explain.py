"""Facts about a run before it starts, for `retrain explain`: components, pipeline, batch sizes, memory."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from retrain import registry
from retrain.algorithms.graph.pipeline import Pipeline
from retrain.config.document import Place, show
from retrain.config.loaded_config import LoadedConfig, reward_columns
from retrain.config.reported_metrics import reported_metrics
from retrain.config.rules.credit_rules import idle
from retrain.config.rules.section_rules import gpu_or_cpu
from retrain.config.slots import AUTO, slots
from retrain.engines.capability import choose_engine_at
from retrain.registry import Component
from retrain.rewards.signatures import form_of
from retrain.system.masking import masked
from retrain.system.model_paths import RANDOM_MODEL, model_location, stored_dtype
from retrain.system.process import thread_waiting
from retrain.training.memory import OF_THE_SAMPLER, ModelShape, estimate_memory, frozen_base
from retrain.training.settings import LoraSettings, PolicySettings

TINY = ModelShape(128, width=256, layers=2, inner=704, heads=8, key_heads=1, head_width=32, tied=True, gated=True)
"""Shape of `builtin:tiny`."""

_OF_THE_POLICY = frozenset({"trained", "averaged", "frozen", "policy"})
"""Kinds of a signal's model that have the policy's shape; any other value is the path of a model."""
_OVERLAP = (
    "while step t is trained, the batch of step t + {0} is sampled and scored with the weights from the start of "
    "step t, so it is {0} steps stale, and less before step {0}"
)


def explain(loaded: LoadedConfig, ranks: int = 1) -> dict[str, Any]:
    """Return the facts by topic, as a JSON-compatible dictionary. This imports torch, to try the components.

    Args:
        loaded: the configuration.
        ranks: number of ranks; memory is given for each of them.
    """
    from retrain.run.before.probe import probe

    config, engine = loaded.config, _engine(loaded)
    exact = _is_exact(loaded, engine["name"])
    pipeline = loaded.pipeline_of(loaded.objective(exact=True))
    signals = [stage for stage in pipeline.graph if stage.kind == "signal"]
    signal_models = [model for signal in signals for model in registry.signal.traits_of(signal).held(signal.params)]
    return {
        "file": loaded.file,
        "run_directory": str(loaded.directory),
        "preset": _preset(loaded),
        "components": _components(loaded),
        "engine": engine,
        "overlap": _OVERLAP.format(config.rollout.overlap) if config.rollout.overlap else None,
        "continuous": _continuous(loaded),
        "pipeline": _pipeline(loaded, pipeline, exact),
        "loss": _loss(loaded),
        "learning_rate": _learning_rate(loaded),
        "batch": _batch(loaded),
        "model": _model(loaded, signal_models, ranks),
        "thread_waiting": thread_waiting.reason,
        "evaluation": _evaluation(loaded),
        "seeds": {"training": config.training.seed, "warm_up": config.warmup.seed, "evaluation": config.eval.seed},
        "keys_that_nothing_reads": [show(path) for path in loaded.unread],
        "metrics_of_a_step": [*reported_metrics(loaded)],
        "overrides": loaded.overrides,
        "probe": {"credit and loss": probe(loaded)},
    }


def _continuous(loaded: LoadedConfig) -> str | None:
    """Describe continuous sampling; None with mode = "steps"."""
    rollout = loaded.config.rollout
    if not rollout.continuous:
        return None
    # A group is begun if it is expected to be trained on within max_staleness steps from now, this step included.
    groups = loaded.division[0] * (rollout.max_staleness + 1)
    most = min(groups, rollout.in_flight or groups)
    return (
        f"at most {most} groups in flight and {groups} begun; a step trains on the first {loaded.division[0]} that are "
        f"complete, begun at most {rollout.max_staleness} steps before; not repeatable bit for bit"
    )


def render(facts: Mapping[str, Any], indent: str = "") -> str:
    """Format the facts as indented text; a list of rows becomes one line per row."""
    lines: list[str] = []
    for key, value in facts.items():
        title = f"{indent}{key.replace('_', ' ')}"
        if isinstance(value, Mapping):
            lines += [title, render(value, indent + "  ")]
        elif isinstance(value, list) and value:
            lines += [title, *(f"{indent}  {_row(item)}" for item in value)]
        # 0 and False are facts, too.
        elif value not in ([], None, ""):
            lines.append(f"{title}: {text(value)}")
    return "\n".join(lines)


def _row(item: Any) -> str:
    if not isinstance(item, Mapping):
        return str(item)
    return "  ".join(f"{key}: {text(value)}" for key, value in item.items() if value not in ([], {}, None, ""))


def text(value: Any) -> str:
    """Format one fact in a line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {inner}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    # True is an int, too, and would be written as 1.
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value).replace("\n", "\\n")


def _components(loaded: LoadedConfig) -> list[dict[str, Any]]:
    keys: dict[tuple[str, str], str] = {}
    for slot in slots(loaded.config, loaded.tables):
        # A name in several places is shown with the first of them.
        keys.setdefault((slot.kind, slot.name), show(slot.path))
    return [
        {
            component.kind: component.name,
            "from": _source(component),
            "key": keys[component.kind, component.name],
            "reads": list(component.reads),
            "params": masked(dict(component.params)),
            "called": form_of(component).described() if component.kind == "reward" else None,
        }
        for component in loaded.slots.values()
    ]


def _preset(loaded: LoadedConfig) -> list[dict[str, Any]]:
    """Return every key of the preset with its value, and the place where the configuration overrides it."""
    if loaded.preset is None:
        return []
    return [
        {"key": key, loaded.preset.name: json.dumps(value), "overridden_at": loaded.preset.overridden.get(key)}
        for key, value in loaded.preset.keys.items()
    ]


def _source(component: Component) -> str:
    if component.source == "built-in":
        return component.source
    try:
        # Code that was typed into an interpreter, or written in C, has no file.
        return f"{inspect.getsourcefile(component.target)} ({component.source})"
    except TypeError:
        return component.source


def _engine(loaded: LoadedConfig) -> dict[str, Any]:
    """Return the engine with the reason for its choice and, with LoRA, how it applies the adapter."""
    engines = loaded.engines()
    if loaded.optional("engine"):
        name, why = engines[0].name, "set in [rollout] engine"
    elif choice := choose_engine_at(loaded.config.model.path):
        name, why = choice[0], f'"{AUTO}": {choice[1]}'
        if find_spec("vllm"):
            why += '; vLLM is installed, and used only with engine = "vllm"'
    else:
        name, why = AUTO, "torch if the embedded engine can serve the architecture, else transformers"
    adapters = {
        registry.engine.traits_of(candidate).adapters.get(candidate.params.get("lora")) for candidate in engines
    }
    return {
        "name": name,
        "why": why,
        # While the engine is not known, this is shown only if all candidates agree.
        "lora": adapters.pop() if loaded.config.model.lora and len(adapters) == 1 else None,
    }


def _is_exact(loaded: LoadedConfig, name: str) -> bool | None:
    """Return True if sampler and trainer compute equal log-probs; None while the engine is not known."""
    if loaded.config.rollout.ahead:
        return False
    if name == AUTO:
        return None
    return registry.engine.traits_of(registry.find("engine", name, loaded.config.plugins.search_paths)).exact


def _pipeline(loaded: LoadedConfig, pipeline: Pipeline, exact: bool | None) -> dict[str, Any]:
    unused = idle(loaded)
    corrections = " and ".join(correction.name for correction in loaded.objective(exact is True).corrections)
    if corrections and exact is None and not loaded.objective(exact=True).corrections:
        # An implicit correction depends on the engine.
        corrections += ", unless the engine's log-probs equal the trainer's"
    return {
        "stages": [
            {stage.kind: stage.name, "reads": list(stage.reads), "writes": stage.writes} for stage in pipeline.graph
        ],
        "columns_from_the_policy": sorted(pipeline.policy_columns),
        "correction_in_the_update": corrections or None,
        "reward_parts": [
            {"reward": name, "weight": weight}
            for name, weight in reward_columns(loaded.all("reward"))
            if any("reward_parts" in stage.reads for stage in loaded.contributing)
        ],
        "rewards_that_train_nothing": [f"{loaded.config.rewards[index].name}: {why}" for index, why in unused.items()],
    }


def _loss(loaded: LoadedConfig) -> dict[str, Any]:
    objective = loaded.objective(exact=True)
    used = [term.name for term in objective.terms]
    off = [term.name for term in loaded.all("loss") if term.name not in used]
    terms = [{"term": term.name, "weight": term.params["weight"]} for term in objective.terms]
    reductions = [reduction.name for reduction in loaded.all("reduction")]
    sft = {"sft_reduction": reductions[-1]} if objective.mixed else {}
    return {"terms": terms, "switched_off": off, "reduction": reductions[0]} | sft


def _learning_rate(loaded: LoadedConfig) -> str:
    """Return the peak learning rate with its place in the file, or with the reason for its default."""
    model, path = loaded.config.model, ("optimizer", "lr")
    trained = "LoRA adapters" if model.lora else "all weights"
    kind = "a random model" if model.path == RANDOM_MODEL else f"{trained} of a pretrained model"
    written = loaded.places.get(path)
    where = f"the default for {kind}" if written is None else " ".join(filter(None, (written.file, _line(written))))
    return f"{loaded.config.optimizer.lr:g}, {where}"


def _line(key_place: Place) -> str:
    by = f'(preset "{key_place.preset}")' if key_place.preset else ""
    return " ".join(filter(None, (f"line {key_place.line}" if key_place.line else "", by)))


def _batch(loaded: LoadedConfig) -> dict[str, Any]:
    training, rollout = loaded.config.training, loaded.config.rollout
    prompts, source_rows = loaded.division
    rows = prompts * training.group_size
    tokens = rows * training.max_tokens
    # At most: a step resamples only while groups are dropped.
    rounds = 1 + (rollout.max_resample if rollout.resamples else 0)
    return {
        "greedy_completions_per_step": prompts if "greedy_rewards" in loaded.pipeline.reads else None,
        "completions_per_step": f"{prompts} prompts x {training.group_size} = {rows}",
        **_sources(loaded, rows + sum(source_rows)),
        "response_tokens_per_step_at_most": tokens * rounds,
        # A minibatch has at least one micro-batch.
        # -(-a // b) rounds up.
        "micro_batches_per_pass_about": max(training.minibatches, -(-tokens // training.micro_batch_tokens)),
        "optimizer_steps_per_step": training.epochs * training.minibatches,
        "steps": training.max_steps,
        "completions_in_all": rows * training.max_steps,
        "warm_up_steps": loaded.config.warmup.steps,
    }


def _sources(loaded: LoadedConfig, rows: int) -> dict[str, Any]:
    """Return the number of rows that each source provides, out of the `rows` of a step."""
    written, files, others = 0, list[str](), list[dict[str, Any]]()
    for (name, source), count in zip(loaded.sources.items(), loaded.division[1], strict=True):
        traits = registry.source.traits_of(source)
        if "rollouts" in traits.brings:
            described = {"source": name, "in the place of prompts": f"{count} of {rows} rows"}
            others.append({**described, "brings": " and ".join(traits.brings), **source.params})
        else:
            written += count
            files.append(str(source.params[traits.read[0]]) if traits.read else name)
    shown = f"{written} of {rows}, from {', '.join(files)}" if files else None
    return {"expert_rows_per_step": shown, "sources": others or None}


_LIBRARIES_MB = 400
"""Resident memory of a process that has imported torch 2.13 and transformers 5.19 on Linux, in MB: 391 measured."""


def run_memory(loaded: LoadedConfig, ranks: int = 1) -> float | None:
    """Estimate the memory of one rank in MB, for empty prompts; None if the model is not on this machine."""
    facts = _model(loaded, (), ranks)
    sizes = facts.get("memory_mb_without_prompts_about")
    return sum(sizes.values()) + facts.get("memory_mb_of_python_and_libraries_about", 0) if sizes else None


def _model(loaded: LoadedConfig, signal_models: Sequence[str], ranks: int) -> dict[str, Any]:
    """Return number of parameters and memory, as far as they are known without the model's weights."""
    path = loaded.config.model.path
    shape = TINY if path == RANDOM_MODEL else _shape(path)
    if isinstance(shape, str):
        return {"path": path, "memory": shape}
    teachers = {model: _shape(model) for model in signal_models if model not in _OF_THE_POLICY}
    unknown = {f"memory of {model}": teacher for model, teacher in teachers.items() if isinstance(teacher, str)}
    # Other models are loaded in bfloat16, 2 bytes a parameter.
    teaching = sum(2 * teacher.parameters for teacher in teachers.values() if isinstance(teacher, ModelShape))
    facts = {"path": path, "parameters": shape.parameters} | unknown
    return facts | _memory(loaded, shape, (signal_models, teaching), ranks)


def _shape(path: str) -> ModelShape | str:
    """Return the shape of a model on this machine, or the reason why it is unknown."""
    file = Path(model_location(path)) / "config.json"
    if not file.is_file():
        return "unknown until the model is downloaded: give its directory as path"
    try:
        return ModelShape.of(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        return f"unknown: {error}"


def _memory(loaded: LoadedConfig, shape: ModelShape, others: tuple[Sequence[str], int], ranks: int) -> dict[str, Any]:
    """Estimate the memory of a rank.

    Args:
        loaded: the configuration.
        shape: shape of the run's model.
        others: (kinds of the signals' models, bytes of those that have another shape).
        ranks: world size.
    """
    (signal_models, teaching), model, training = others, loaded.config.model, loaded.config.training
    rows = training.batch_size * training.group_size
    blocks = loaded.config.optimizer.name == "adamw8bit" or model.quantization
    auto = "stochastic" if stored_dtype(model.path) == "bfloat16" else "nearest"
    settings = PolicySettings(
        # A pass never has more tokens than the step.
        micro_batch_tokens=min(training.micro_batch_tokens, rows * training.max_tokens),
        optimizer=loaded.config.optimizer.name,
        dtype="bfloat16" if model.dtype == "bfloat16" else "float32",
        rounding=auto if model.rounding == "auto" else model.rounding,
        gradient_checkpointing=model.gradient_checkpointing,
        lora=LoraSettings(r=model.lora.r) if model.lora else None,
        quantization=model.quantization,
        offload=loaded.config.distributed.offload,
    )
    engine = loaded.optional("engine")
    remote = engine is not None and registry.engine.traits_of(engine).remote
    device = gpu_or_cpu(training.device)
    shard = loaded.config.distributed.shard
    if shard == "auto":
        # As `_shard` of retrain.run.build, which has the model itself.
        whole = blocks or (model.lora and 2 * frozen_base(shape, settings) <= _gpu_memory(device))
        shard = "none" if whole else "full"
    sizes = estimate_memory(
        shape,
        replace(settings, shard=shard),
        rows=rows,
        tokens=training.max_tokens,
        signal_models=signal_models,
        ranks=ranks,
        device=device,
    )
    sizes |= {"other_shapes": teaching // (ranks if shard == "full" else 1)} if teaching else {}
    here = {name: size for name, size in sizes.items() if not (remote and name in OF_THE_SAMPLER)}
    megabytes = {name: round(size / 1e6, 1) for name, size in here.items()}
    facts: dict[str, Any] = {"memory_mb_without_prompts_about": megabytes}
    if device == "cpu":
        facts["memory_mb_of_python_and_libraries_about"] = _LIBRARIES_MB
    if ranks > 1:
        facts |= {"ranks": ranks, "memory_is_of": f'each rank on this machine, with shard = "{shard}"'}
    return facts


def _gpu_memory(device: str) -> int:
    """Return the bytes of this machine's first GPU; 0 if the run does not use one."""
    if device == "cpu":
        return 0
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0


def _evaluation(loaded: LoadedConfig) -> dict[str, Any]:
    """Return the number of evaluations, the completions of each, and the precision of its accuracy.

    A run is evaluated before the first step, after every `every` steps, and at the end. The half width is that of
    a 95% confidence interval at an accuracy of 1/2.
    """
    settings, steps = loaded.config.eval, loaded.config.training.max_steps
    measured = [run.config.eval for run in (loaded, *loaded.sets.values()) if run.config.eval.problems]
    if not measured:
        return {"evaluations": 0}
    within = (steps - 1) // settings.every if settings.every else 0
    return {
        # Without a step the evaluation at the start is also that at the end.
        "evaluations": within + 2 if steps else 1,
        "completions_each": sum(
            evaluation.problems * (evaluation.samples + evaluation.greedy) for evaluation in measured
        ),
        # 0.98 is 1.96 standard deviations of 1/2.
        "half_width_of_accuracy_at_most": round(0.98 / measured[0].problems ** 0.5, 3),
    }
