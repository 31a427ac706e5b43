"""Ways of assigning credit by their names: an advantage, transforms behind it, or a whole algorithm."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from retrain.algorithms.graph.pipeline import Pipeline
from retrain.algorithms.transforms.token_stages import CHAINS, transform_chain
from retrain.config.resolve import Resolved
from retrain.errors import ComponentError, did_you_mean
from retrain.functional.seeds import derive_seed
from retrain.registry import Bound, Component, bind, find, is_dotted, names
from retrain.registry.component import MARK
from retrain.registry.lookup import load_object
from retrain.run.loop import seed_generators
from retrain.run.run_context import RunContext
from retrain.types import POLICY_COLUMNS, Batch, State

if TYPE_CHECKING:
    from torch import Tensor

BASELINE, ORACLE = "grpo", "oracle"
USUAL = (
    *(BASELINE, "grpo_std", "rloo", "maxrl", "reinforce_pp", "grpo_lp", "dca", "dca_rloo"),
    *("gtpo", "hicra", "hicra_entropy", "gtpo_hicra", "whiten"),
)
"""What is audited unless methods are named."""
GIVEN = frozenset({"token_values", "planning_mask"}) | POLICY_COLUMNS
"""Columns that all methods share, computed once."""


class Method:
    """A pipeline whose components stand as the run's checkpoint left them, before every batch.

    Args:
        name: names with "+" between them: at most one advantage, in front, and transforms; or one algorithm. Without
            an advantage the transforms work on that of the baseline.
    Raises:
        ComponentError: there is no such component.
    """

    def __init__(self, context: RunContext, name: str) -> None:
        config = context.config
        chain = chain_of(context.components, name.split("+"), config.plugins.search_paths)
        own = context.components.stages()
        stages = replace(own, advantage=chain[0], transforms=chain[1], algorithm=chain[2], observed=())
        if (own.advantage, own.transforms, own.algorithm) == chain:
            self._pipeline = context.pipeline
        else:
            self._pipeline = Pipeline.resolve(stages, context.components.signal, GIVEN)
            self._pipeline.build(context.resources)
        known = context.pipeline.stateful
        self._states: dict[str, State] = {
            name: copy.deepcopy(known.get(name, part).state_dict()) for name, part in self._pipeline.stateful.items()
        }
        self._seed = config.training.seed

    def __call__(self, batch: Batch, index: int) -> Tensor:
        """Advantages [N, T] of batch number `index`, as the checkpoint's next training step would have them."""
        for name, state in self._states.items():
            self._pipeline.stateful[name].load_state_dict(copy.deepcopy(state))
        seed_generators(derive_seed(self._seed, "audit", batch.step, index))
        self._pipeline.before(batch)
        return self._pipeline.credit(batch)[0].advantages


def own_method(components: Resolved) -> str:
    """The name of what the run itself uses."""
    stages = components.stages()
    chain = (stages.algorithm,) if stages.algorithm else (stages.advantage, *stages.transforms)
    return "+".join(stage.name for stage in chain if stage)


def chain_of(
    components: Resolved, words: Sequence[str], search_paths: Sequence[str]
) -> tuple[Bound | None, tuple[Bound, ...], Bound | None]:
    """(advantage, transforms, algorithm) that the words name, with the parameters of the run's tables."""
    found = [one for word in words for one in _bound(components, word, search_paths)]
    kinds = [one.component.kind for one in found]
    if kinds == ["algorithm"]:
        return None, (), found[0]
    if "algorithm" in kinds or "advantage" in kinds[1:]:
        problem = f'"{"+".join(words)}" is no advantage with transforms behind it'
        raise ComponentError(
            problem, 'write ADVANTAGE, TRANSFORM, ADVANTAGE+TRANSFORM or ALGORITHM, such as "grpo+gtpo"'
        )
    if "advantage" not in kinds:
        found = [*_bound(components, BASELINE, search_paths), *found]
    return found[0], tuple(found[1:]), None


def _bound(components: Resolved, word: str, search_paths: Sequence[str]) -> list[Bound]:
    """The components of one word: several for a documented chain."""
    own = [one for one in components.every() if one.name == word and one.component.kind in _KINDS]
    if own:
        return own[:1]
    if word in CHAINS:
        return [one for stage in transform_chain(word) for one in _bound(components, stage, search_paths)]
    for kind in _KINDS:
        if (one := components.named(kind, word)) is not None:
            return [one]
    if is_dotted(word):
        return [bind(_kind(word, search_paths), word, search_paths=search_paths)]
    every = [*CHAINS, *(name for kind in _KINDS for name in names(kind))]
    raise ComponentError(f'no method is called "{word}"', did_you_mean(word, every, f"known: {', '.join(every)}"))


_KINDS = ("advantage", "transform", "algorithm")


def _kind(path: str, search_paths: Sequence[str]) -> str:
    """What a function of the user's is: what its decorator says, else an advantage if it takes rewards first."""
    target = load_object(path, search_paths)
    if isinstance(mark := getattr(target, MARK, None), Component):
        return mark.kind
    first = next(iter(inspect.signature(target).parameters), "") if callable(target) else ""
    return find("advantage" if first.startswith("reward") else "transform", path, search_paths).kind
