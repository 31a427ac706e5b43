"""The pipeline on one group of plain lists, for notebooks and tests of a plug-in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrain.algorithms.graph.pipeline import Pipeline, Stages
from retrain.algorithms.graph.plain_functions import CONTEXT_PARAMETERS
from retrain.algorithms.planning.planning_mask import advantage_split, planning_ratio
from retrain.algorithms.sepa import entropy_metrics
from retrain.algorithms.transforms.token_stages import transform_chain
from retrain.errors import ComponentError
from retrain.registry import Bound, Component, bind, find
from retrain.types import Batch, Metrics

_OWN_METRICS = ("hicra/", "advantage/", "skipped/", "sepa/")


@dataclass(frozen=True)
class ComposedAdvantages:
    """Advantages of one group.

    Attributes:
        token_advs: one list per completion, one number per token.
        stats: metrics of the built-in stages.
        extra_metrics: what plug-ins reported.
    """

    token_advs: list[list[float]]
    stats: Metrics
    extra_metrics: Metrics


def compute_composable_advantages(  # noqa: PLR0913 - the documented call, every knob by name
    rewards_G: Sequence[float],
    logprobs_G: Sequence[Sequence[float]],
    planning_masks_G: Sequence[Sequence[int]],
    *,
    advantage_mode: str = "grpo",
    transform_mode: str | Sequence[str] = "none",
    uncertainty_kind: str = "surprisal",
    gtpo_beta: float = 0.1,
    hicra_alpha: float = 0.2,
    sepa_lambda: float = 0.0,
    advantage_params: Mapping[str, Any] | None = None,
    transform_params: Mapping[str, Any] | None = None,
    step: int = 0,
    lengths_G: Sequence[int] | None = None,
    correct_G: Sequence[bool] | None = None,
) -> ComposedAdvantages:
    """Advantages per token of one group of G completions, in float64, by the same pipeline that training runs.

    Args:
        rewards_G: [G]; logprobs_G, planning_masks_G: one list per completion, of equal lengths.
        advantage_mode, transform_mode, uncertainty_kind: as in TOML: names, documented chains, lists of stages,
            dotted paths. "shannon_entropy" and "varentropy" need the whole distribution, which log-probs do not hold.
        gtpo_beta, hicra_alpha: [gtpo] beta and [hicra] alpha. sepa_lambda: the pooling weight, in [0, 1].
        advantage_params, transform_params: parameters of the advantage, and of the transforms that take them.
        lengths_G, correct_G: default to the number of log-probs, and to reward > 0.5.
    Raises:
        ComponentError: an unknown name or parameter. UserCodeError: a plug-in that returns something unusable.
        ValueError: lists whose lengths do not agree.
    """
    rows = (rewards_G, logprobs_G, planning_masks_G, lengths_G, correct_G)
    _check_lengths(*rows)
    if not rewards_G:
        return ComposedAdvantages([], {}, {})
    hyper = {"gtpo_beta": gtpo_beta, "hicra_alpha": hicra_alpha}
    stages = Stages(
        advantage=bind("advantage", advantage_mode, advantage_params),
        transforms=_transforms(transform_chain(transform_mode), hyper, transform_params or {}),
        algorithm=None,
        uncertainty=bind("uncertainty", uncertainty_kind),
        filter=bind("filter", "none"),
        observed=("uncertainty",),
        hyper=hyper,
    )
    return _composed(_pipeline(stages), _batch(*rows).replace(step=step, sepa_lambda=sepa_lambda))


def _composed(pipeline: Pipeline, batch: Batch) -> ComposedAdvantages:
    """The credit of a batch, row by row without padding; metrics of the built-in stages apart from others."""
    credited, metrics = pipeline.credit(batch)
    planning, mask = credited.column("planning_mask"), batch.response_mask
    metrics |= advantage_split(credited) | planning_ratio(planning, mask)
    metrics |= entropy_metrics(credited.column("uncertainty"), planning, mask)
    own = {name: value for name, value in metrics.items() if name.startswith(_OWN_METRICS)}
    rows = [row[kept].tolist() for row, kept in zip(credited.advantages, mask, strict=True)]
    return ComposedAdvantages(rows, own, {name: value for name, value in metrics.items() if name not in own})


def _check_lengths(rewards: Sequence[float], *others: Sequence[Any] | None) -> None:
    """One entry per completion everywhere, and one planning flag per log-prob."""
    names = ("logprobs_G", "planning_masks_G", "lengths_G", "correct_G")
    for name, values in zip(names, others, strict=True):
        if values is not None and len(values) != len(rewards):
            raise ValueError(f"{name} has {len(values)} entries for {len(rewards)} rewards; give one per completion")
    logprobs, planning = others[0] or (), others[1] or ()
    for i, (row, flags) in enumerate(zip(logprobs, planning, strict=True)):
        if len(row) != len(flags):
            raise ValueError(f"planning_masks_G[{i}] has {len(flags)} entries for {len(row)} log-probs")


def _pipeline(stages: Stages) -> Pipeline:
    """The pipeline on what is given; ComponentError if a stage asks the policy for more."""
    given = frozenset({"planning_mask", "sepa_lambda", "old_logprobs"})
    pipeline = Pipeline.resolve(stages, lambda name: None, given)
    for stage in pipeline.graph:
        if missing := sorted(pipeline.policy_columns.intersection(stage.reads)):
            raise ComponentError(
                f'{stage.kind} "{stage.name}" reads {", ".join(missing)}, which log-probs alone do not give',
                "train with it from a TOML file: there the policy computes them",
            )
    return pipeline


def _transforms(chain: Sequence[str], hyper: Mapping[str, Any], params: Mapping[str, Any]) -> tuple[Bound, ...]:
    """The chain's stages: each takes those of `params` that it knows; ComponentError for one that no stage knows."""
    found = [find("transform", name) for name in chain]
    is_open = any(component.contract == "context" for component in found)
    unknown = [key for key in params if not is_open and all(key not in c.schema.model_fields for c in found)]
    if unknown:
        raise ComponentError(f"transform_params has {', '.join(unknown)}, which no transform of {list(chain)} takes")
    return tuple(component.bind({**_shared(component, hyper), **component.takes(params)}) for component in found)


def _shared(component: Component, hyper: Mapping[str, Any]) -> dict[str, Any]:
    """The component's own parameters among those that contexts show."""
    return {key: hyper[field] for field, (name, key) in CONTEXT_PARAMETERS.items() if name == component.name}


def _batch(
    rewards: Sequence[float],
    logprobs: Sequence[Sequence[float]],
    planning: Sequence[Sequence[int]],
    lengths: Sequence[int] | None,
    correct: Sequence[bool] | None,
) -> Batch:
    """One group as a batch of responses without prompts; the sampler counts as the trainer's own forward."""
    import torch

    from retrain.algorithms.graph.responses import padded, response_batch

    judged = [reward > 0.5 for reward in rewards] if correct is None else correct
    batch = response_batch(logprobs, rewards, judged, [0] * len(rewards), torch.float64)
    flags = padded(planning, batch.response_mask, torch.bool)
    batch = batch.replace(planning_mask=flags, old_logprobs=batch.sampler_logprobs)
    return batch if lengths is None else batch.replace(lengths=torch.tensor(list(lengths)))
