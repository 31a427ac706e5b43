"""Methods of credit assignment by name: an advantage with transforms, or an algorithm."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from retrain.algorithms.transforms.token_stages import CHAINS, transform_chain
from retrain.api import RunContext, seed_generators
from retrain.config.loaded_config import LoadedConfig
from retrain.errors import ComponentError, did_you_mean
from retrain.functional.seeds import derive_seed
from retrain.lab.controls import PLACEBO
from retrain.registry import Component, bind, find, is_dotted, names
from retrain.registry.component import MARK
from retrain.registry.lookup import load_object
from retrain.types import POLICY_COLUMNS, Batch, State

if TYPE_CHECKING:
    from torch import Tensor

BASELINE, ORACLE = "grpo", "oracle"
DEFAULT_METHODS = (
    *(BASELINE, "grpo_std", "rloo", "maxrl", "reinforce_pp", "grpo_lp", "dca", "dca_rloo"),
    *("gtpo", "hicra", "hicra_entropy", "gtpo_hicra", "whiten"),
)
"""Methods that are audited if none is named, besides the run's own."""
SHARED_COLUMNS = frozenset({"token_values", "planning_mask"}) | POLICY_COLUMNS
"""Columns that are computed once for all methods."""


class Method:
    """A method of credit assignment; its components have the state of the run's checkpoint before every batch.

    Args:
        context: the reopened run.
        name: an advantage or an algorithm, and transforms, joined by "+". Without either the transforms use the
            baseline's advantage.
    Raises:
        ComponentError: there is no such component, or the name is not a valid combination.
    """

    def __init__(self, context: RunContext, name: str) -> None:
        chain = chain_of(context.trained.plan, name.split("+"))
        # The run's own pipeline has the state of its checkpoint, such as running means.
        if chain == context.trained.plan.credit:
            self._pipeline = context.trained.pipeline
        else:
            self._pipeline = context.trained.plan.pipeline_of(credit=chain, given=SHARED_COLUMNS)
            self._pipeline.build(context.trained.resources)
        restored = context.trained.pipeline.stateful
        self._states: dict[str, State] = {
            # A component that the run lacks starts in its own initial state.
            name: copy.deepcopy(restored.get(name, part).state_dict())
            for name, part in self._pipeline.stateful.items()
        }
        self._seed = context.config.training.seed

    def __call__(self, batch: Batch, index: int) -> Tensor:
        """Compute advantages [N, T] of batch number `index`, as the next training step after the checkpoint would."""
        for name, state in self._states.items():
            # Every batch is the next step after the checkpoint, not the one after the batch before.
            self._pipeline.stateful[name].load_state_dict(copy.deepcopy(state))
        seed_generators(derive_seed(self._seed, "audit", batch.step, index))
        self._pipeline.before(batch)
        return self._pipeline.credit(batch)[0].advantages


def own_method(loaded: LoadedConfig) -> str:
    """Return the name of the run's own method."""
    return "+".join(stage.name for stage in loaded.credit)


def chain_of(loaded: LoadedConfig, words: Sequence[str]) -> tuple[Component, ...]:
    """Find the stages of a method, with the parameters of the run's configuration; see `LoadedConfig.credit`.

    Args:
        loaded: configuration of the run.
        words: the parts of the method's name between "+".
    Raises:
        ComponentError: there is no such component, or they are not a valid combination.
    """
    if words == [stage.name for stage in loaded.credit]:
        return loaded.credit
    stages: list[Component] = []
    for position, word in enumerate(words):
        chain = transform_chain(word)
        # "sepa" names a chain, whose first stage has the same name: "sepa+gtpo" has both stages already.
        spelled_out = len(chain) > 1 and [*chain] == words[position : position + len(chain)]
        stages += [_stage(loaded, name) for name in ([word] if spelled_out else chain)]
    if [stage.name for stage in stages].count(PLACEBO) > 1:
        problem = f'"{PLACEBO}" twice has the same order twice, which is no random order'
        raise ComponentError(problem, f"write {PLACEBO} once")
    # Only the first part can make credit; transforms change what is there.
    if any(stage.kind != "transform" for stage in stages[1:]):
        problem = f'"{"+".join(words)}" is not an advantage or an algorithm with transforms after it'
        fix = 'write ADVANTAGE, ALGORITHM or TRANSFORM, and after it +TRANSFORM, such as "grpo+gtpo"'
        raise ComponentError(problem, fix)
    # The chain "none" has no stage: the baseline alone.
    baseline = [] if stages and stages[0].kind != "transform" else [_stage(loaded, BASELINE)]
    return (*baseline, *stages)


def _stage(loaded: LoadedConfig, word: str) -> Component:
    """Find the component of this name, or at this dotted path."""
    of_the_run = [stage for stage in loaded.slots.values() if stage.name == word and stage.kind in _KINDS]
    # With the parameters of the run's configuration, not the defaults.
    if of_the_run:
        return of_the_run[0]
    for kind in _KINDS:
        if (stage := loaded.named(kind, word)) is not None:
            return stage
    if is_dotted(word):
        search_paths = loaded.config.plugins.search_paths
        return bind(_kind(word, search_paths), word, search_paths=search_paths)
    every = [*CHAINS, *(name for kind in _KINDS for name in names(kind))]
    raise ComponentError(f'there is no method "{word}"', did_you_mean(word, every, f"known: {', '.join(every)}"))


_KINDS = ("advantage", "transform", "algorithm")


def _kind(path: str, search_paths: Sequence[str]) -> str:
    """Return the kind of a user's function.

    The decorator determines it. Without one, a function is an advantage if its first parameter begins with "reward",
    and a transform otherwise.
    """
    target = load_object(path, search_paths)
    if isinstance(mark := getattr(target, MARK, None), Component):
        return mark.kind
    # A transform takes the advantages first, and an advantage makes them from rewards.
    first = next(iter(inspect.signature(target).parameters), "") if callable(target) else ""
    return find("advantage" if first.startswith("reward") else "transform", path, search_paths).kind
