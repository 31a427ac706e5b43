"""What a configuration will do, without doing it: facts for `retrain explain`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from retrain import registry
from retrain.algorithms.graph.pipeline import Pipeline
from retrain.config.credit_checks import idle_rewards
from retrain.config.document import show
from retrain.config.resolve import AUTO, LoadedConfig, slots
from retrain.engines.capability import choose_engine_at
from retrain.registry import Bound
from retrain.rewards.signatures import form_of
from retrain.system.masking import masked
from retrain.system.model_paths import RANDOM_MODEL, model_location
from retrain.training.memory import OF_THE_SAMPLER, ModelShape, estimate_memory, frozen_base, layers_that_fit
from retrain.training.settings import LoraSettings, PolicySettings

TINY = ModelShape(128, width=256, layers=2, inner=704, heads=8, key_heads=1, head_width=32, tied=True, gated=True)
"""The model of `builtin:tiny`."""

_GPUS = (24, 40, 80, 141)
"""Memory of usual GPUs, in GB."""
_OVERLAP = (
    "while step t is trained, the batch of step t + {0} is sampled and scored with the weights that step t started "
    "from: {0} steps stale, and less before step {0}"
)


def explain(loaded: LoadedConfig, ranks: int = 1) -> dict[str, Any]:
    """Facts by topic, JSON-able; memory is that of one of several ranks. Imports torch for the probe."""
    from retrain.config.probe import attempt, episodes, probe

    config, engine = loaded.config, _engine(loaded)
    exact = _is_exact(loaded, engine["name"])
    pipeline = Pipeline.resolve(loaded.components.stages(loaded.objective.signals), loaded.components.signal)
    # Models that signals in use hold, as their trait `models` says: "frozen" or "trained".
    beside: list[str] = [kind for stage in pipeline.graph for kind in stage.bound.component.traits.get("models", ())]
    bound = [(kind, one) for kind, several in loaded.components.bound.items() for one in several]
    return {
        "file": loaded.file,
        "run_directory": str(loaded.directory),
        "preset": _preset(loaded),
        "components": _components(loaded, bound),
        "imported": [f"{kind} {one.name}" for kind, one in bound if one.component.source != "built-in"],
        "engine": engine,
        "overlap": _OVERLAP.format(config.rollout.overlap) if config.rollout.overlap else None,
        "pipeline": _pipeline(loaded, pipeline, exact),
        "loss": _loss(loaded),
        "batch": _batch(loaded),
        "forwards_per_step": _forwards(loaded, pipeline, exact, beside),
        "model": _model(loaded, beside, ranks),
        "evaluation": _evaluation(loaded),
        "seeds": {"training": config.training.seed, "warm_up": config.warmup.seed, "evaluation": config.eval.seed},
        "overrides": loaded.overrides,
        "probe": probe(loaded),
        "episode": [{"episode": found}] if isinstance(found := attempt(lambda: episodes(loaded)), str) else found,
    }


def render(facts: Mapping[str, Any], indent: str = "") -> str:
    """The facts as indented text; a table of like rows becomes one line per row."""
    lines: list[str] = []
    for key, value in facts.items():
        title = f"{indent}{key.replace('_', ' ')}"
        if isinstance(value, Mapping):
            lines += [title, render(value, indent + "  ")]
        elif isinstance(value, list) and value:
            lines += [title, *(f"{indent}  {_row(item)}" for item in value)]
        elif value not in ([], None, ""):
            lines.append(f"{title}: {text(value)}")
    return "\n".join(lines)


def _row(item: Any) -> str:
    if not isinstance(item, Mapping):
        return str(item)
    return "  ".join(f"{key}: {text(value)}" for key, value in item.items() if value not in ([], {}, None, ""))


def text(value: Any) -> str:
    """A fact in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {inner}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value).replace("\n", "\\n")


def _components(loaded: LoadedConfig, bound: Sequence[tuple[str, Bound]]) -> list[dict[str, Any]]:
    keys: dict[tuple[str, str], str] = {}
    for slot in slots(loaded.config, loaded.tables):
        keys.setdefault((slot.kind, slot.name), show(slot.path))
    return [
        {
            kind: one.name,
            "from": _source(one),
            "key": keys[kind, one.name],
            "reads": list(one.reads),
            "params": masked(dict(one.params)),
            "called": form_of(one.component).described() if kind == "reward" else None,
        }
        for kind, one in bound
    ]


