"""The pipeline applied to one group of plain lists, for notebooks and tests of plug-ins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrain.algorithms.graph.column_graph import CONTEXT_PARAMETERS
from retrain.algorithms.graph.pipeline import Pipeline
from retrain.algorithms.planning.planning_mask import advantage_split, planning_ratio
from retrain.algorithms.sepa import entropy_metrics
from retrain.algorithms.transforms.token_stages import transform_chain
from retrain.errors import ComponentError
from retrain.registry import Component, bind, find
from retrain.types import Batch, Metrics

# The interface separates a method's own metrics from those of plug-ins, which may have any other name.
_METHOD_METRICS = ("hicra/", "advantage/", "skipped/", "sepa/")


@dataclass(frozen=True)
class ComposedAdvantages:
    """Advantages of one group.

    Attributes:
        token_advs: one list per completion, one number per token.
        stats: metrics of the built-in stages.
        extra_metrics: metrics that plug-ins reported.
    """

    token_advs: list[list[float]]
    stats: Metrics
    extra_metrics: Metrics


def compute_composable_advantages(  # noqa: PLR0913 - the documented call, with every parameter by name
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
    """Compute the advantages of every token in one group of G completions, in float64, with training's pipeline.

    Args:
        rewards_G: [G]; logprobs_G, planning_masks_G: one list per completion, of equal lengths.
        advantage_mode, transform_mode, uncertainty_kind: as in TOML: names, chains, lists of stages, dotted paths.
            "shannon_entropy" and "varentropy" are not possible, because log-probs do not determine them.
        gtpo_beta, hicra_alpha: [gtpo] beta and [hicra] alpha. sepa_lambda: the pooling weight, in [0, 1].
        advantage_params, transform_params: parameters of the advantage, and of the transforms that have them.
        step: training step, from 0.
        lengths_G, correct_G: one per completion; default to the number of log-probs, and to reward > 0.5.
    Raises:
        ComponentError: a name or parameter is unknown.
        UserCodeError: a plug-in returns an invalid result.
        ValueError: the lengths of lists do not agree.
    """
    rows = (rewards_G, logprobs_G, planning_masks_G, lengths_G, correct_G)
    _check_lengths(*rows)
    if not rewards_G:
        return ComposedAdvantages([], {}, {})
    hyper = {"gtpo_beta": gtpo_beta, "hicra_alpha": hicra_alpha}
    credit = [
        bind("advantage", advantage_mode, advantage_params),
        *_transforms(transform_chain(transform_mode), hyper, transform_params or {}),
    ]
    pipeline = _pipeline(credit, bind("uncertainty", uncertainty_kind), hyper)
    return _composed(pipeline, _batch(*rows).replace(step=step, sepa_lambda=sepa_lambda))


def _composed(pipeline: Pipeline, batch: Batch) -> ComposedAdvantages:
    """Return the credit of a batch as rows without padding, with the metrics of plug-ins separate from others."""
    credited, metrics = pipeline.credit(batch)
    planning, mask = credited.column("planning_mask"), batch.response_mask
    metrics |= advantage_split(credited) | planning_ratio(planning, mask)
    metrics |= entropy_metrics(credited.column("uncertainty"), planning, mask)
    method_metrics = {name: value for name, value in metrics.items() if name.startswith(_METHOD_METRICS)}
    # Without the padding, the rows have the lengths that the caller gave.
    rows = [row[kept].tolist() for row, kept in zip(credited.advantages, mask, strict=True)]
    others = {name: value for name, value in metrics.items() if name not in method_metrics}
    return ComposedAdvantages(rows, method_metrics, others)


def _check_lengths(rewards: Sequence[float], *others: Sequence[Any] | None) -> None:
    """Raise ValueError unless every list has an entry per completion, and a planning flag per log-prob."""
    names = ("logprobs_G", "planning_masks_G", "lengths_G", "correct_G")
    for name, values in zip(names, others, strict=True):
        if values is not None and len(values) != len(rewards):
            raise ValueError(f"{name} has {len(values)} entries for {len(rewards)} rewards; give one per completion")
    logprobs, planning = others[0] or (), others[1] or ()
    for i, (row, flags) in enumerate(zip(logprobs, planning, strict=True)):
        if len(row) != len(flags):
            raise ValueError(f"planning_masks_G[{i}] has {len(flags)} entries for {len(row)} log-probs")


def _pipeline(credit: Sequence[Component], uncertainty: Component, hyper: Mapping[str, Any]) -> Pipeline:
    """Resolve the pipeline; ComponentError if a stage reads a column that only a policy can compute."""
    pipeline = Pipeline.resolve(
        credit,
        bind("filter", "none"),  # the caller gets a list for each of its completions
        {"uncertainty": uncertainty}.get,
        observed=("uncertainty",),
        hyper=hyper,
        # Log-probs are the sampler's, so they are those of the old policy, too.
        given=frozenset({"planning_mask", "sepa_lambda", "old_logprobs"}),
    )
    for stage in pipeline.graph:
        if missing := sorted(pipeline.policy_columns.intersection(stage.reads)):
            raise ComponentError(
                f'{stage.kind} "{stage.name}" reads {", ".join(missing)}, which log-probs do not determine',
                "use it in a training run, where the policy computes it",
            )
    return pipeline


def _transforms(chain: Sequence[str], hyper: Mapping[str, Any], params: Mapping[str, Any]) -> tuple[Component, ...]:
    """Bind the stages of a chain to those of `params` that each has; ComponentError if no stage has one of them."""
    components = [find("transform", name) for name in chain]
    # A context-style plug-in gets all parameters in one dict, so it may take any key.
    is_open = any(component.contract == "context" for component in components)
    unknown = [key for key in params if not is_open and all(key not in c.schema.model_fields for c in components)]
    if unknown:
        raise ComponentError(f"transform_params has {', '.join(unknown)}, which no transform of {list(chain)} takes")
    return tuple(component.bind({**_shared(component, hyper), **component.takes(params)}) for component in components)


def _shared(component: Component, hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a component that are among the fields of TransformContext."""
    return {key: hyper[field] for field, (name, key) in CONTEXT_PARAMETERS.items() if name == component.name}


def _batch(
    rewards: Sequence[float],
    logprobs: Sequence[Sequence[float]],
    planning: Sequence[Sequence[int]],
    lengths: Sequence[int] | None,
    correct: Sequence[bool] | None,
) -> Batch:
    """Make a batch of one group without prompts, whose `old_logprobs` are the sampler's."""
    import torch

    from retrain.algorithms.graph.responses import padded, response_batch

    judged = [reward > 0.5 for reward in rewards] if correct is None else correct
    batch = response_batch(logprobs, rewards, judged, [0] * len(rewards), torch.float64)
    flags = padded(planning, batch.response_mask, torch.bool)
    batch = batch.replace(planning_mask=flags, old_logprobs=batch.sampler_logprobs)
    return batch if lengths is None else batch.replace(lengths=torch.tensor(list(lengths)))
