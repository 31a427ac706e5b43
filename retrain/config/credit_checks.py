"""What the stages of credit, the filter and the loss terms demand of each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retrain.algorithms.graph.column_graph import Stage
from retrain.algorithms.graph.objective import Objective, source_of
from retrain.config.document import Document
from retrain.config.resolve import Resolved, is_correction
from retrain.config.schema import Config
from retrain.registry import Bound
from retrain.types import BUILTIN

_PROCESS_REWARDS = "process_rewards"
_NO_CREDIT = frozenset({"logprobs", "old_logprobs", "ref_logprobs", "entropy", "response_mask"})
"""Columns that say nothing of how good a completion is."""


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
    _check_process_rewards(config, document, graph)
    for index, why in idle_rewards(resolved, objective, graph).items():
        fix = "give it weight = 0 to record it alone, or choose an advantage_mode that reads rewards"
        document.warn(("rewards", index, "name"), why, fix)


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
    bound, size = resolved.one("filter"), config.training.group_size
    if bound.name == "accuracy_band" and not _reachable(bound.params, size):
        document.refuse(
            ("algorithm", "filter"),
            f"no group of {size} can have a share of correct answers between low = {bound.params['low']:g} and "
            f"high = {bound.params['high']:g}: every group would be dropped",
            "widen [accuracy_band] low and high, or raise [training] group_size",
        )
    if bound.name == "none" and config.rollout.resample != "none":
        document.warn(
            ("rollout", "resample"), 'filter = "none" keeps every group: there is nothing to replace', "name a filter"
        )


def _reachable(band: Mapping[str, Any], size: int) -> bool:
    """Whether a group of `size` can have a share of correct answers inside the band."""
    shares = [right / size for right in range(size + 1)]
    low, high = band["low"], band["high"]
    return any(low <= share <= high if band["inclusive"] else low < share < high for share in shares)


def _check_terms(config: Config, document: Document, objective: Objective) -> None:
    training = config.training
    updates = training.epochs * training.minibatches
    ungraded = [term for term in objective.terms if set(term.reads) <= _NO_CREDIT]
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


def _check_process_rewards(config: Config, document: Document, graph: Sequence[Stage]) -> None:
    params = next((stage.bound.params for stage in graph if stage.writes == _PROCESS_REWARDS), None)
    if params is None:
        return
    delay = next((stage.bound.params.get("delay", 0) for stage in graph if _PROCESS_REWARDS in stage.reads), 0)
    if delay >= config.training.max_steps > 0:
        fix = f"use fewer than {config.training.max_steps}"
        document.warn(("prime", "delay"), "process rewards do not count in any step of this run", fix)
    path = params["path"]
    if path is None and params["update"] == "none" and params["reference"] == "frozen":
        document.refuse(
            ("prime", "update"),
            "a process reward model that starts as its reference and never learns gives no reward but 0",
            'use update = "after", or name a trained model in [prime] path',
        )
    if path is not None and config.model.lora is not None:
        document.refuse(
            ("prime", "path"),
            "with [model.lora] the process reward model is an adapter on the policy's base",
            "remove it, or train without LoRA",
        )
    elif path is not None and path.startswith(BUILTIN):
        document.refuse(
            ("prime", "path"), f'"{path}" is made, not trained: it knows no more than the policy', "remove it"
        )
    elif path is not None and path.startswith(("/", "./", "../", "~")) and not Path(path).expanduser().is_dir():
        document.refuse(("prime", "path"), f'there is no directory "{path}"', "give a directory or a hub name")
