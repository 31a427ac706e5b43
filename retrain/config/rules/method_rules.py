"""Warnings about combinations in which a part of a published method has no effect, by traits of the components."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from retrain import registry
from retrain.algorithms.graph.column_graph import Stage
from retrain.config.resolve import Resolved, brings, is_correction, reward_columns
from retrain.config.schema import Config
from retrain.registry import Bound, Finding
from retrain.registry.traits import AdvantageTraits, TransformTraits

_ADVANTAGE = ("algorithm", "advantage_mode")
_TRANSFORMS = ("algorithm", "transform_mode")
_FILTER = ("algorithm", "filter")
_LATE = 'use filter = "uninformative", which reads advantages'


def trust_regions(config: Config, resolved: Resolved) -> Iterator[Finding]:
    """Warn about a trust region if a step has a single update, in which every ratio is 1."""
    if config.training.epochs * config.training.minibatches > 1:
        return
    for index, term in enumerate(resolved.all("loss")):
        if term.params["weight"] != 0 and registry.loss.traits_of(term.component).trust_region:
            problem = f'"{term.name}" acts from the second update of a batch on, and a batch has one: every ratio is 1'
            fix = "set [training] epochs or minibatches to at least 2"
            yield Finding(("loss", index, "name"), problem, fix, fatal=False)


def replaced_advantage(config: Config, resolved: Resolved) -> Iterator[Finding]:
    """Warn about an `advantage_mode` in the file that a transform replaces."""
    used = resolved.contributing
    if _ADVANTAGE in resolved.written and not any(stage.kind in ("advantage", "algorithm") for stage in used):
        first = next((stage.name for stage in used if stage.kind == "transform"), None)
        if first is not None:
            problem = f'has no effect: "{first}" replaces the advantages'
            yield Finding(_ADVANTAGE, problem, "remove one of the two", fatal=False)


def decoupled_rewards(config: Config, resolved: Resolved) -> Iterator[Finding]:
    """Require as many rewards, or parts of their scores, as an advantage compares."""
    count = len(reward_columns(resolved.all("reward")))
    for slot, one in resolved.slots.items():
        if slot.kind == "advantage" and count < registry.advantage.traits_of(one.component).least_rewards:
            problem = f"{one.name} normalises each reward on its own, and the run has {count}"
            fix = 'list two [[rewards]] at least, or a judge with a rubric, or use advantage_mode = "grpo_std"'
            yield Finding(slot.path, problem, fix)


def graded_rewards(config: Config, resolved: Resolved) -> Iterator[Finding]:
    """Warn about a reward by degrees if credit reads correctness alone, which is a score above 0.5."""
    reads = {*resolved.objective(exact=False).reads, *(name for stage in resolved.contributing for name in stage.reads)}
    if "correct" not in reads or {"rewards", "reward_parts", "turn_rewards"} & reads:
        return
    traits = [registry.reward.traits_of(one.component) for one in resolved.all("reward")]
    first = next((index for index, one in enumerate(traits) if one.correctness), 0)
    if traits and traits[first].graded:
        name = resolved.all("reward")[first].name
        credit = next(stage.name for stage in resolved.contributing if "correct" in stage.reads)
        problem = f'"{credit}" reads correctness alone, which is a score of "{name}" above 0.5'
        yield Finding(
            ("rewards", first, "name"), problem, "use credit that reads the rewards, as grpo does", fatal=False
        )


def normalized_twice(config: Config, resolved: Resolved) -> Iterator[Finding]:
    """Warn if advantages are divided by a standard deviation twice."""
    scaled = [stage for stage in _credit(resolved) if _has_unit_variance(stage.bound)]
    for earlier, following in pairwise(scaled):
        problem = f'"{following.name}" divides by a standard deviation, and "{earlier.name}" has done so already'
        fix = f"remove {following.name}, or choose an advantage that does not divide by a standard deviation"
        yield Finding(_TRANSFORMS, problem, fix, fatal=False)


def removed_mean(config: Config, resolved: Resolved) -> Iterator[Finding]:
    """Warn if a transform subtracts a mean of advantages that carries information."""
    stages = _credit(resolved)
    for place, stage in enumerate(stages):
        following = [one for one in stages[place + 1 :] if _has_unit_variance(one.bound)]
        if following and _traits(stage).mean_matters:
            name = following[0].name
            problem = f'"{name}" subtracts the mean of the advantages, which carries information in "{stage.name}"'
            yield Finding(_TRANSFORMS, problem, f"remove {name}", fatal=False)


def bounds_in_deviations(config: Config, resolved: Resolved) -> Iterator[Finding]:
    """Warn about bounds in units of the advantages' standard deviation without advantages of unit variance."""
    stages = _credit(resolved)
    for place, stage in enumerate(stages):
        traits = _traits(stage)
        wants = isinstance(traits, TransformTraits) and traits.wants_unit_variance
        if wants and not any(_has_unit_variance(one.bound) for one in stages[:place]):
            problem = f'the bounds of "{stage.name}" are for advantages of unit variance, which these do not have'
            fix = f'use advantage_mode = "grpo_std", or put "whiten" before {stage.name}'
            yield Finding(_TRANSFORMS, problem, fix, fatal=False)