def _preset(loaded: LoadedConfig) -> list[dict[str, Any]]:
    """Every key of the preset with the value it stands for, and where the configuration says otherwise."""
    if loaded.preset is None:
        return []
    return [
        {"key": key, loaded.preset.name: json.dumps(value), "overridden_at": loaded.preset.overridden.get(key)}
        for key, value in loaded.preset.keys.items()
    ]


def _source(bound: Bound) -> str:
    if bound.component.source == "built-in":
        return bound.component.source
    try:
        return f"{inspect.getsourcefile(bound.component.target)} ({bound.component.source})"
    except TypeError:
        return bound.component.source


def _engine(loaded: LoadedConfig) -> dict[str, Any]:
    """Which engine samples and why, and with LoRA what it does with the adapter."""
    engines = loaded.components.engines(loaded.config.model.path)
    if loaded.components.optional("engine"):
        name, why = engines[0].name, "[rollout] engine says so"
    elif known := choose_engine_at(loaded.config.model.path):
        name, why = known[0], f'"{AUTO}": {known[1]}'
    else:
        name, why = AUTO, "torch if the embedded engine can serve the architecture, else transformers"
    said = {one.component.traits.get("adapters", {}).get(one.params.get("lora")) for one in engines}
    return {"name": name, "why": why, "lora": said.pop() if loaded.config.model.lora and len(said) == 1 else None}


def _is_exact(loaded: LoadedConfig, name: str) -> bool | None:
    """Whether the sampler's log-probs are the trainer's own; None while the engine is not known."""
    if loaded.config.rollout.overlap:
        return False
    if name == AUTO:
        return None
    return bool(registry.find("engine", name, loaded.config.plugins.search_paths).traits.get("exact", False))


def _pipeline(loaded: LoadedConfig, pipeline: Pipeline, exact: bool | None) -> dict[str, Any]:
    idle = idle_rewards(loaded.components, loaded.objective, pipeline.graph)
    corrections = " and ".join(one.name for one in loaded.components.objective(exact is True).corrections)
    if corrections and exact is None and not loaded.objective.corrections:  # nobody named it: the engine decides
        corrections += ", unless the engine's log-probs are the trainer's own"
    return {
        "stages": [
            {stage.kind: stage.name, "reads": list(stage.reads), "writes": stage.writes} for stage in pipeline.graph
        ],
        "columns_from_the_policy": sorted(pipeline.policy_columns),
        "correction_in_the_update": corrections or None,
        "rewards_that_train_nothing": [f"{loaded.config.rewards[index].name}: {why}" for index, why in idle.items()],
    }


def _loss(loaded: LoadedConfig) -> dict[str, Any]:
    used = [term.name for term in loaded.objective.terms]
    off = [term.name for term in loaded.components.all("loss") if term.name not in used]
    terms = [{"term": term.name, "weight": term.params["weight"]} for term in loaded.objective.terms]
    reductions = [bound.name for bound in loaded.components.all("reduction")]
    sft = {"sft_reduction": reductions[-1]} if loaded.objective.mixed else {}
    return {"terms": terms, "switched_off": off, "reduction": reductions[0]} | sft