def unscaled_returns(config: Config, resolved: Resolved) -> Iterator[Finding]:
    """Warn if advantages from a critic are not whitened, since trust region and learning rate assume unit scale."""
    stages = _credit(resolved)
    for place, stage in enumerate(stages):
        traits = _traits(stage)
        scaled = any(_has_unit_variance(one.bound) for one in stages[place + 1 :])
        if isinstance(traits, TransformTraits) and traits.returns and not scaled:
            problem = f'"{stage.name}" has the scale of the rewards, and shrinks as the critic learns'
            yield Finding(_TRANSFORMS, problem, f'put "whiten" after {stage.name}', fatal=False)


def one_discount(config: Config, resolved: Resolved) -> Iterator[Finding]:
    """Warn if a transform and the critic whose values it reads have different discount factors."""
    for stage in _credit(resolved):
        for one in filter(None, map(resolved.signal, stage.reads)):
            own, other = (found.params.get("gamma") for found in (stage.bound, one))
            if None not in (own, other) and own != other:
                tables = stage.bound.component.table, one.component.table
                problem = f"gamma is {own:g} in [{tables[0]}] and {other:g} in [{tables[1]}]"
                yield Finding(_TRANSFORMS, problem, "set both to the same value", fatal=False)


def two_references(config: Config, resolved: Resolved) -> Iterator[Finding]:
    """Warn about a KL penalty towards the initial policy together with distillation from a teacher."""
    traits = [(stage.name, _traits(stage)) for stage in _credit(resolved)]
    taught = [name for name, one in traits if isinstance(one, TransformTraits) and one.imitates]
    objective = resolved.objective(exact=False)
    signals = [one for name in objective.signals if (one := resolved.signal(name))]
    blind = {one.name for one in signals if not registry.signal.traits_of(one.component).judges}
    pulled = [term.name for term in objective.terms if blind & {*term.reads}]
    if taught and pulled:
        problem = f'"{pulled[0]}" pulls back to the initial policy, and "{taught[0]}" towards the teacher'
        yield Finding(("loss",), problem, f"set the weight of {pulled[0]} to 0", fatal=False)


def equal_rewards(config: Config, resolved: Resolved) -> Iterator[Finding]:
    """Warn about a filter that drops groups by their outcomes although credit has other sources than outcomes."""
    group_filter = resolved.one("filter")
    if not (registry.filter.traits_of(group_filter.component).drops and resolved.pipeline.judges_rollouts):
        return
    for stage in _credit(resolved):
        traits = _traits(stage)
        if isinstance(traits, TransformTraits) and traits.beyond_rewards:
            problem = f'"{group_filter.name}" drops groups by their outcomes, although "{stage.name}" gives them credit'
            yield Finding(_FILTER, problem, _LATE, fatal=False)


def resampled_statistics(config: Config, resolved: Resolved) -> Iterator[Finding]:
    """Warn about an advantage that uses statistics of the batch if they depend on the groups that a filter drops."""
    early = registry.filter.traits_of(resolved.one("filter").component).drops and resolved.pipeline.judges_rollouts
    for stage in _credit(resolved) if config.rollout.resamples or early else ():
        traits = _traits(stage)
        if isinstance(traits, AdvantageTraits) and traits.batch_statistics:
            key, fix = (
                (("rollout", "resample"), 'use resample = "none"') if config.rollout.resamples else (_FILTER, _LATE)
            )
            problem = f'"{stage.name}" divides by the deviation of the groups that the filter has kept by then'
            yield Finding(key, problem, fix, fatal=False)


def nothing_to_correct(config: Config, resolved: Resolved) -> Iterator[Finding]:
    """Warn about a correction for the sampler if the sampler's log-probs equal the trainer's."""
    engines = resolved.engines(config.model.path)
    exact = bool(engines) and all(registry.engine.traits_of(one.component).exact for one in engines)
    older = config.rollout.ahead or any(brings(one, "rollouts") for one in resolved.all("source"))
    for stage in resolved.all("transform") if exact and not older else ():
        if is_correction(stage) and _TRANSFORMS in resolved.written:
            name = engines[0].name
            problem = f'"{stage.name}" has nothing to correct: log-probs of engine "{name}" equal the trainer\'s'
            fix = f"remove {stage.name}, or sample ahead with [rollout] overlap"
            yield Finding(_TRANSFORMS, problem, fix, fatal=False)


def _credit(resolved: Resolved) -> list[Stage]:
    """Return the stages that compute the advantages, in order, without the trailing corrections."""
    kinds = ("advantage", "transform")
    return [one for one in resolved.contributing if one.kind in kinds and one.writes in ("episode", "advantages")]


def _traits(stage: Stage) -> AdvantageTraits | TransformTraits:
    kind = registry.advantage if stage.kind == "advantage" else registry.transform
    return kind.traits_of(stage.bound.component)


def _has_unit_variance(bound: Bound) -> bool:
    """Return True if a component divides by a standard deviation, given its parameters."""
    kind = registry.advantage if bound.component.kind == "advantage" else registry.transform
    found = kind.traits_of(bound.component).unit_variance
    return bool(bound.params[found]) if isinstance(found, str) else found