def _batch(loaded: LoadedConfig) -> dict[str, Any]:
    training, rollout = loaded.config.training, loaded.config.rollout
    prompts, expert = loaded.division
    rows = prompts * training.group_size
    tokens = rows * training.max_tokens
    rounds = 1 + (rollout.max_resample if rollout.resamples else 0)
    return {
        "completions_per_step": f"{prompts} prompts x {training.group_size} = {rows}",
        "expert_rows_per_step": f"{expert} of {rows + expert}, from {loaded.config.expert.path}" if expert else None,
        "response_tokens_per_step_at_most": tokens * rounds,
        "micro_batches_per_pass_about": max(training.minibatches, -(-tokens // training.micro_batch_tokens)),
        "optimizer_steps_per_step": training.epochs * training.minibatches,
        "steps": training.max_steps,
        "completions_in_all": rows * training.max_steps,
        "warm_up_steps": loaded.config.warmup.steps,
    }


def _forwards(loaded: LoadedConfig, pipeline: Pipeline, exact: bool | None, beside: Sequence[str]) -> dict[str, Any]:
    """How often the model sees the whole batch in one step, apart from sampling it."""
    training, objective = loaded.config.training, loaded.components.objective(exact is True)
    several = training.epochs * training.minibatches > 1
    trained = {"other_models": beside.count("trained")} if "trained" in beside else {}
    return {
        "scoring": int(bool(pipeline.policy_columns) or (several and "old_logprobs" in objective.reads)),
        "reference": beside.count("frozen"),
        "forward_and_backward": training.epochs,
    } | trained


def _model(loaded: LoadedConfig, beside: Sequence[str], ranks: int) -> dict[str, Any]:
    """Parameters and memory, as far as they are known without loading the model."""
    model = loaded.config.model
    file = Path(model_location(model.path)) / "config.json"
    if model.path == RANDOM_MODEL:
        shape = TINY
    elif file.is_file():
        try:
            shape = ModelShape.of(json.loads(file.read_text(encoding="utf-8")))
        except ValueError as error:
            return {"path": model.path, "memory": f"not known: {error}"}
    else:
        return {"path": model.path, "memory": "known once the model is here: give its directory as path"}
    found = {"path": model.path, "parameters": shape.parameters}
    return found | _memory(loaded, shape, beside, ranks)


def _memory(loaded: LoadedConfig, shape: ModelShape, beside: Sequence[str], ranks: int) -> dict[str, Any]:
    """What a rank takes, and the largest model of this width that fits usual GPUs with these settings."""
    model, training = loaded.config.model, loaded.config.training
    rows = training.batch_size * training.group_size
    blocks = loaded.config.optimizer.name == "adamw8bit" or model.quantization
    settings = PolicySettings(
        micro_batch_tokens=min(training.micro_batch_tokens, rows * training.max_tokens),
        optimizer=loaded.config.optimizer.name,
        dtype="bfloat16" if model.dtype == "bfloat16" else "float32",
        gradient_checkpointing=model.gradient_checkpointing,
        lora=LoraSettings(r=model.lora.r) if model.lora else None,
        quantization=model.quantization,
        offload=loaded.config.distributed.offload,
    )
    elsewhere = (engine := loaded.components.optional("engine")) and engine.component.traits.get("elsewhere", False)

    def taken(shape: ModelShape, gpu: float) -> dict[str, int]:
        """Bytes by purpose on GPUs of so many GB, by the rule of `shard = "auto"`."""
        shard = loaded.config.distributed.shard
        if shard == "auto":
            whole = blocks or (model.lora and 2 * frozen_base(shape, settings) <= gpu * 1e9)
            shard = "none" if whole else "full"
        sizes = estimate_memory(
            shape, replace(settings, shard=shard), rows=rows, tokens=training.max_tokens, beside=beside, ranks=ranks
        )
        return {name: size for name, size in sizes.items() if not (elsewhere and name in OF_THE_SAMPLER)}

    def on_gpu(shape: ModelShape, gpu: float) -> int:
        return sum(size for name, size in taken(shape, gpu).items() if name != "offloaded")

    def megabytes(gpu: float) -> dict[str, float]:
        return {name: round(size / 1e6, 1) for name, size in taken(shape, gpu).items()}

    found: dict[str, Any] = {"memory_mb_without_prompts_about": megabytes(0)}
    if ranks > 1:
        found |= {"ranks": ranks, "memory_is_of": "each rank"}
        if megabytes(inf) != megabytes(0):
            least = (
                f"of at least {2 * frozen_base(shape, settings) / 1e9:.2g} GB, which hold all of LoRA's base, MB about"
            )
            found[f"memory on GPUs {least}"] = megabytes(inf)
    fits = {gpu: layers_that_fit(shape, gpu, lambda shape, gpu=gpu: on_gpu(shape, gpu)) for gpu in _GPUS}
    found["parameters_that_fit_at_this_width_about"] = {
        f"{gpu} GB": replace(shape, layers=layers).parameters if layers else 0 for gpu, layers in fits.items()
    }
    return found


def _evaluation(loaded: LoadedConfig) -> dict[str, Any]:
    settings, steps = loaded.config.eval, loaded.config.training.max_steps
    measured = [one.config.eval for one in (loaded, *loaded.sets.values()) if one.config.eval.problems]
    if not measured:
        return {"evaluations": 0}
    within = (steps - 1) // settings.every if settings.every else 0
    return {
        "evaluations": within + 2,
        "completions_each": sum(one.problems * (one.samples + one.greedy) for one in measured),
        "half_width_of_accuracy_at_most": round(0.98 / measured[0].problems ** 0.5, 3),
    }
